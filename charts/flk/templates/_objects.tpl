{{/*
The objects of the job. files/manifests has for each target what `flk.manifest.render` makes of a job, with marks in the place of
values, and the patch that each option adds, and in pod.json what the pods of all targets have in common; files/options.json has the
marks (scripts/chart/manifests.py writes all). Here are the values of the marks, what depends on lists and mappings of the job, and
what is computed.
*/}}

{{/* The name of the job's target; `auto` is what the cluster serves. */}}
{{- define "flk.targetName" -}}
{{- $name := .Values.job.target | default "pytorchjob" }}
{{- if eq $name "auto" }}
{{- $name = "job" }}
{{- range list "jobset" "trainjob" "pytorchjob" }}
{{- $target := get ($.Files.Get "files/options.json" | fromJson).targets . }}
{{- if $.Capabilities.APIVersions.Has (printf "%s/%s" $target.apiVersion $target.kind) }}
{{- if or (ne . "trainjob") $.Values.trainingRuntime.create (lookup $target.apiVersion "ClusterTrainingRuntime" "" "flk") }}{{ $name = . }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- $name }}
{{- end }}

{{/* The name of the gang that the job asks for; `auto` is what the cluster serves. Empty: the job asks for none. */}}
{{- define "flk.gangName" -}}
{{- $name := .Values.job.gang | default "" }}
{{- if eq $name "auto" }}
{{- $name = "none" }}
{{- $gangs := (.Files.Get "files/options.json" | fromJson).gangs }}
{{- range ternary list (list "coscheduling" "volcano" "native") (eq (include "flk.targetName" .) "trainjob") }}
{{- if include "flk.podGroupVersion" (list $ (get $gangs .)) }}{{ $name = . }}{{ end }}
{{- end }}
{{- end }}
{{- $name }}
{{- end }}

{{/* The best of some versions of PodGroups that the cluster serves, empty if it serves none. Takes a list of the context and the
versions. */}}
{{- define "flk.podGroupVersion" -}}
{{- $served := "" }}
{{- $cluster := (first .).Capabilities }}
{{- range reverse (last .) }}{{ if $cluster.APIVersions.Has (printf "%s/PodGroup" .) }}{{ $served = . }}{{ end }}{{ end }}
{{- $served }}
{{- end }}

{{/* The value at a path of a mapping, as text; empty if it has none. Takes a list of the two. */}}
{{- define "flk.at" -}}
{{- $value := first . }}
{{- range splitList "." (last .) }}{{ $value = get ($value | default dict) . }}{{ end }}
{{- include "flk.text" ($value | default "") }}
{{- end }}

