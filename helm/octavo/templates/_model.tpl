{{/* Where pods find the model: a store at /models, with one folder for each. */}}

{{- define "octavo.model.fetches" -}}
{{- if eq .Values.model.source "fetch" }}true{{ end -}}
{{- end -}}

{{/* Whether the scheduler needs the executor's command to have the model: of the hub it reads
     configuration and tokenizer by itself, without the weights. */}}
{{- define "octavo.model.schedulerFetches" -}}
{{- if and (eq .Values.model.source "fetch") (not (contains "/" .Values.model.name)) }}true{{ end -}}
{{- end -}}

{{/* Takes (dict "root" $ "claim" BOOL): whether a claim of the pod's own is there for it. */}}
{{- define "octavo.model.volume" -}}
{{- if eq .root.Values.model.source "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .root.Values.model.pvc.claimName }}
    readOnly: true
{{- else if eq .root.Values.model.source "hostPath" }}
- name: models
  hostPath:
    path: {{ .root.Values.model.hostPath.path }}
    type: Directory
{{- else if eq .root.Values.model.source "image" }}
- name: models
  image:
    reference: {{ .root.Values.model.image.reference }}
    pullPolicy: {{ .root.Values.model.image.pullPolicy }}
{{- else if not .claim }}
- name: models
  emptyDir:
    sizeLimit: {{ .root.Values.model.fetch.sizeLimit }}
{{- end }}
{{- end -}}

{{- define "octavo.model.mount" -}}
- name: models
  readOnly: true
{{- if eq .Values.model.source "image" }}
  mountPath: /models/{{ .Values.model.name | replace "/" "--" }}
{{- else }}
  mountPath: /models
{{- if eq .Values.model.source "pvc" }}
{{- with .Values.model.pvc.subPath }}
  subPath: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The init container that downloads the model into its volume. */}}
{{- define "octavo.model.fetch" -}}
- name: fetch-model
  image: {{ include "octavo.executor.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [octavo, model, fetch]
  args: [{{ .Values.model.name | quote }}]
  env:
    - name: OCTAVO_MODEL_STORE
      value: /models
    - name: HF_HOME
      value: /tmp/huggingface
    {{- if .Values.model.fetch.hubTokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .Values.model.fetch.hubTokenSecret }}
          key: {{ .Values.model.fetch.hubTokenKey }}
    {{- end }}
    {{- with .Values.model.fetch.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.model.fetch.resources | nindent 4 }}
  securityContext:
    {{- include "octavo.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: tmp
      mountPath: /tmp
{{- end -}}
