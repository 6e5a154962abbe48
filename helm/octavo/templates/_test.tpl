{{/* Arguments of the test without a gateway, for the scheduler's TLS. */}}
{{- define "octavo.test.arguments" -}}
{{- $arguments := list "--temperature" "0" -}}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.privateCa -}}
{{- $arguments = concat $arguments (list "--ca-file" "/etc/octavo/scheduler-ca/ca.crt") -}}
{{- end -}}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.mutual -}}
{{- $arguments = concat $arguments (list "--cert-file" "/etc/octavo/scheduler-client/tls.crt" "--key-file" "/etc/octavo/scheduler-client/tls.key") -}}
{{- end -}}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.serverName -}}
{{- $arguments = concat $arguments (list "--server-name" .Values.tls.scheduler.serverName) -}}
{{- end -}}
{{- range $index, $argument := $arguments -}}
{{- if $index }}, {{ end }}{{ $argument | quote }}
{{- end -}}
{{- end -}}
