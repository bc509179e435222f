{{/*
The job of this release. files/manifests has for each target what `flk.manifest.render` makes of a job in its common form, with marks
in the place of values, and the patches of values that not every job has (scripts/chart/manifests.py writes it). A template returns
text, so other values are returned as JSON.
*/}}

{{- define "flk.jobName" -}}
{{- if .Values.job.manifest }}{{ (include "flk.manifest" . | fromJsonArray | first).metadata.name }}{{ else }}{{ .Values.job.name | default .Release.Name }}{{ end }}
{{- end }}

{{/* The objects of job.manifest, the job first as `flk render` prints it, as JSON. */}}
{{- define "flk.manifest" -}}
{{- $objects := list }}
{{- range regexSplit "(?m)^---\\s*$" .Values.job.manifest -1 }}
{{- with fromYaml . }}
{{- with .Error }}{{ fail (printf "job.manifest: %s" .) }}{{ end }}
{{- $objects = append $objects . }}
{{- end }}
{{- end }}
{{- $kinds := list }}
{{- range (.Files.Get "files/options.json" | fromJson).targets }}{{ $kinds = append $kinds .kind }}{{ end }}
{{- if not (has (dig "kind" "" (first $objects | default dict)) $kinds) }}{{ fail (printf "job.manifest: must begin with a %s, as flk render prints it" (join ", " $kinds)) }}{{ end }}
{{- toJson $objects }}
{{- end }}