{{/* The generated objects of the job of `flk.spec`, with its values and the patches of its options, as JSON: template, job,
Service and PodGroup. */}}
{{- define "flk.parts" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $known := .Files.Get "files/options.json" | fromJson }}
{{- $name := include "flk.targetName" . }}
{{- $text := printf "[%s, %s]" (.Files.Get "files/manifests/pod.json") (.Files.Get (printf "files/manifests/%s.json" $name)) }}
{{- range $field, $value := get $known.targets $name }}{{ $text = replace (printf "<target.%s>" $field) (toString $value) $text }}{{ end }}
{{- if not $spec.image }}{{ $_ := set $spec "image" (get $known.images (gt (int64 $spec.resources.gpu) 0 | ternary "cuda" "cpu")) }}{{ end }}
{{- if eq (int64 $spec.replicas) 1 }}{{ $_ := unset $spec "gang" }}{{ end }}
{{- range $path, $mark := $known.marks }}
{{- $value := include "flk.at" (list $spec $path) }}
{{- if hasKey $known.durations $path }}{{ $value = include "flk.seconds" $value }}{{ end }}
{{- if eq $path "topology" }}{{ $value = first (splitList ":" $value) }}{{ end }}
{{- $text = replace (include "flk.text" $mark) ($value | default "0" | toJson | trimPrefix "\"" | trimSuffix "\"") $text }}
{{- end }}
{{- $port := int64 $known.numbers.port }}
{{- if eq (dig "spec" "hostNetwork" false $spec.patch | toString) "true" }}
{{- /* The pods of two jobs may share the address of a node. */}}
{{- $port = add 24000 (mod (adler32sum (printf "%s/%s" .Release.Namespace $spec.name) | int64) 5000) }}
{{- end }}
{{- $ownGrace := sub (int64 $known.numbers.grace_and_launcher) (int64 $known.marks.grace) }}
{{- $numbers := dict "created" $count.created "most" $count.most "least" $count.least "last" (sub (int64 $count.most) 1)
  "processes_per_pod" (include "flk.processes" $spec) "port" $port "restart_limit" (include "flk.restartLimit" $spec)
  "grace_and_launcher" (include "flk.seconds" $spec.grace | int64 | add $ownGrace) }}
{{- range $name, $mark := $known.numbers }}
{{- $text = replace (include "flk.text" $mark) (get $numbers $name | include "flk.text") $text }}
{{- end }}
{{- $pod := fromJsonArray $text | first }}
{{- $target := fromJsonArray $text | last }}
{{- if gt (len $target.lastPod) 63 }}
{{- fail (printf "job.name is too long: with %d replicas its last pod is named %q, and 63 characters is the limit" (int64 $count.most) $target.lastPod) }}
{{- end }}
{{- $parts := include "flk.merged" (list $pod.base $target.base) | fromJson }}
{{- range concat $pod.patches $target.patches }}
{{- $value := include "flk.at" (list $spec .option) }}
{{- if ternary (not $value) (and $value (hasSuffix (toString .end) $value)) (kindIs "invalid" .end) }}
{{- $parts = (include "flk.patched" (dict "base" $parts "patch" .patch "path" .option) | fromJson).value }}
{{- end }}
{{- end }}
{{- toJson $parts }}
{{- end }}

{{/* How often all ranks may start, as text. */}}
{{- define "flk.restartLimit" -}}
{{- min 2147483647 (add 1 (int64 .restarts) (int64 .disruptions)) }}
{{- end }}

