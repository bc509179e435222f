{{/*
Who starts all pods of a job together, as in operator_client/flk/targets/gang.py: the scheduler's kind of PodGroup, and what
names the group in a pod.
*/}}
{{- define "flk.gang" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $name := $spec.name }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $least := int64 (($count.elastic | default dict).min | default $count.replicas) }}
{{- $volcano := dict "minMember" $least }}
{{- with ($spec.pods | default dict).priority_class }}{{ $_ := set $volcano "priorityClassName" . }}{{ end }}
{{- $table := dict
  "native" (dict "apiVersion" "scheduling.k8s.io/v1alpha2" "spec" (dict "schedulingPolicy" (dict "gang" (dict "minCount" $least)))
    "pod" (dict "schedulingGroup" (dict "podGroupName" $name)))
  "volcano" (dict "apiVersion" "scheduling.volcano.sh/v1beta1" "spec" $volcano "pod" (dict "schedulerName" "volcano")
    "annotations" (dict "scheduling.k8s.io/group-name" $name))
  "coscheduling" (dict "apiVersion" "scheduling.x-k8s.io/v1alpha1" "spec" (dict "minMember" $least)
    "pod" (dict "schedulerName" "scheduler-plugins-scheduler") "labels" (dict "scheduling.x-k8s.io/pod-group" $name)) }}
{{- $result := dict }}
{{- if gt (int64 $spec.replicas) 1 }}{{ $result = get $table ($spec.gang | default "none") | default dict }}{{ end }}
{{- toJson $result }}
{{- end }}

{{/* The name of the gang that the job asks for; `auto` is what the cluster serves. Empty: the job asks for none. */}}
{{- define "flk.gangName" -}}
{{- $name := .Values.job.gang | default "" }}
{{- if eq $name "auto" }}
{{- $served := .Capabilities.APIVersions }}
{{- $name = "none" }}
{{- if eq (include "flk.target" . | fromJson).name "trainjob" }}
{{- else if $served.Has "scheduling.k8s.io/v1alpha2/PodGroup" }}{{ $name = "native" }}
{{- else if $served.Has "scheduling.volcano.sh/v1beta1/PodGroup" }}{{ $name = "volcano" }}
{{- else if $served.Has "scheduling.x-k8s.io/v1alpha1/PodGroup" }}{{ $name = "coscheduling" }}
{{- end }}
{{- end }}
{{- $name }}
{{- end }}
