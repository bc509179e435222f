{{/* Name of everything but the job. A release's name is unique in its namespace, so two releases never clash. */}}
{{- define "flk.fullname" }}{{ .Release.Name }}-flk{{ end }}

{{/* Name of the ConfigMap for the records of jobs; empty if there is none. */}}
{{- define "flk.records" -}}
{{ empty (.Values.records).enabled | ternary "" (printf "%s-records" (include "flk.fullname" .)) }}
{{- end }}

{{/* The metadata of an object, from a list of the context, its name and more labels. */}}
{{- define "flk.metadata" -}}
{{- $context := first . -}}
name: {{ index . 1 }}
labels:
  app.kubernetes.io/name: flk
  app.kubernetes.io/instance: {{ $context.Release.Name }}
  app.kubernetes.io/managed-by: {{ $context.Release.Service }}
  helm.sh/chart: {{ $context.Chart.Name }}-{{ $context.Chart.Version }}
  {{- with last . }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* The labels of the pods of the job, or without one of all jobs of flk in the namespace, as JSON. */}}
{{- define "flk.pods" -}}
{{- $pods := dict "app.kubernetes.io/managed-by" "flk" }}
{{- if (.Values.job).enabled }}{{ $_ := set $pods "flk.dev/job" (include "flk.jobName" .) }}{{ end }}
{{- toJson $pods }}
{{- end }}

{{/* Port of the metrics in the pods of the job, or of all jobs. */}}
{{- define "flk.metricsPort" }}{{ get ((.Values.job).env | default dict) "FLK_METRICS_PORT" | default 9400 }}{{ end }}

{{/* A Role and its binding, from a list of the context, their name, the rules and the subjects. */}}
{{- define "flk.role" -}}
{{- $metadata := include "flk.metadata" (list (first .) (index . 1) dict) | nindent 2 -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{- $metadata }}
rules: {{- index . 2 | toYaml | nindent 0 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{- $metadata }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ index . 1 }}}
subjects: {{- last . | toYaml | nindent 0 }}
{{- end }}