{{/* The pod template with the job's lists and mappings and its patch, as JSON. Takes a list of the chart's context, the job of
`flk.spec` and the generated template. */}}
{{- define "flk.podTemplate" -}}
{{- $spec := index . 1 }}
{{- $template := last . }}
{{- with first . }}
{{- $target := get (.Files.Get "files/options.json" | fromJson).targets (include "flk.targetName" .) }}
{{- $pod := $template.spec }}
{{- $container := first $pod.containers }}
{{- $pods := $spec.pods | default dict }}
{{- $own := omit $template.metadata.annotations "sidecar.istio.io/inject" }}
{{- $_ := set $template.metadata "annotations" (include "flk.merged" (list $template.metadata.annotations $pods.annotations $own) | fromJson) }}
{{- $_ := set $template.metadata "labels" (include "flk.merged" (list $pods.labels $template.metadata.labels) | fromJson) }}
{{- $pull := list }}
{{- range $pods.pull_secrets }}{{ $pull = append $pull (dict "name" .) }}{{ end }}
{{- with $pull }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end }}
{{- with $spec.nodes.selector }}{{ $_ := set $pod "nodeSelector" . }}{{ end }}
{{- $tolerations := list }}
{{- range $spec.nodes.tolerations }}
{{- $toleration := dict }}
{{- range $key, $value := . }}
{{- if not (or (eq (toString $value) "") (and (eq $key "operator") (eq (toString $value) "Equal"))) }}{{ $_ := set $toleration $key $value }}{{ end }}
{{- end }}
{{- $tolerations = append $tolerations $toleration }}
{{- end }}
{{- with $tolerations }}{{ $_ := set $pod "tolerations" . }}{{ end }}
{{- $terms := list }}
{{- with $spec.resources.gpu_type }}
{{- range $label, $values := get ((first $).Files.Get "files/gpus.json" | fromJson) . }}
{{- $terms = append $terms (dict "matchExpressions" (list (dict "key" $label "operator" "In" "values" $values))) }}
{{- end }}
{{- end }}
{{- $avoided := list }}
{{- range $spec.nodes.avoid }}{{ $avoided = append $avoided (dict "key" "metadata.name" "operator" "NotIn" "values" (list .)) }}{{ end }}
{{- if $avoided }}
{{- $terms = $terms | default (list (dict)) }}
{{- range $terms }}{{ $_ := set . "matchFields" $avoided }}{{ end }}
{{- end }}
{{- with $terms }}
{{- $affinity := dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" .)) }}
{{- $_ := set $pod "affinity" (include "flk.merged" (list $affinity $pod.affinity) | fromJson) }}
{{- end }}

{{- $volumes := $spec.volumes }}
{{- $plain := dict "FLK_FABRIC" $spec.fabric }}
{{- with $spec.checkpoint }}
{{- if .volume }}{{ $volumes = append $volumes (printf "%s:%s" .volume .path) }}{{ end }}
{{- $_ := set $plain "FLK_CHECKPOINT" (printf "%s/%s" (.address | default .path) $spec.name) }}
{{- end }}
{{- with $spec.pip }}{{ $_ := set $plain "FLK_PIP" (join "\n" .) }}{{ end }}
{{- $known := dict }}
{{- range $volumes }}
{{- $mount := include "flk.mount" . | fromJson }}
{{- if not (hasKey $known $mount.source) }}
{{- $_ := set $known $mount.source (printf "%s-%d" $mount.kind (len $known)) }}
{{- $server := splitn "/" 2 $mount.name }}
{{- $volume := get (dict "claim" (dict "persistentVolumeClaim" (dict "claimName" $mount.name))
  "nfs" (dict "nfs" (dict "server" $server._0 "path" (printf "/%s" $server._1)))
  "secret" (dict "secret" (dict "secretName" $mount.name)) "configmap" (dict "configMap" (dict "name" $mount.name))
  "hostpath" (dict "hostPath" (dict "path" $mount.name "type" "Directory"))) $mount.kind }}
{{- $_ := set $pod "volumes" (append $pod.volumes (set $volume "name" (get $known $mount.source))) }}
{{- end }}
{{- $own := dict "name" (get $known $mount.source) "mountPath" $mount.path }}
{{- if $mount.readOnly }}{{ $_ := set $own "readOnly" true }}{{ end }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $own) }}
{{- end }}
{{- with $spec.memory_path }}
{{- $path := printf "%s/" . }}
{{- $over := dict }}
{{- range $volumes }}
{{- $mount := include "flk.mount" . | fromJson }}
{{- if and (hasPrefix (printf "%s/" $mount.path) $path) (gt (len $mount.path) (len ($over.path | default ""))) }}{{ $over = $mount }}{{ end }}
{{- end }}
{{- if $over }}
{{- if or (ne $over.kind "hostpath") $over.readOnly }}
{{- fail (printf "job.memory_path: %s is on the volume %s, which is no local disk that pods write to: choose a path of a hostpath: volume, or one where no volume is" . $over.text) }}
{{- end }}
{{- $others := list }}
{{- range $pod.volumes }}{{ if ne .name "memory" }}{{ $others = append $others . }}{{ end }}{{ end }}
{{- $_ := set $pod "volumes" $others }}
{{- $others = list }}
{{- range $container.volumeMounts }}{{ if ne .name "memory" }}{{ $others = append $others . }}{{ end }}{{ end }}
{{- $_ := set $container "volumeMounts" $others }}
{{- $others = list }}
{{- range $container.env }}{{ if ne .name "FLK_DISK" }}{{ $others = append $others . }}{{ end }}{{ end }}
{{- $_ := set $container "env" $others }}
{{- end }}
{{- end }}
{{- with include "flk.codeSource" . | fromJson }}
{{- $source := . }}
{{- range $pod.volumes }}{{ if eq .name "ship" }}{{ $_ := set .projected "sources" (append .projected.sources $source) }}{{ end }}{{ end }}
{{- end }}