{{/* A value as text: whole numbers as such, which Helm may write as 1e+09. */}}
{{- define "flk.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The words of the job's command, its script (empty if the image has the code) and the hash of that, as JSON. */}}
{{- define "flk.code" -}}
{{- $command := .Values.job.command | default list }}
{{- if kindIs "string" $command }}{{ $command = regexSplit "\\s+" (trim $command) -1 }}{{ end }}
{{- $words := list }}
{{- range $command }}{{ $words = append $words (include "flk.text" .) }}{{ end }}
{{- $script := .Values.job.script }}
{{- if not (or $script $words) }}{{ $script = .Files.Get "files/gpt.py" }}{{ end }}
{{- if $script }}{{ $words = $words | default (list "train.py") }}{{ end }}
{{- $name := first $words | default "" }}
{{- if regexMatch "^(.*/)?(torchrun|python[0-9.]*)$" $name }}
{{- fail (printf "job.command: begins with the script or with -m, not with %s: flk starts the ranks itself" $name) }}
{{- end }}
{{- if and $script (or (hasPrefix "-" $name) (hasPrefix "/" $name) (has ".." (splitList "/" $name))) }}
{{- fail (printf "job.command: must begin with the file name of job.script, as in [train.py, --lr] (is %q)" $name) }}
{{- end }}
{{- $hash := ternary (printf "%s  %s\n" (sha256sum ($script | default "")) $name | sha256sum) "" (not (empty $script)) }}
{{- dict "words" $words "script" $script "key" (replace "/" "." $name) "hash" $hash | toJson }}
{{- end }}

{{/* The values of the job with their defaults and those of the site, as the fields of flk.yaml. */}}
{{- define "flk.spec" -}}
{{- $job := .Values.job | toJson | fromJson }}{{/* the numbers of --set are integers, those of files and of JSON are not */}}
{{- $name := include "flk.jobName" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "job.name must be lower-case letters, digits and '-', starting with a letter and not ending with '-' (is %q)" $name) }}
{{- end }}
{{- $resources := dict }}
{{- range $key, $value := $job.resources | default dict }}{{ with $value }}{{ $_ := set $resources $key (include "flk.text" .) }}{{ end }}{{ end }}
{{- $gpu := int64 ($resources.gpu | default 0) }}
{{- $env := $job.env | default dict }}
{{- if .Values.podMonitor.enabled }}
{{- $port := include "flk.text" .Values.podMonitor.port }}
{{- if ne (get $env "FLK_METRICS_PORT" | default $port) $port }}
{{- fail (printf "podMonitor.port: is %s, and job.env.FLK_METRICS_PORT is %s: Prometheus would find no metrics there" $port $env.FLK_METRICS_PORT) }}
{{- end }}
{{- $_ := set $env "FLK_METRICS_PORT" $port }}
{{- end }}
{{- range $variable := keys ($job.secrets | default dict) }}
{{- if hasKey $env $variable }}{{ fail (printf "job.secrets.%s: is in env too" $variable) }}{{ end }}
{{- end }}
{{- $nodes := $job.nodes | default dict }}
{{- $tolerations := concat ($nodes.tolerations | default list) (.Values.defaults.tolerations | default list) | uniq }}
{{- $image := get (.Files.Get "files/options.json" | fromJson).images (gt $gpu 0 | ternary "cuda" "cpu") }}
{{- dict "name" $name "target" (.Values.job.target | default "pytorchjob")
  "command" (include "flk.code" . | fromJson).words "image" ($job.image | default .Values.defaults.image | default $image) "replicas" (int64 ($job.replicas | default 1))
  "processes" (int64 ($job.processes | default (max 1 $gpu))) "resources" (set $resources "gpu" $gpu) "strategy" ($job.strategy | default "ddp")
  "checkpoint" ($job.checkpoint | default "" | trimSuffix "/") "queue" ($job.queue | default .Values.defaults.queue | default "")
  "records" (.Values.defaults.records | default (include "flk.records" .)) "env" $env "secrets" ($job.secrets | default dict)
  "volumes" ($job.volumes | default list) "nodes" (dict "selector" ($nodes.selector | default dict) "tolerations" $tolerations)
  "patch" ($job.patch | default dict) | toJson }}
{{- end }}

{{/* The values of the job that are lists or mappings, as a patch of the pod template. Takes a list of the context, the job of
`flk.spec` and the generated template. */}}
{{- define "flk.podValues" -}}
{{- $spec := index . 1 }}
{{- $container := first (last .).spec.containers }}
{{- $env := list }}
{{- with (include "flk.code" (first .) | fromJson).hash }}
{{- $env = list (dict "name" "FLK_CODE" "value" "/flk/ship/code") (dict "name" "FLK_CODE_HASH" "value" .) }}
{{- end }}
{{- range $variable, $value := $spec.env }}{{ $env = append $env (dict "name" $variable "value" (replace "$" "$$" $value)) }}{{ end }}
{{- range $variable, $reference := $spec.secrets }}
{{- $parts := splitn ":" 2 $reference }}
{{- $env = append $env (dict "name" $variable "valueFrom" (dict "secretKeyRef" (dict "name" $parts._0 "key" $parts._1))) }}
{{- end }}
{{- $names := dict }}
{{- $volumes := list }}
{{- $mounts := list }}
{{- range append $spec.volumes (hasPrefix "s3://" $spec.checkpoint | ternary "" $spec.checkpoint) | compact }}
{{- $parts := splitn ":" 3 . }}
{{- $claim := $parts._0 }}
{{- if not (hasKey $names $claim) }}
{{- $_ := set $names $claim (printf "claim-%d" (len $names)) }}
{{- $volumes = append $volumes (dict "name" (get $names $claim) "persistentVolumeClaim" (dict "claimName" $claim)) }}
{{- end }}
{{- $mount := dict "name" (get $names $claim) "mountPath" (clean $parts._1) }}
{{- if $parts._2 }}{{ $_ := set $mount "readOnly" true }}{{ end }}
{{- range $mounts }}{{ if eq .mountPath $mount.mountPath }}{{ fail (printf "job.volumes: two volumes are mounted at %s" .mountPath) }}{{ end }}{{ end }}
{{- $mounts = append $mounts $mount }}
{{- end }}
{{- $command := $container.command }}
{{- range $spec.command }}{{ $command = append $command (replace "$" "$$" .) }}{{ end }}
{{- $own := dict "name" $container.name "command" $command }}
{{- $pod := dict "containers" (list $own) }}{{/* an empty list would replace one */}}
{{- with $env }}{{ $_ := set $own "env" . }}{{ end }}
{{- with $mounts }}{{ $_ := set $own "volumeMounts" . }}{{ end }}
{{- with $volumes }}{{ $_ := set $pod "volumes" . }}{{ end }}
{{- with $spec.nodes.tolerations }}{{ $_ := set $pod "tolerations" . }}{{ end }}
{{- with $spec.nodes.selector }}{{ $_ := set $pod "nodeSelector" . }}{{ end }}
{{- dict "spec" $pod | toJson }}
{{- end }}

{{/* The objects of the job, its own first, as a JSON list. */}}
{{- define "flk.objects" -}}
{{- if .Values.job.manifest }}{{ include "flk.manifest" . }}{{ else }}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $known := .Files.Get "files/options.json" | fromJson }}
{{- $target := get $known.targets $spec.target }}
{{- $place := $spec.checkpoint }}
{{- if not (hasPrefix "s3://" $place) }}{{ $place = (splitn ":" 2 $place)._1 | default "" }}{{ end }}
{{- $values := merge (dict "checkpoint" $place "last" (sub (int64 $spec.replicas) 1)) $spec.resources $spec }}
{{- $text := .Files.Get (printf "files/manifests/%s.json" $spec.target) }}
{{- range $name, $mark := $known.marks }}{{ $text = replace (include "flk.text" $mark) (get $values $name | default "" | include "flk.text" | toJson | trimPrefix "\"" | trimSuffix "\"") $text }}{{ end }}
{{- $manifest := fromJson $text }}
{{- if gt (len $manifest.lastPod) 63 }}
{{- fail (printf "job.name is too long: with %d replicas its last pod is named %q, and 63 characters is the limit" (int64 $spec.replicas) $manifest.lastPod) }}
{{- end }}
{{- $parts := $manifest.base }}
{{- range $manifest.patches }}
{{- if eq .given (not (empty (get $values .value))) }}
{{- $parts = (include "flk.patched" (dict "base" $parts "patch" .patch "path" .value) | fromJson).value }}
{{- end }}
{{- end }}
{{- $code := include "flk.code" . | fromJson }}
{{- if $code.script }}
{{- $items := list (dict "key" $code.key "path" (printf "code/%s" (first $code.words))) }}
{{- $source := dict "configMap" (dict "name" (printf "%s-code" $spec.name) "items" $items) }}
{{- range $parts.template.spec.volumes }}
{{- if eq .name "ship" }}{{ $_ := set .projected "sources" (append .projected.sources $source) }}{{ end }}
{{- end }}
{{- end }}
{{- $own := include "flk.podValues" (list . $spec $parts.template) | fromJson }}
{{- $plain := (include "flk.patched" (dict "base" $parts.template "patch" $own "path" "job") | fromJson).value }}
{{- $template := (include "flk.patched" (dict "base" $plain "patch" $spec.patch "path" "job.patch") | fromJson).value }}
{{- $named := list }}
{{- range dig "spec" "containers" list $template }}{{ $named = append $named (get . "name") }}{{ end }}
{{- if not (has $target.container $named) }}{{ fail (printf "job.patch: leaves no container named %s, in which the training runs" $target.container) }}{{ end }}
{{- $job := $parts.job }}
{{- $record := $manifest.spec }}
{{- range $name, $value := $spec }}{{ with $value }}{{ $_ := set $record $name . }}{{ end }}{{ end }}
{{- $_ := set $job.metadata "annotations" (dict "flk.dev/version" .Chart.AppVersion "flk.dev/spec" (toJson $record)) }}
{{- with $code.hash }}{{ $_ := set $job.metadata.annotations "flk.dev/code-hash" . }}{{ end }}
{{- if eq $job.kind "PyTorchJob" }}
{{- $_ := set $job.spec.runPolicy "backoffLimit" (min 2147483647 (mul (int64 $known.attempts) (int64 $spec.replicas))) }}
{{- $_ := set $job.spec.pytorchReplicaSpecs.Worker "template" $template }}
{{- else if eq $job.kind "TrainJob" }}
{{- include "flk.fillTrainJob" (dict "job" $job "template" $template "plain" $plain "may" $known.trainjob) }}
{{- else }}
{{- $holder := $job.spec }}
{{- range $job.spec.replicatedJobs }}{{ $holder = .template.spec }}{{ end }}
{{- $_ := set $holder "template" $template }}
{{- end }}
{{- prepend (list $parts.Service | compact) $job | toJson }}
{{- end }}
{{- end }}

