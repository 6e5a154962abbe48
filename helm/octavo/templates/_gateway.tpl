{{/* The gateway's variables, and how any client inside the cluster reaches the schedulers. */}}

{{/* The headless service: all schedulers' addresses. */}}
{{- define "octavo.target" -}}
{{- if .Values.tls.scheduler.enabled }}grpcs://{{ end -}}
{{- include "octavo.host" (dict "root" . "part" "scheduler-headless") }}:50051
{{- end -}}

{{- define "octavo.gateway.env" -}}
- name: OCTAVO_GATEWAY_LISTEN
  value: "{{ .Values.bindAddress }}:8000"
- name: OCTAVO_GATEWAY_TARGET
  value: {{ include "octavo.target" . | quote }}
- name: OCTAVO_GATEWAY_GRACE_SECONDS
  value: {{ .Values.gateway.drainSeconds | toJson | quote }}
{{- if .Values.tls.scheduler.enabled }}
{{- if .Values.tls.scheduler.privateCa }}
- name: OCTAVO_GATEWAY_CA_FILE
  value: /etc/octavo/scheduler-ca/ca.crt
{{- end }}
{{- if .Values.tls.scheduler.mutual }}
- name: OCTAVO_GATEWAY_CERT_FILE
  value: /etc/octavo/scheduler-client/tls.crt
- name: OCTAVO_GATEWAY_KEY_FILE
  value: /etc/octavo/scheduler-client/tls.key
{{- end }}
{{- with .Values.tls.scheduler.serverName }}
- name: OCTAVO_GATEWAY_SERVER_NAME
  value: {{ . | quote }}
{{- end }}
{{- else }}
- name: OCTAVO_GATEWAY_INSECURE_TARGET
  value: "true"
{{- end }}
{{- if .Values.tls.gateway.enabled }}
- name: OCTAVO_GATEWAY_TLS_CERT
  value: /etc/octavo/server/tls.crt
- name: OCTAVO_GATEWAY_TLS_KEY
  value: /etc/octavo/server/tls.key
{{- else }}
- name: OCTAVO_GATEWAY_INSECURE_BIND
  value: "true"
{{- end }}
{{- include "octavo.telemetry" (dict "root" . "part" "gateway") }}
{{- include "octavo.config" (dict "config" .Values.gateway.config "prefix" "OCTAVO_GATEWAY_") }}
{{- with .Values.gateway.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
