{{/* Name of everything but the job. A release's name is unique in its namespace, so two releases never clash. */}}
{{- define "flk.fullname" -}}
{{ .Release.Name }}-flk
{{- end }}

{{/* Name of the ConfigMap for the records of jobs; empty if there is none. */}}
{{- define "flk.records" -}}
{{ .Values.records.enabled | ternary (printf "%s-records" (include "flk.fullname" .)) "" }}
{{- end }}

{{- define "flk.labels" -}}
app.kubernetes.io/name: flk
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What `flk` needs to submit, watch and delete jobs: for PyTorchJobs the same rules as in k8s/rbac.yaml. */}}
{{- define "flk.rules" -}}
{{- $known := .Files.Get "files/options.json" | fromJson }}
{{- range .Values.rbac.targets }}
- apiGroups: [{{ (get $known.targets .).apiVersion | dir }}]
  resources: [{{ . }}s]
  verbs: [create, get, list, watch, patch, delete]
{{- end }}
{{- if has "job" .Values.rbac.targets }}
- apiGroups: [""]
  resources: [services]
  verbs: [create, list]
{{- end }}
{{- with .Values.rbac.gangs }}
- apiGroups:
  {{- range . }}
  - {{ get $known.gangs . | first | dir }}
  {{- end }}
  resources: [podgroups]
  verbs: [create, get, list]
{{- end }}
{{- if .Values.rbac.exec }}
- apiGroups: [""]
  resources: [pods/exec, pods/portforward]
  verbs: [create, get]
{{- end }}
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, get, list, patch]
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
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
