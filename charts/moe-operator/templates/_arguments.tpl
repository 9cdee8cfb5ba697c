{{/* The operator's command line, all of it. */}}
{{- define "moe-operator.arguments" -}}
{{- with .Values.leaderElection }}
{{- if not (and (gt .leaseDurationSeconds .renewDeadlineSeconds) (gt .renewDeadlineSeconds .retryPeriodSeconds)) }}
{{- fail (printf "leaderElection: leaseDurationSeconds %v must exceed renewDeadlineSeconds %v, and that retryPeriodSeconds %v" .leaseDurationSeconds .renewDeadlineSeconds .retryPeriodSeconds) }}
{{- end }}
{{- end -}}
- run
{{- range .Values.watchNamespaces }}
- --namespace={{ . }}
{{- end }}
- --worker-defaults=/etc/moe-operator/worker-defaults.yaml
- --log-level={{ .Values.log.level }}
- --probe-port={{ .Values.probePort }}
- --leader-election-namespace={{ .Release.Namespace }}
- --leader-election-name={{ include "moe-operator.leaseName" . }}
- --lease-duration={{ .Values.leaderElection.leaseDurationSeconds }}
- --lease-renew-deadline={{ .Values.leaderElection.renewDeadlineSeconds }}
- --lease-retry={{ .Values.leaderElection.retryPeriodSeconds }}
- --resync-seconds={{ .Values.reconcile.resyncSeconds }}
- --reconcile-threads={{ .Values.reconcile.threads }}
- --kube-qps={{ .Values.kubeClient.qps }}
- --kube-burst={{ .Values.kubeClient.burst }}
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moe-operator.leaseName" -}}
{{- .Values.leaderElection.leaseName | default (include "moe-operator.fullname" .) -}}
{{- end -}}

{{/* What worker pods get where a MoEDeployment says nothing; read by the operator at start. */}}
{{- define "moe-operator.workerDefaults" -}}
image: {{ include "moe-operator.image" (dict "image" .Values.worker.image "version" .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.worker.image.pullPolicy }}
{{- with .Values.worker.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {{ .name }}
  {{- end }}
{{- end }}
{{- with .Values.worker.podTemplate }}
podTemplate:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