{{/* Puts the pod template into a TrainJob, which has it in pieces. `plain` is the template without job.patch. */}}
{{- define "flk.fillTrainJob" -}}
{{- $may := .may }}
{{- $container := first .template.spec.containers }}
{{- $pods := list "pods" .template.spec .plain.spec (append $may.pod "containers") }}
{{- $ofContainer := list "container" $container (first .plain.spec.containers) (concat $may.container $may.trainer) }}
{{- range list $pods $ofContainer }}
{{- $part := . }}
{{- range $key, $value := index . 1 }}
{{- if not (or (has $key (last $part)) (eq (toJson $value) (get (index $part 2) $key | toJson))) }}
{{- fail (printf "job.patch: a TrainJob cannot set %s of its %s: choose another job.target" $key (first $part)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (len .template.spec.containers) 1 }}{{ fail "job.patch: a TrainJob cannot have more containers: choose another job.target" }}{{ end }}
{{- $mounted := list }}
{{- range $container.volumeMounts }}
{{- if has .name $mounted }}{{ fail (printf "job.volumes: a TrainJob cannot mount %s at two paths: choose another job.target" .name) }}{{ end }}
{{- $mounted = append $mounted .name }}
{{- end }}
{{- $pod := dict "containers" (list (dict "name" $container.name)) }}
{{- range $may.container }}{{ if hasKey $container . }}{{ $_ := set (first $pod.containers) . (get $container .) }}{{ end }}{{ end }}
{{- range $may.pod }}{{ if hasKey $.template.spec . }}{{ $_ := set $pod . (get $.template.spec .) }}{{ end }}{{ end }}
{{- $node := first (first .job.spec.runtimePatches).trainingRuntimeSpec.template.spec.replicatedJobs }}
{{- $_ := set $node.template.spec "template" (dict "metadata" .template.metadata "spec" $pod) }}
{{- range without $may.trainer "name" }}
{{- if hasKey $container . }}{{ $_ := set $.job.spec.trainer (eq . "resources" | ternary "resourcesPerNode" .) (get $container .) }}{{ end }}
{{- end }}
{{- end }}
