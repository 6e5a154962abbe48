{{/* Secrets of certificates: those given, or the names of those that cert-manager fills. */}}

{{- define "octavo.tls.executorsServer" -}}
{{- default (include "octavo.name" (dict "root" . "part" "executor-tls")) .Values.tls.executors.serverSecret -}}
{{- end -}}

{{- define "octavo.tls.executorsClient" -}}
{{- default (include "octavo.name" (dict "root" . "part" "executor-client-tls")) .Values.tls.executors.clientSecret -}}
{{- end -}}

{{- define "octavo.tls.executorsName" -}}
{{- default (include "octavo.host" (dict "root" . "part" "executor")) .Values.tls.executors.serverName -}}
{{- end -}}

{{- define "octavo.tls.schedulerServer" -}}
{{- default (include "octavo.name" (dict "root" . "part" "scheduler-tls")) .Values.tls.scheduler.serverSecret -}}
{{- end -}}

{{- define "octavo.tls.schedulerClient" -}}
{{- default (include "octavo.name" (dict "root" . "part" "scheduler-client-tls")) .Values.tls.scheduler.clientSecret -}}
{{- end -}}

{{- define "octavo.tls.schedulerClientCa" -}}
{{- default (include "octavo.tls.schedulerClient" .) .Values.tls.scheduler.clientCaSecret -}}
{{- end -}}

{{- define "octavo.tls.schedulerName" -}}
{{- default (include "octavo.host" (dict "root" . "part" "scheduler-headless")) .Values.tls.scheduler.serverName -}}
{{- end -}}

{{- define "octavo.tls.gatewayServer" -}}
{{- default (include "octavo.name" (dict "root" . "part" "gateway-tls")) .Values.tls.gateway.serverSecret -}}
{{- end -}}

{{/* A volume of a whole secret. Takes (dict "name" NAME "secret" SECRET). No subPath mounts it, so
     that renewed certificates arrive. */}}
{{- define "octavo.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
{{- end -}}

{{/* A volume of the CA alone of a secret that holds a key, too. */}}
{{- define "octavo.caVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end -}}

{{/* What a client of the scheduler needs: its CA, and a certificate where it is mutual. */}}
{{- define "octavo.tls.clientVolumes" -}}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.privateCa }}
{{ include "octavo.caVolume" (dict "name" "scheduler-ca" "secret" (include "octavo.tls.schedulerServer" .)) }}
{{- end }}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.mutual }}
{{ include "octavo.secretVolume" (dict "name" "scheduler-client" "secret" (include "octavo.tls.schedulerClient" .)) }}
{{- end }}
{{- end -}}

{{- define "octavo.tls.clientMounts" -}}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.privateCa }}
- name: scheduler-ca
  mountPath: /etc/octavo/scheduler-ca
  readOnly: true
{{- end }}
{{- if and .Values.tls.scheduler.enabled .Values.tls.scheduler.mutual }}
- name: scheduler-client
  mountPath: /etc/octavo/scheduler-client
  readOnly: true
{{- end }}
{{- end -}}
