{{/* The PyTorchJob, as JSON. */}}
{{- define "flk.render.pytorchjob" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $policy := dict "cleanPodPolicy" "None"
  "backoffLimit" (min 2147483647 (mul (add 1 (int64 $spec.restarts) (int64 $spec.disruptions)) (int64 $count.most))) }}
{{- with $spec.deadline }}{{ $_ := set $policy "activeDeadlineSeconds" (include "flk.seconds" (list "deadline" .) | int64) }}{{ end }}
{{- with $spec.ttl }}{{ $_ := set $policy "ttlSecondsAfterFinished" (include "flk.seconds" (list "ttl" .) | int64) }}{{ end }}
{{- if $spec.queue }}{{ $_ := set $policy "suspend" true }}{{ end }}
{{- $worker := dict "replicas" $count.created "restartPolicy" "ExitCode" "template" (include "flk.podTemplate" . | fromJson) }}
{{- $own := dict "nprocPerNode" (include "flk.processes" $spec) "runPolicy" $policy "pytorchReplicaSpecs" (dict "Worker" $worker) }}
{{- if or $count.elastic $count.spares }}
{{- $least := ($count.elastic | default dict).min | default $count.created }}
{{- $_ := set $own "elasticPolicy" (dict "minReplicas" $least "maxReplicas" $count.most) }}
{{- end }}
{{- dict "apiVersion" "kubeflow.org/v1" "kind" "PyTorchJob" "metadata" (include "flk.jobMetadata" . | fromJson)
  "spec" $own | toJson }}
{{- end }}
