{{/* A Certificate of cert-manager. Takes root, secret, issuer (of the chart; "": tls.certManager.issuerRef),
     usages; for servers: service, headless, name and names besides. */}}
{{- define "octavo.certificate" -}}
{{- $root := .root -}}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .secret }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "octavo.labels" (dict "root" $root "part" "tls") | nindent 4 }}
spec:
  secretName: {{ .secret }}
  {{- if not .service }}
  commonName: {{ .secret | trunc 64 }}
  {{- end }}
  duration: {{ $root.Values.tls.certManager.duration }}
  renewBefore: {{ $root.Values.tls.certManager.renewBefore }}
  privateKey:
    algorithm: ECDSA
    size: 256
    encoding: PKCS8
    rotationPolicy: Always
  usages:
    - digital signature
    {{- range .usages }}
    - {{ . }}
    {{- end }}
  {{- if .service }}
  dnsNames:
    {{- $names := list (include "octavo.host" (dict "root" $root "part" .service)) -}}
    {{- $short := include "octavo.name" (dict "root" $root "part" .service) -}}
    {{- $names = concat $names (list $short (printf "%s.%s" $short $root.Release.Namespace) (printf "%s.%s.svc" $short $root.Release.Namespace)) -}}
    {{- if .headless }}{{ $names = append $names (include "octavo.host" (dict "root" $root "part" (printf "%s-headless" .service))) }}{{ end -}}
    {{- if .name }}{{ $names = append $names .name }}{{ end -}}
    {{- toYaml (concat $names (default (list) .names) | uniq) | nindent 4 }}
  {{- end }}
  issuerRef:
    {{- if .issuer }}
    name: {{ include "octavo.name" (dict "root" $root "part" .issuer) }}
    kind: Issuer
    group: cert-manager.io
    {{- else }}
    name: {{ $root.Values.tls.certManager.issuerRef.name }}
    kind: {{ default "Issuer" $root.Values.tls.certManager.issuerRef.kind }}
    group: {{ default "cert-manager.io" $root.Values.tls.certManager.issuerRef.group }}
    {{- end }}
{{ end -}}
