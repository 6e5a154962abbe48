{{/* The scheduler's container: variables, volumes, probes. */}}

{{- define "octavo.scheduler.hasKeys" -}}
{{- if or .Values.apiKeys.existingSecret .Values.apiKeys.inline }}true{{ end -}}
{{- end -}}

{{/* Where its model comes from: a volume, or (of the hub) its own download. */}}
{{- define "octavo.scheduler.hasModels" -}}
{{- if or (ne .Values.model.source "fetch") (include "octavo.model.schedulerFetches" .) }}true{{ end -}}
{{- end -}}

{{- define "octavo.scheduler.env" -}}
- name: OCTAVO_SCHEDULER_MODEL
  value: {{ .Values.model.name | quote }}
- name: OCTAVO_SCHEDULER_MODEL_STORE
  value: /models
- name: OCTAVO_SCHEDULER_LISTEN
  value: "{{ .Values.bindAddress }}:50051"
- name: OCTAVO_SCHEDULER_EXECUTORS
  value: "dns:///{{ include "octavo.host" (dict "root" . "part" "executor") }}:{{ .Values.executor.port }}"
- name: OCTAVO_SCHEDULER_GRACE_SECONDS
  value: {{ .Values.scheduler.drainSeconds | toJson | quote }}
{{- if .Values.metrics.enabled }}
- name: OCTAVO_SCHEDULER_METRICS_LISTEN
  value: "{{ .Values.bindAddress }}:{{ .Values.metrics.port }}"
{{- end }}
{{- if .Values.tls.scheduler.enabled }}
- name: OCTAVO_SCHEDULER_TLS_CERT
  value: /etc/octavo/server/tls.crt
- name: OCTAVO_SCHEDULER_TLS_KEY
  value: /etc/octavo/server/tls.key
{{- if .Values.tls.scheduler.mutual }}
- name: OCTAVO_SCHEDULER_TLS_CLIENT_CA
  value: /etc/octavo/client-ca/ca.crt
{{- end }}
{{- else }}
- name: OCTAVO_SCHEDULER_INSECURE_BIND
  value: "true"
{{- end }}
{{- if .Values.tls.executors.enabled }}
- name: OCTAVO_SCHEDULER_EXECUTOR_CA
  value: /etc/octavo/executors/ca.crt
- name: OCTAVO_SCHEDULER_EXECUTOR_CERT
  value: /etc/octavo/executors/tls.crt
- name: OCTAVO_SCHEDULER_EXECUTOR_KEY
  value: /etc/octavo/executors/tls.key
{{- with .Values.tls.executors.serverName }}
- name: OCTAVO_SCHEDULER_EXECUTOR_SERVER_NAME
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- if include "octavo.scheduler.hasKeys" . }}
- name: OCTAVO_SCHEDULER_API_KEYS
  value: /etc/octavo/keys/{{ .Values.apiKeys.key }}
{{- end }}
- name: HF_HOME
  value: /tmp/huggingface
{{- if not (include "octavo.scheduler.hasModels" .) }}
{{- if .Values.model.fetch.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.fetch.hubTokenSecret }}
      key: {{ .Values.model.fetch.hubTokenKey }}
{{- end }}
{{- with .Values.model.fetch.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- include "octavo.telemetry" (dict "root" . "part" "scheduler") }}
{{- include "octavo.config" (dict "config" .Values.scheduler.config "prefix" "OCTAVO_SCHEDULER_") }}
{{- with .Values.scheduler.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "octavo.scheduler.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if include "octavo.scheduler.hasModels" . }}
{{ include "octavo.model.mount" . }}
{{- end }}
{{- if .Values.tls.scheduler.enabled }}
- name: server
  mountPath: /etc/octavo/server
  readOnly: true
{{- if .Values.tls.scheduler.mutual }}
- name: client-ca
  mountPath: /etc/octavo/client-ca
  readOnly: true
{{- end }}
{{- end }}
{{- include "octavo.tls.clientMounts" . }}
{{- if .Values.tls.executors.enabled }}
- name: executors
  mountPath: /etc/octavo/executors
  readOnly: true
{{- end }}
{{- if include "octavo.scheduler.hasKeys" . }}
- name: keys
  mountPath: /etc/octavo/keys
  readOnly: true
{{- end }}
{{- end -}}

{{- define "octavo.scheduler.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if include "octavo.scheduler.hasModels" . }}
{{- include "octavo.model.volume" (dict "root" . "claim" false) }}
{{- end }}
{{- if .Values.tls.scheduler.enabled }}
{{ include "octavo.secretVolume" (dict "name" "server" "secret" (include "octavo.tls.schedulerServer" .)) }}
{{- if .Values.tls.scheduler.mutual }}
{{ include "octavo.caVolume" (dict "name" "client-ca" "secret" (include "octavo.tls.schedulerClientCa" .)) }}
{{- end }}
{{- end }}
{{- include "octavo.tls.clientVolumes" . }}
{{- if .Values.tls.executors.enabled }}
{{ include "octavo.secretVolume" (dict "name" "executors" "secret" (include "octavo.tls.executorsClient" .)) }}
{{- end }}
{{- if include "octavo.scheduler.hasKeys" . }}
- name: keys
  secret:
    secretName: {{ default (include "octavo.name" (dict "root" . "part" "api-keys")) .Values.apiKeys.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .Values.apiKeys.key }}
        path: {{ .Values.apiKeys.key }}
{{- end }}
{{- end -}}

{{/* Arguments of the command that asks for its health over TLS, as a JSON list. */}}
{{- define "octavo.scheduler.probe" -}}
{{- $arguments := list "--server-name" (include "octavo.tls.schedulerName" .) -}}
{{- if .Values.tls.scheduler.privateCa -}}
{{- $arguments = concat $arguments (list "--ca-file" "/etc/octavo/scheduler-ca/ca.crt") -}}
{{- end -}}
{{- if .Values.tls.scheduler.mutual -}}
{{- $arguments = concat $arguments (list "--cert-file" "/etc/octavo/scheduler-client/tls.crt" "--key-file" "/etc/octavo/scheduler-client/tls.key") -}}
{{- end -}}
{{- toJson $arguments -}}
{{- end -}}

{{- define "octavo.scheduler.lives" -}}
{{- if .Values.metrics.enabled }}
httpGet:
  path: /metrics
  port: metrics
timeoutSeconds: 10
{{- else }}
tcpSocket:
  port: grpc
timeoutSeconds: 5
{{- end }}
{{- end -}}