{{- $fabric := get (.Files.Get "files/fabrics.json" | fromJson) $spec.fabric }}
{{- $env := list }}
{{- range $container.env }}
{{- if .valueFrom }}{{ $env = append $env . }}{{ else }}{{ $plain = include "flk.merged" (list (dict .name .value) $plain) | fromJson }}{{ end }}
{{- end }}
{{- with (include "flk.code" . | fromJson).hash }}{{ $_ := set $plain "FLK_CODE" "/flk/ship/code" }}{{ $_ := set $plain "FLK_CODE_HASH" . }}{{ end }}
{{- $plain = include "flk.merged" (list $plain $fabric.env $spec.env) | fromJson }}
{{- range $variable, $value := $plain }}
{{- if not (hasKey $spec.secrets $variable) }}{{ $env = append $env (dict "name" $variable "value" (replace "$" "$$" $value)) }}{{ end }}
{{- end }}
{{- range $variable, $reference := $spec.secrets }}
{{- $parts := splitn ":" 2 $reference }}
{{- $env = append $env (dict "name" $variable "valueFrom" (dict "secretKeyRef" (dict "name" $parts._0 "key" $parts._1))) }}
{{- end }}
{{- $_ := set $container "env" $env }}
{{- range $spec.command }}{{ $_ := set $container "command" (append $container.command (replace "$" "$$" .)) }}{{ end }}

{{- $added := dict }}
{{- range $name, $amount := $spec.resources.extended }}{{ $_ := set $added $name (include "flk.text" $amount) }}{{ end }}
{{- $added = include "flk.merged" (list $added $fabric.limits) | fromJson }}
{{- $gpu := int64 $spec.resources.gpu }}
{{- range $name, $amount := $fabric.limits_per_gpu }}
{{- $number := regexFind "^[0-9]+" $amount }}
{{- if $gpu }}{{ $_ := set $added $name (printf "%d%s" (mul $gpu (int64 $number)) (trimPrefix $number $amount)) }}{{ end }}
{{- end }}
{{- range $name := keys $added }}
{{- if and (hasPrefix "hugepages-" $name) (not (or $spec.resources.memory $spec.resources.cpu)) }}
{{- fail (printf "job.resources.memory: is missing: fabric %s requests %s, which Kubernetes accepts only with memory or cpu" $spec.fabric $name) }}
{{- end }}
{{- end }}
{{- $resources := $container.resources | default dict }}
{{- range list "limits" "requests" }}
{{- $all := include "flk.merged" (list (get $resources . | default dict) $added) | fromJson }}
{{- if $all }}{{ $_ := set $resources . $all }}{{ end }}
{{- end }}
{{- $claims := list }}
{{- range $number, $name := $spec.claims }}
{{- $claims = append $claims (dict "name" (printf "claim-%d" $number) "resourceClaimTemplateName" $name) }}
{{- $_ := set $resources "claims" (append ($resources.claims | default list) (dict "name" (printf "claim-%d" $number))) }}
{{- end }}
{{- with $claims }}{{ $_ := set $pod "resourceClaims" . }}{{ end }}
{{- with $resources }}{{ $_ := set $container "resources" . }}{{ end }}

{{- with $spec.patch }}
{{- $template = (include "flk.patched" (dict "base" ($template | toJson | fromJson) "patch" . "path" "job.patch") | fromJson).value }}
{{- $found := false }}
{{- range dig "spec" "containers" list $template }}{{ if eq (toString (get . "name")) $target.container }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}{{ fail (printf "job.patch: leaves no container named %s, which the operator looks for" $target.container) }}{{ end }}
{{- end }}
{{- toJson $template }}
{{- end }}
{{- end }}

