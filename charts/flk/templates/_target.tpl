{{/*
What differs between the targets, as in operator_client/flk/targets. Each kind has a template of its own, `flk.render.NAME`,
which returns the object of the job as JSON.
*/}}

{{/* The target of the job as JSON: its name, kind, container, port, where a pod finds its index, and names of pods. */}}
{{- define "flk.target" -}}
{{- $name := .Values.job.target | default "pytorchjob" }}
{{- $served := .Capabilities.APIVersions }}
{{- if eq $name "auto" }}
{{- $name = "job" }}
{{- if $served.Has "kubeflow.org/v1/PyTorchJob" }}{{ $name = "pytorchjob" }}
{{- else if and ($served.Has "trainer.kubeflow.org/v1alpha1/TrainJob") (or .Values.trainingRuntime.create
  (lookup "trainer.kubeflow.org/v1alpha1" "ClusterTrainingRuntime" "" "flk")) }}{{ $name = "trainjob" }}
{{- else if $served.Has "jobset.x-k8s.io/v1alpha2/JobSet" }}{{ $name = "jobset" }}
{{- end }}
{{- end }}
{{- $job := include "flk.jobName" . }}
{{- $index := "metadata.annotations['batch.kubernetes.io/job-completion-index']" }}
{{- $table := dict
  "pytorchjob" (dict "apiVersion" "kubeflow.org/v1" "kind" "PyTorchJob" "container" "pytorch" "port" "pytorchjob-port"
    "index" "metadata.labels['training.kubeflow.org/replica-index']" "host" (printf "%s-worker-0" $job)
    "pods" (printf "%s-worker-" $job) "suffix" "")
  "trainjob" (dict "apiVersion" "trainer.kubeflow.org/v1alpha1" "kind" "TrainJob" "container" "node" "port" "rendezvous"
    "index" $index "host" (printf "%s-node-0-0.%s" $job $job) "pods" (printf "%s-node-0-" $job) "suffix" "-xxxxx")
  "jobset" (dict "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" "container" "pytorch" "port" "rendezvous"
    "index" $index "host" (printf "%s-worker-0-0.%s" $job $job) "pods" (printf "%s-worker-0-" $job) "suffix" "-xxxxx")
  "job" (dict "apiVersion" "batch/v1" "kind" "Job" "container" "pytorch" "port" "rendezvous"
    "index" $index "host" (printf "%s-0.%s" $job $job) "pods" (printf "%s-" $job) "suffix" "") }}
{{- set (get $table $name) "name" $name | toJson }}
{{- end }}

{{/* The spec of an indexed Job without its pods: which of their ends are final. Takes a list of the container's name and
how often a pod may end without an exit code. */}}
{{- define "flk.indexedJob" -}}
{{- $codes := dict "containerName" (first .) "values" (untilStep 1 128 1) }}
{{- dict "completionMode" "Indexed" "backoffLimit" 2147483647 "backoffLimitPerIndex" (last .) "podReplacementPolicy" "Failed"
  "podFailurePolicy" (dict "rules" (list
    (dict "action" "FailIndex" "onExitCodes" (merge (dict "operator" "In") $codes))
    (dict "action" "Ignore" "onPodConditions" (list (dict "type" "DisruptionTarget" "status" "True")))
    (dict "action" "Ignore" "onExitCodes" (merge (dict "operator" "NotIn") $codes)))) | toJson }}
{{- end }}

{{/* The spec of the indexed Job that runs the job, as JSON. */}}
{{- define "flk.sizedJob" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $container := (include "flk.target" . | fromJson).container }}
{{- $limit := min 2147483647 (add 1 (int64 $spec.restarts) (int64 $spec.disruptions)) }}
{{- $template := include "flk.podTemplate" . | fromJson }}
{{- $_ := set $template.spec "restartPolicy" "Never" }}
{{- $result := include "flk.indexedJob" (list $container $limit) | fromJson }}
{{- $_ := set $result "completions" $count.created }}
{{- $_ := set $result "parallelism" $count.created }}
{{- with $spec.deadline }}{{ $_ := set $result "activeDeadlineSeconds" (include "flk.seconds" (list "deadline" .) | int64) }}{{ end }}
{{- $_ := set $result "template" $template }}
{{- toJson $result }}
{{- end }}

{{- define "flk.render.job" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $job := include "flk.sizedJob" . | fromJson }}
{{- if not $job.template.spec.subdomain }}{{ $_ := set $job.template.spec "subdomain" $spec.name }}{{ end }}
{{- if $spec.queue }}{{ $_ := set $job "suspend" true }}{{ end }}
{{- with $spec.ttl }}{{ $_ := set $job "ttlSecondsAfterFinished" (include "flk.seconds" (list "ttl" .) | int64) }}{{ end }}
{{- dict "apiVersion" "batch/v1" "kind" "Job" "metadata" (include "flk.jobMetadata" . | fromJson) "spec" $job | toJson }}
{{- end }}

