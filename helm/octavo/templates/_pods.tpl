{{/* What all pods have in common. */}}

{{/* The start of a pod's spec. Takes (dict "root" $ "part" NAME "values" VALUES-OF-THE-SERVICE),
     and "account", the part whose service account it has, where that is another one. */}}
{{- define "octavo.pod" -}}
{{- $v := .values -}}
serviceAccountName: {{ include "octavo.serviceAccountName" (dict "root" .root "part" (default .part .account)) }}
automountServiceAccountToken: false
# Else Kubernetes sets variables that begin as our own do, for services of these names.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.podSecurity.runAsUser }}
  runAsUser: {{ . }}
  {{- end }}
  {{- with .root.Values.podSecurity.runAsGroup }}
  runAsGroup: {{ . }}
  {{- end }}
  {{- with .root.Values.podSecurity.fsGroup }}
  fsGroup: {{ . }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $v.topologySpreadKey }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $v.topologySpreadKey }}
    whenUnsatisfiable: {{ $v.topologySpreadPolicy }}
    labelSelector:
      matchLabels:
        {{- include "octavo.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "octavo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Seconds from the order to end to SIGKILL: before SIGTERM, the drain, and the exit. */}}
{{- define "octavo.terminationSeconds" -}}
{{- add .preStopSeconds .drainSeconds .exitSeconds -}}
{{- end -}}

{{- define "octavo.lifecycle" -}}
{{- if .preStopSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .preStopSeconds }}
{{- end }}
{{- end -}}

{{/* A value as a variable holds it: lists with commas, numbers without exponents. */}}
{{- define "octavo.word" -}}
{{- if kindIs "string" . -}}
{{- . -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* A service's settings as variables. Takes (dict "config" MAP "prefix" "OCTAVO_…_"). */}}
{{- define "octavo.config" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .config }}
- name: {{ $prefix }}{{ $key | snakecase | upper }}
  value: {{ include "octavo.word" $value | quote }}
{{- end }}
{{- end -}}

{{/* OpenTelemetry's variables. Takes (dict "root" $ "part" NAME). */}}
{{- define "octavo.telemetry" -}}
{{- if .root.Values.telemetry.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .root.Values.telemetry.endpoint | quote }}
- name: OTEL_METRICS_EXPORTER
  value: {{ ternary "otlp" "none" .root.Values.telemetry.metrics }}
- name: OTEL_TRACES_SAMPLER
  value: {{ .root.Values.telemetry.sampler }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .root.Values.telemetry.samplerRatio | toJson | quote }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_SERVICE_NAME
  value: octavo-{{ .part }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ include "octavo.attributes" . | quote }}
{{- with .root.Values.telemetry.headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: headers
{{- end }}
{{- end }}
{{- end -}}

{{- define "octavo.attributes" -}}
k8s.namespace.name={{ .root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- range $key, $value := .root.Values.telemetry.resourceAttributes }},{{ $key }}={{ $value }}{{ end }}
{{- end -}}

{{/* A gRPC health check. Kubernetes' own speaks no TLS, so then a command asks.
     Takes (dict "port" PORT "tls" BOOL "arguments" LIST). */}}
{{- define "octavo.healthCheck" -}}
{{- if .tls }}
exec:
  command: [python, -P, -m, octavo.probe, "127.0.0.1:{{ .port }}", {{ join ", " .arguments }}]
timeoutSeconds: 10
{{- else }}
grpc:
  port: {{ .port }}
timeoutSeconds: 5
{{- end }}
{{- end -}}
