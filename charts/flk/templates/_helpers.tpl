{{/* Name of everything but the job. A release's name is unique in its namespace, so two releases never clash. */}}
{{- define "flk.fullname" -}}
{{ .Release.Name }}-flk
{{- end }}

{{/* Name of the ConfigMap for the records of jobs; empty if there is none. */}}
{{- define "flk.records" -}}
{{ .Values.records.enabled | ternary (printf "%s-records" (include "flk.fullname" .)) "" }}
{{- end }}

{{/* The metadata of an object, from a list of the context, its name and more labels. */}}
{{- define "flk.metadata" -}}
name: {{ index . 1 }}
labels:
  {{- with first . }}
  app.kubernetes.io/name: flk
  app.kubernetes.io/instance: {{ .Release.Name }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
  {{- end }}
  {{- with last . }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* The labels of the pods of the job, or without one of all jobs of flk in the namespace, as JSON. */}}
{{- define "flk.pods" -}}
{{- $pods := dict "app.kubernetes.io/managed-by" "flk" }}
{{- if .Values.job.enabled }}{{ $_ := set $pods "flk.dev/job" (include "flk.jobName" .) }}{{ end }}
{{- toJson $pods }}
{{- end }}

{{/* A Role and its binding, from a list of the context, their name, the rules and the subjects. */}}
{{- define "flk.role" -}}
{{- $context := first . }}
{{- $metadata := include "flk.metadata" (list $context (index . 1) dict) | fromYaml }}
{{- $group := "rbac.authorization.k8s.io" }}
{{- $subjects := list }}
{{- range last . }}
{{- $more := dict "apiGroup" $group }}
{{- if eq .kind "ServiceAccount" }}{{ $more = dict "namespace" (.namespace | default $context.Release.Namespace) }}{{ end }}
{{- $subjects = append $subjects (merge $more (omit . "namespace")) }}
{{- end }}
apiVersion: {{ $group }}/v1
kind: Role
metadata: {{ toJson $metadata }}
rules: {{ index . 2 | toJson }}
---
apiVersion: {{ $group }}/v1
kind: RoleBinding
metadata: {{ toJson $metadata }}
roleRef: {{ dict "apiGroup" $group "kind" "Role" "name" (index . 1) | toJson }}
subjects: {{ toJson $subjects }}
{{- end }}
