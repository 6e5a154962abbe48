{{/* What no schema can say: values that do not go together. Every message says what to do. */}}

{{- define "octavo.minExecutors" -}}
{{- ternary .Values.executor.autoscaling.minReplicas .Values.executor.replicas .Values.executor.autoscaling.enabled -}}
{{- end -}}

{{- define "octavo.maxSchedulers" -}}
{{- ternary .Values.scheduler.autoscaling.maxReplicas .Values.scheduler.replicas .Values.scheduler.autoscaling.enabled -}}
{{- end -}}

{{- define "octavo.checks" -}}
{{- include "octavo.checks.scale" . -}}
{{- include "octavo.checks.model" . -}}
{{- include "octavo.checks.tls" . -}}
{{- include "octavo.checks.rest" . -}}
{{- end -}}

{{- define "octavo.checks.scale" -}}
{{- $executors := int (include "octavo.minExecutors" .) -}}
{{- $schedulers := int (include "octavo.maxSchedulers" .) -}}
{{- if and (gt $schedulers $executors) (not .Values.scheduler.allowStandby) -}}
{{- fail (printf "scheduler.replicas: up to %d schedulers over as few as %d executors: each scheduler needs an executor of its own to be ready. Raise executor.replicas (executor.autoscaling.minReplicas), lower scheduler.replicas (scheduler.autoscaling.maxReplicas), or set scheduler.allowStandby" $schedulers $executors) -}}
{{- end -}}
{{- if and .Values.scheduler.autoscaling.enabled (gt (int .Values.scheduler.autoscaling.minReplicas) (int .Values.scheduler.autoscaling.maxReplicas)) -}}
{{- fail "scheduler.autoscaling.minReplicas: must not be above maxReplicas" -}}
{{- end -}}
{{- if .Values.executor.autoscaling.enabled -}}
{{- if gt (int .Values.executor.autoscaling.minReplicas) (int .Values.executor.autoscaling.maxReplicas) -}}
{{- fail "executor.autoscaling.minReplicas: must not be above maxReplicas" -}}
{{- end -}}
{{- if not .Values.executor.autoscaling.prometheusAddress -}}
{{- fail "executor.autoscaling.prometheusAddress: KEDA needs Prometheus' URL" -}}
{{- end -}}
{{- if not .Values.metrics.enabled -}}
{{- fail "metrics.enabled: executor.autoscaling needs the schedulers' metrics" -}}
{{- end -}}
{{- if not (or .Values.metrics.podMonitor.enabled .Values.executor.autoscaling.schedulerJob) -}}
{{- fail "executor.autoscaling.schedulerJob: say under which job Prometheus has the schedulers, or set metrics.podMonitor.enabled" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.scheduler.autoscaling.enabled (not (dig "requests" "cpu" "" .Values.scheduler.resources)) -}}
{{- fail "scheduler.resources.requests.cpu: scheduler.autoscaling goes by the use of what is requested" -}}
{{- end -}}
{{- if and (eq .Values.device "cpu") (gt (int .Values.executor.gpu.count) 1) (not (hasKey .Values.executor.config "numThreads")) -}}
{{- fail "executor.config.numThreads: several ranks share the CPUs, so say how many threads each has" -}}
{{- end -}}
{{- if and (gt (int .Values.executor.leaderWorkerSet.size) 1) (not .Values.executor.leaderWorkerSet.enabled) -}}
{{- fail "executor.leaderWorkerSet.enabled: an executor of several pods (executor.leaderWorkerSet.size) needs it" -}}
{{- end -}}
{{- if and .Values.executor.leaderWorkerSet.enabled .Values.model.fetch.persistence.enabled -}}
{{- fail "model.fetch.persistence.enabled: a LeaderWorkerSet makes no volumes; use model.source pvc, or a StatefulSet" -}}
{{- end -}}
{{- end -}}

{{- define "octavo.checks.model" -}}
{{- if and (eq .Values.model.source "pvc") (not .Values.model.pvc.claimName) -}}
{{- fail "model.pvc.claimName: model.source is pvc, so name the claim" -}}
{{- end -}}
{{- if and (eq .Values.model.source "hostPath") (not .Values.model.hostPath.path) -}}
{{- fail "model.hostPath.path: model.source is hostPath, so name the folder" -}}
{{- end -}}
{{- if eq .Values.model.source "image" -}}
{{- if not .Values.model.image.reference -}}
{{- fail "model.image.reference: model.source is image, so name the image" -}}
{{- end -}}
{{- if not (semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source: image needs Kubernetes 1.33 or later, this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" $ "value" NAME "secret" SECRET): a secret must be given or made. */}}
{{- define "octavo.checks.secret" -}}
{{- if not (or .secret .root.Values.tls.certManager.enabled) -}}
{{- fail (printf "%s: name a secret, or set tls.certManager.enabled" .value) -}}
{{- end -}}
{{- end -}}

{{- define "octavo.checks.tls" -}}
{{- if .Values.tls.executors.enabled -}}
{{- include "octavo.checks.secret" (dict "root" . "value" "tls.executors.serverSecret" "secret" .Values.tls.executors.serverSecret) -}}
{{- include "octavo.checks.secret" (dict "root" . "value" "tls.executors.clientSecret" "secret" .Values.tls.executors.clientSecret) -}}
{{- if ne (empty .Values.tls.executors.serverSecret) (empty .Values.tls.executors.clientSecret) -}}
{{- fail "tls.executors: give serverSecret and clientSecret, or neither: one CA signs both" -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.scheduler.enabled -}}
{{- include "octavo.checks.secret" (dict "root" . "value" "tls.scheduler.serverSecret" "secret" .Values.tls.scheduler.serverSecret) -}}
{{- if .Values.tls.scheduler.mutual -}}
{{- include "octavo.checks.secret" (dict "root" . "value" "tls.scheduler.clientSecret" "secret" .Values.tls.scheduler.clientSecret) -}}
{{- end -}}
{{- else if .Values.tls.scheduler.mutual -}}
{{- fail "tls.scheduler.mutual: needs tls.scheduler.enabled" -}}
{{- end -}}
{{- if and .Values.tls.gateway.enabled .Values.gateway.enabled -}}
{{- include "octavo.checks.secret" (dict "root" . "value" "tls.gateway.serverSecret" "secret" .Values.tls.gateway.serverSecret) -}}
{{- end -}}
{{- end -}}

{{- define "octavo.checks.rest" -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.inline -}}
{{- fail "apiKeys.inline: give it or apiKeys.existingSecret, not both" -}}
{{- end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs: name the Gateway to attach to" -}}
{{- end -}}
{{- if and (not .Values.gateway.enabled) (or .Values.gateway.ingress.enabled .Values.gateway.httpRoute.enabled) -}}
{{- fail "gateway.enabled: Ingress and HTTPRoute lead to the gateway, which is off" -}}
{{- end -}}
{{- if and .Values.helmTest.enabled (not .Values.gateway.enabled) (include "octavo.scheduler.hasKeys" .) (not .Values.helmTest.apiKeySecret) -}}
{{- fail "helmTest.apiKeySecret: without the gateway the test needs a key where keys are set; name it, or set helmTest.enabled to false" -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.podMonitor.enabled: needs metrics.enabled" -}}
{{- end -}}
{{- end -}}
