{{/* Name of everything but the job. A release's name is unique in its namespace, so two releases never clash. */}}
{{- define "flk.fullname" -}}
{{ .Release.Name }}-flk
{{- end }}

{{- define "flk.labels" -}}
app.kubernetes.io/name: flk
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What `flk` needs to submit, watch and delete jobs: the same rules as in k8s/rbac.yaml. */}}
{{- define "flk.rules" -}}
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [create, get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, get, list]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [resourcequotas, limitranges]
  verbs: [list]
- apiGroups: [""]
  resources: [persistentvolumeclaims, serviceaccounts]
  verbs: [get]
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues]
  verbs: [get]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
{{- end }}