{{/* The objects of the job, its own first, as a JSON list. */}}
{{- define "flk.objects" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $parts := include "flk.parts" . | fromJson }}
{{- $template := include "flk.podTemplate" (list . $spec $parts.template) | fromJson }}
{{- $job := $parts.job }}
{{- $pods := $spec.pods | default dict }}
{{- $record := dict "flk.dev/version" .Chart.AppVersion "flk.dev/spec" (toJson $spec) }}
{{- with (include "flk.code" . | fromJson).hash }}{{ $_ := set $record "flk.dev/code-hash" . }}{{ end }}
{{- $_ := set $job.metadata "labels" (include "flk.merged" (list $pods.labels $job.metadata.labels) | fromJson) }}
{{- $_ := set $job.metadata "annotations" (include "flk.merged" (list $pods.annotations $record) | fromJson) }}
{{- if eq $job.kind "PyTorchJob" }}
{{- $most := int64 (include "flk.pods" . | fromJson).most }}
{{- $_ := set $job.spec.runPolicy "backoffLimit" (min 2147483647 (mul (include "flk.restartLimit" $spec | int64) $most)) }}
{{- $_ := set $job.spec.pytorchReplicaSpecs.Worker "template" $template }}
{{- else if eq $job.kind "TrainJob" }}
{{- include "flk.fillTrainJob" (dict "job" $job "template" $template "Files" .Files) }}
{{- else }}
{{- $_ := set $template.spec "restartPolicy" "Never" }}
{{- if and (eq $job.kind "Job") (not $template.spec.subdomain) }}{{ $_ := set $template.spec "subdomain" $spec.name }}{{ end }}
{{- $holder := $job.spec }}
{{- range $job.spec.replicatedJobs }}{{ $holder = .template.spec }}{{ end }}
{{- $_ := set $holder "template" $template }}
{{- end }}
{{- $objects := list $job }}
{{- with $parts.Service }}
{{- $own := first .spec.ports }}
{{- range (first $template.spec.containers).ports }}{{ if eq .name $own.name }}{{ $_ := set $own "port" .containerPort }}{{ end }}{{ end }}
{{- $objects = append $objects . }}
{{- end }}
{{- with $parts.PodGroup }}
{{- $known := $.Files.Get "files/options.json" | fromJson }}
{{- $_ := set . "apiVersion" (include "flk.podGroupVersion" (list $ (get $known.gangs $spec.gang)) | default .apiVersion) }}
{{- if and (ne $spec.gang "coscheduling") $pods.priority_class }}{{ $_ := set .spec "priorityClassName" $pods.priority_class }}{{ end }}
{{- $topology := splitList ":" ($spec.topology | default "") }}
{{- if and (eq $spec.gang "native") (first $topology) (ne (last $topology) "preferred") }}
{{- $_ := set .spec "schedulingConstraints" (dict "topology" (list (dict "key" (first $topology)))) }}
{{- end }}
{{- $objects = append $objects . }}
{{- end }}
{{- toJson $objects }}
{{- end }}

{{/* Puts the pod template into a TrainJob, which has it in pieces. Takes a mapping of job, template and Files. */}}
{{- define "flk.fillTrainJob" -}}
{{- $template := .template }}
{{- $runtime := .Files.Get "files/training-runtime.yaml" | fromYaml }}
{{- $base := (first $runtime.spec.template.spec.replicatedJobs).template.spec.template.spec }}
{{- $may := (.Files.Get "files/options.json" | fromJson).trainjob }}
{{- $container := dict }}
{{- $wrong := list }}
{{- range $template.spec.containers }}
{{- if eq .name "node" }}{{ $container = . }}{{ else }}{{ $wrong = append $wrong (printf "containers[%s]" .name) }}{{ end }}
{{- end }}
{{- range $key, $value := $template.spec }}
{{- if not (or (has $key (append $may.pod "containers")) (eq (toJson $value) (get $base $key | toJson))) }}{{ $wrong = append $wrong $key }}{{ end }}
{{- end }}
{{- range $key, $value := $container }}
{{- if not (or (has $key (concat $may.container $may.trainer)) (eq (toJson $value) (get (first $base.containers) $key | toJson))) }}{{ $wrong = append $wrong (printf "containers[node].%s" $key) }}{{ end }}
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
{{- $pod := dict "containers" (list dict) }}
{{- range prepend $may.container "name" }}{{ if hasKey $container . }}{{ $_ := set (first $pod.containers) . (get $container .) }}{{ end }}{{ end }}
{{- range $may.pod }}{{ if hasKey $template.spec . }}{{ $_ := set $pod . (get $template.spec .) }}{{ end }}{{ end }}
{{- $own := first (first .job.spec.runtimePatches).trainingRuntimeSpec.template.spec.replicatedJobs }}
{{- $_ := set $own.template.spec "template" (dict "metadata" $template.metadata "spec" $pod) }}
{{- range $key := $may.trainer }}
{{- if and (ne $key "name") (hasKey $container $key) }}{{ $_ := set $.job.spec.trainer (eq $key "resources" | ternary "resourcesPerNode" $key) (get $container $key) }}{{ end }}
{{- end }}
{{- end }}
