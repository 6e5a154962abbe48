{{/* Names of objects, labels, images. Each takes the root context, or (dict "root" $ "part" NAME). */}}

{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "octavo.name" -}}
{{- printf "%s-%s" (include "octavo.fullname" .root) .part -}}
{{- end -}}

{{/* The name under which all addresses of a headless service are found. */}}
{{- define "octavo.host" -}}
{{- printf "%s.%s.svc.%s" (include "octavo.name" .) .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "octavo.selectorOfAll" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "octavo.selector" -}}
{{ include "octavo.selectorOfAll" .root }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{/* Labels of pods: no versions, so that a new chart alone restarts nothing. */}}
{{- define "octavo.podLabels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/part-of: octavo
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (dict "root" $ "image" IMAGE "suffix" SUFFIX); a digest wins over the tag. */}}
{{- define "octavo.image" -}}
{{- $path := .image.repository -}}
{{- with .root.Values.image.registry }}{{ $path = printf "%s/%s" . $path }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $path .image.digest -}}
{{- else -}}
{{- printf "%s:%s%s" $path (default .root.Chart.AppVersion .root.Values.image.tag) (default "" .suffix) -}}
{{- end -}}
{{- end -}}

{{- define "octavo.executor.image" -}}
{{- include "octavo.image" (dict "root" . "image" .Values.executor.image "suffix" (ternary "-cpu" "" (eq .Values.device "cpu"))) -}}
{{- end -}}

{{- define "octavo.serviceAccountName" -}}
{{- if .root.Values.serviceAccount.create -}}
{{- include "octavo.name" . -}}
{{- else -}}
{{- .root.Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The label job of a service's metrics; the rules expect it to begin with "octavo-". */}}
{{- define "octavo.job" -}}
{{- printf "octavo-%s-%s-%s" .part .root.Release.Namespace .root.Release.Name -}}
{{- end -}}
