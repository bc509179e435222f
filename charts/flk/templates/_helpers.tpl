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

{{/* The rules for people who use `flk`, as YAML: files/rights.json has them (scripts/chart/rights.py writes it). */}}
{{- define "flk.rules" -}}
{{- $known := .Files.Get "files/rights.json" | fromJson }}
{{- $rules := list }}
{{- range .Values.rbac.targets }}{{ $rules = concat $rules (get $known.targets .) }}{{ end }}
{{- range .Values.rbac.gangs }}{{ $rules = concat $rules (get $known.gangs .) }}{{ end }}
{{- if .Values.rbac.exec }}{{ $rules = concat $rules $known.exec }}{{ end }}
{{- concat $rules $known.always | toYaml }}
{{- end }}