{{- define "flk.render.jobset" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $worker := dict "name" "worker" "replicas" 1 "template" (dict "spec" (include "flk.sizedJob" . | fromJson)) }}
{{- $set := dict "network" (dict "enableDNSHostnames" true "publishNotReadyAddresses" true) "replicatedJobs" (list $worker) }}
{{- if $spec.queue }}{{ $_ := set $set "suspend" true }}{{ end }}
{{- with $spec.ttl }}{{ $_ := set $set "ttlSecondsAfterFinished" (include "flk.seconds" (list "ttl" .) | int64) }}{{ end }}
{{- dict "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" "metadata" (include "flk.jobMetadata" . | fromJson) "spec" $set | toJson }}
{{- end }}

{{- define "flk.render.trainjob" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $template := include "flk.podTemplate" . | fromJson }}
{{- $runtime := .Files.Get "files/training-runtime.yaml" | fromYaml }}
{{- $base := (first $runtime.spec.template.spec.replicatedJobs).template.spec.template.spec }}
{{- $patchable := list "affinity" "imagePullSecrets" "nodeSelector" "schedulingGates" "securityContext" "serviceAccountName" "terminationGracePeriodSeconds" "tolerations" "volumes" }}
{{- $ofContainer := list "securityContext" "volumeMounts" }}
{{- $container := dict }}
{{- $wrong := list }}
{{- range $template.spec.containers }}
{{- if eq .name "node" }}{{ $container = . }}{{ else }}{{ $wrong = append $wrong (printf "containers[%s]" .name) }}{{ end }}
{{- end }}
{{- range $key, $value := $template.spec }}
{{- if not (or (has $key (append $patchable "containers")) (eq (toJson $value) (get $base $key | toJson))) }}{{ $wrong = append $wrong $key }}{{ end }}
{{- end }}
{{- range $key, $value := $container }}
{{- $known := concat $ofContainer (list "name" "image" "command" "args" "env" "resources") }}
{{- if not (or (has $key $known) (eq (toJson $value) (get (first $base.containers) $key | toJson))) }}{{ $wrong = append $wrong (printf "containers[node].%s" $key) }}{{ end }}
{{- end }}
{{- if $wrong }}{{ fail (printf "job.target: a TrainJob cannot set %s of its pods: choose another target, or leave the field out" ($wrong | sortAlpha | join ", ")) }}{{ end }}
{{- $mounted := list }}
{{- range $container.volumeMounts }}
{{- if has .name $mounted }}
{{- $claim := .name }}
{{- $name := .name }}
{{- range $template.spec.volumes }}{{ if eq .name $name }}{{ $claim = dig "persistentVolumeClaim" "claimName" $name . }}{{ end }}{{ end }}
{{- fail (printf "job.target: a TrainJob cannot mount %s at two paths: choose another target, or mount the volume once and use its folders" $claim) }}
{{- end }}
{{- $mounted = append $mounted .name }}
{{- end }}
{{- $pod := dict "containers" (list (merge (dict "name" "node") (pick $container "securityContext" "volumeMounts"))) }}
{{- range $patchable }}{{ if hasKey $template.spec . }}{{ $_ := set $pod . (get $template.spec .) }}{{ end }}{{ end }}
{{- $patch := dict "name" "node" "template" (dict "spec" (dict "template" (dict "metadata" $template.metadata "spec" $pod))) }}
{{- $trainer := merge (dict "numNodes" $spec.replicas "numProcPerNode" (include "flk.processes" $spec | int64)) (pick $container "image" "command" "args" "env") }}
{{- with $container.resources }}{{ $_ := set $trainer "resourcesPerNode" . }}{{ end }}
{{- $result := dict "runtimeRef" (dict "apiGroup" "trainer.kubeflow.org" "kind" "ClusterTrainingRuntime" "name" "flk") "trainer" $trainer
  "runtimePatches" (list (dict "manager" "flk.dev/flk" "trainingRuntimeSpec" (dict "template" (dict "spec" (dict "replicatedJobs" (list $patch)))))) }}
{{- with $spec.deadline }}{{ $_ := set $result "activeDeadlineSeconds" (include "flk.seconds" (list "deadline" .) | int64) }}{{ end }}
{{- if $spec.queue }}{{ $_ := set $result "suspend" true }}{{ end }}
{{- dict "apiVersion" "trainer.kubeflow.org/v1alpha1" "kind" "TrainJob" "metadata" (include "flk.jobMetadata" . | fromJson) "spec" $result | toJson }}
{{- end }}
