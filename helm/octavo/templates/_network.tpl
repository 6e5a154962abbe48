{{/* Rules of the NetworkPolicies: who reaches what. */}}

{{- define "octavo.ingress.executor" -}}
- from:
    - podSelector:
        matchLabels:
          {{- include "octavo.selector" (dict "root" . "part" "scheduler") | nindent 10 }}
  ports:
    - port: grpc
{{- if include "octavo.executor.isGroup" . }}
{{ include "octavo.ingress.executor-worker" . }}
{{- end }}
{{- end -}}

{{/* Ranks choose the ports on which they reach one another. No policy can tell one group of a set
     from another. */}}
{{- define "octavo.ingress.executor-worker" -}}
- from:
    - podSelector:
        {{- include "octavo.executor.selector" . | nindent 8 }}
{{- end -}}

{{- define "octavo.ingress.scheduler" -}}
- ports:
    - port: grpc
{{- if .Values.networkPolicy.schedulerFrom }}
  from:
    {{- if .Values.gateway.enabled }}
    - podSelector:
        matchLabels:
          {{- include "octavo.selector" (dict "root" . "part" "gateway") | nindent 10 }}
    {{- end }}
    {{- if .Values.helmTest.enabled }}
    - podSelector:
        matchLabels:
          {{- include "octavo.selector" (dict "root" . "part" "test") | nindent 10 }}
    {{- end }}
    {{- toYaml .Values.networkPolicy.schedulerFrom | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "octavo.ingress.gateway" -}}
- ports:
    - port: http
{{- if .Values.networkPolicy.gatewayFrom }}
  from:
    {{- if .Values.helmTest.enabled }}
    - podSelector:
        matchLabels:
          {{- include "octavo.selector" (dict "root" . "part" "test") | nindent 10 }}
    {{- end }}
    {{- if .Values.metrics.podMonitor.enabled }}
    - namespaceSelector:
        matchLabels:
          {{- toYaml .Values.networkPolicy.monitoringNamespaceLabels | nindent 10 }}
    {{- end }}
    {{- toYaml .Values.networkPolicy.gatewayFrom | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "octavo.egress.executor" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- if include "octavo.executor.isGroup" . }}
- to:
    - podSelector:
        {{- include "octavo.executor.selector" . | nindent 8 }}
{{- end }}
{{- if include "octavo.model.fetches" . }}
- ports:
    - port: 443
{{- end }}
{{- if .Values.telemetry.endpoint }}
- ports:
    - port: {{ include "octavo.telemetryPort" . }}
{{- end }}
{{- with .Values.networkPolicy.executorEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "octavo.telemetryPort" -}}
{{- $host := (urlParse .Values.telemetry.endpoint).host -}}
{{- default "4317" (regexFind ":[0-9]+$" $host | trimPrefix ":") -}}
{{- end -}}
