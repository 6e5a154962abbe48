{{/* The executor's pods, the same under a StatefulSet and a LeaderWorkerSet. */}}

{{/* Whether an executor is a group of pods; then the first one speaks for all. */}}
{{- define "octavo.executor.isGroup" -}}
{{- if and .Values.executor.leaderWorkerSet.enabled (gt (int .Values.executor.leaderWorkerSet.size) 1) }}true{{ end -}}
{{- end -}}

{{/* Ranks of an executor: one for each GPU of all its pods. */}}
{{- define "octavo.executor.ranks" -}}
{{- mul (int .Values.executor.gpu.count) (ternary (int .Values.executor.leaderWorkerSet.size) 1 .Values.executor.leaderWorkerSet.enabled) -}}
{{- end -}}

{{/* Selects all pods of executors, those that speak and those that follow. */}}
{{- define "octavo.executor.selector" -}}
{{- if include "octavo.executor.isGroup" . -}}
matchLabels:
  {{- include "octavo.selectorOfAll" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [executor, executor-worker]
{{- else -}}
matchLabels:
  {{- include "octavo.selector" (dict "root" . "part" "executor") | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* A LeaderWorkerSet makes a service of its own name, which has the addresses of all its pods,
     ready or not: that must not be the one that schedulers look at. */}}
{{- define "octavo.executor.setName" -}}
{{- include "octavo.name" (dict "root" . "part" (ternary "executor-groups" "executor" .Values.executor.leaderWorkerSet.enabled)) -}}
{{- end -}}

{{/* Takes (dict "root" $ "part" PART): the executor, or an executor-worker, a further pod of a
     group, which nobody connects to but its group. */}}
{{- define "octavo.executor.template" -}}
{{- $part := . -}}
{{- $speaks := eq .part "executor" -}}
{{- with .root -}}
metadata:
  labels:
    {{- include "octavo.podLabels" $part | nindent 4 }}
  annotations:
    kubectl.kubernetes.io/default-container: executor
    {{- with .Values.executor.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "octavo.pod" (dict "root" . "part" $part.part "account" "executor" "values" .Values.executor) | nindent 2 }}
  {{- with .Values.executor.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "octavo.terminationSeconds" .Values.executor }}
  {{- if include "octavo.model.fetches" . }}
  initContainers:
    {{- include "octavo.model.fetch" . | nindent 4 }}
  {{- end }}
  containers:
    - name: executor
      image: {{ include "octavo.executor.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if include "octavo.executor.isGroup" . }}
      # Its controller sets the address and the index.
      command: [torchrun]
      args:
        {{- include "octavo.executor.torchrun" . | fromJsonArray | toYaml | nindent 8 }}
      {{- end }}
      env:
        {{- include "octavo.executor.env" (dict "root" . "speaks" $speaks) | trim | nindent 8 }}
      {{- if $speaks }}
      ports:
        - name: grpc
          containerPort: {{ .Values.executor.port }}
        {{- if .Values.metrics.enabled }}
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
        {{- end }}
      {{- $check := dict "port" .Values.executor.port "tls" .Values.tls.executors.enabled "arguments" (include "octavo.executor.probe" . | fromJsonArray) }}
      # NOT_SERVING while the model loads, while a step hangs, and while draining; SERVING under load.
      startupProbe:
        {{- include "octavo.healthCheck" $check | trim | nindent 8 }}
        periodSeconds: 10
        failureThreshold: {{ div (add .Values.executor.startupSeconds 9) 10 }}
      livenessProbe:
        {{- include "octavo.healthCheck" $check | trim | nindent 8 }}
        periodSeconds: 20
        failureThreshold: 3
      readinessProbe:
        {{- include "octavo.healthCheck" $check | trim | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 2
      {{- end }}
      {{- with include "octavo.lifecycle" .Values.executor | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      resources:
        {{- include "octavo.executor.resources" . | nindent 8 }}
      securityContext:
        {{- include "octavo.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- include "octavo.model.mount" . | nindent 8 }}
        {{- if and $speaks .Values.tls.executors.enabled }}
        - name: server
          mountPath: /etc/octavo/server
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ .Values.executor.cacheSize }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.executor.shmSize }}
    {{- with include "octavo.model.volume" (dict "root" . "claim" .Values.model.fetch.persistence.enabled) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if and $speaks .Values.tls.executors.enabled }}
    {{- include "octavo.secretVolume" (dict "name" "server" "secret" (include "octavo.tls.executorsServer" .)) | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Starts a pod's share of the ranks of a group. A rank but the first ends when the first says
     so, so it is given until after the first one's drain. */}}
{{- define "octavo.executor.torchrun" -}}
{{- list "--nnodes" (toString .Values.executor.leaderWorkerSet.size) "--node-rank" "$(LWS_WORKER_INDEX)" "--nproc-per-node" (toString .Values.executor.gpu.count) "--master-addr" "$(LWS_LEADER_ADDRESS)" "--master-port" "29500" "--shutdown-timeout" (toString (add .Values.executor.drainSeconds 5)) "-m" "executor_svc" | toJson -}}
{{- end -}}

{{/* Takes (dict "root" $ "speaks" BOOL): whether others connect to it. */}}
{{- define "octavo.executor.env" -}}
{{- $speaks := .speaks -}}
{{- with .root -}}
- name: OCTAVO_EXECUTOR_MODEL
  value: {{ .Values.model.name | quote }}
- name: OCTAVO_EXECUTOR_MODEL_STORE
  value: /models
- name: OCTAVO_EXECUTOR_DEVICE
  value: {{ ternary "cuda" "cpu" (eq .Values.device "gpu") }}
{{- if gt (int (include "octavo.executor.ranks" .)) 1 }}
- name: OCTAVO_EXECUTOR_TENSOR_PARALLEL_SIZE
  value: {{ include "octavo.executor.ranks" . | quote }}
{{- end }}
- name: OCTAVO_EXECUTOR_GRACE_SECONDS
  value: {{ .Values.executor.drainSeconds | toJson | quote }}
{{- if $speaks }}
- name: OCTAVO_EXECUTOR_LISTEN
  value: "{{ .Values.bindAddress }}:{{ .Values.executor.port }}"
{{- if .Values.metrics.enabled }}
- name: OCTAVO_EXECUTOR_METRICS_LISTEN
  value: "{{ .Values.bindAddress }}:{{ .Values.metrics.port }}"
{{- end }}
{{- if .Values.tls.executors.enabled }}
- name: OCTAVO_EXECUTOR_TLS_CERT
  value: /etc/octavo/server/tls.crt
- name: OCTAVO_EXECUTOR_TLS_KEY
  value: /etc/octavo/server/tls.key
- name: OCTAVO_EXECUTOR_TLS_CLIENT_CA
  value: /etc/octavo/server/ca.crt
{{- else }}
- name: OCTAVO_EXECUTOR_INSECURE_BIND
  value: "true"
{{- end }}
{{- end }}
{{- if and (eq .Values.device "cpu") (not (hasKey .Values.executor.config "numThreads")) }}
# A process sees all CPUs of its node, whatever its limit is.
- name: OCTAVO_EXECUTOR_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: executor
      resource: limits.cpu
{{- end }}
- name: XDG_CACHE_HOME
  value: /tmp/cache
- name: TRITON_CACHE_DIR
  value: /tmp/cache/triton
{{- include "octavo.telemetry" (dict "root" . "part" "executor") }}
{{- include "octavo.config" (dict "config" .Values.executor.config "prefix" "OCTAVO_EXECUTOR_") }}
{{- with .Values.executor.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "octavo.executor.resources" -}}
{{- $resources := deepCopy .Values.executor.resources -}}
{{- if eq .Values.device "gpu" -}}
{{- $gpus := dict .Values.executor.gpu.resourceName (int .Values.executor.gpu.count) -}}
{{- $_ := set $resources "requests" (merge (deepCopy $gpus) (default (dict) $resources.requests)) -}}
{{- $_ := set $resources "limits" (merge (deepCopy $gpus) (default (dict) $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "octavo.executor.probe" -}}
{{- list "--server-name" (include "octavo.tls.executorsName" .) "--ca-file" "/etc/octavo/server/ca.crt" "--cert-file" "/etc/octavo/server/tls.crt" "--key-file" "/etc/octavo/server/tls.key" | toJson -}}
{{- end -}}
