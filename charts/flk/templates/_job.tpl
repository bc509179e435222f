{{/* The job of this release, from files/manifests. A template returns text: other values come as JSON or YAML. */}}

{{- define "flk.jobName" -}}
{{- if .Values.job.manifest }}{{ (include "flk.objects" . | fromYamlArray | first).metadata.name }}
{{- else }}{{ .Values.job.name | default .Release.Name }}{{ end }}
{{- end }}

{{/* The image of a job that names none. */}}
{{- define "flk.image" }}pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime{{ end }}

{{/* A number as text. Helm itself would write 1000000 of a file as 1e+06. */}}
{{- define "flk.text" }}{{ kindIs "string" . | ternary . (toJson .) }}{{ end }}

{{/* The job in the fields of flk.yaml: the values of the release, and the defaults of the site. */}}
{{- define "flk.spec" -}}
{{- $job := .Values.job }}
{{- $name := include "flk.jobName" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$" $name) }}
{{- fail (printf "job.name: must be a letter and at most 41 lower-case letters, digits and '-' (is %q)" $name) }}
{{- end }}
{{- $command := list }}
{{- range $job.command | default (list "train.py") }}{{ $command = include "flk.text" . | append $command }}{{ end }}
{{- if not (or $job.script $job.command) }}
{{- fail "job.script: is empty (--set-file job.script=train.py), and job.command names no code of the image" }}
{{- else if regexMatch "^(.*/)?(torchrun|python[0-9.]*)$" (first $command) }}
{{- fail (printf "job.command: begins with the script or with -m, not with %s" (first $command)) }}
{{- else if and $job.script (not (regexMatch "^\\w[-\\w.]*[.]py$" (first $command))) }}
{{- fail (printf "job.command: must begin with the name of job.script: [train.py, --lr] (is %q)" (first $command)) }}
{{- end }}
{{- $resources := dict "gpu" (int64 ($job.resources).gpu) }}
{{- range $key, $value := omit ($job.resources | default dict) "gpu" }}
{{- with $value }}{{ $_ := set $resources $key (include "flk.text" .) }}{{ end }}
{{- end }}
{{- $env := $job.env | default dict }}
{{- if (.Values.podMonitor).enabled }}{{ $_ := set $env "FLK_METRICS_PORT" (include "flk.metricsPort" .) }}{{ end }}
{{- $tolerations := concat (($job.nodes).tolerations | default list) ((.Values.defaults).tolerations | default list) }}
{{- $spec := dict "name" $name "target" ($job.target | default "pytorchjob") "strategy" ($job.strategy | default "ddp")
  "image" ($job.image | default (.Values.defaults).image | default (include "flk.image" .)) "replicas" ($job.replicas | default 1)
  "processes" ($job.processes | default $resources.gpu | default 1) "checkpoint" $job.checkpoint
  "queue" ($job.queue | default (.Values.defaults).queue) "volumes" $job.volumes
  "records" ((.Values.defaults).records | default (include "flk.records" .)) }}
{{- range $key, $value := $spec }}{{ if empty $value }}{{ $_ := unset $spec $key }}{{ end }}{{ end }}
{{- $nodes := dict "selector" (($job.nodes).selector | default dict) "tolerations" (uniq $tolerations) }}
{{- merge $spec (dict "command" $command "resources" $resources "env" $env "secrets" ($job.secrets | default dict)
  "nodes" $nodes "patch" ($job.patch | default dict)) | toJson }}
{{- end }}

{{/* The objects of the job, its own first, as a list: those of job.manifest, or those of the values. */}}
{{- define "flk.objects" -}}
{{- $objects := list }}
{{- if .Values.job.manifest }}
{{- range regexSplit "(?m)^---\\s*$" .Values.job.manifest -1 }}
{{- with (fromYaml .).Error }}{{ fail (printf "job.manifest: %s" .) }}{{ end }}
{{- with fromYaml . }}{{ $objects = append $objects . }}{{ end }}
{{- end }}
{{- if not (has (dig "kind" "" (first $objects | default dict)) (list "PyTorchJob" "TrainJob" "JobSet" "Job")) }}
{{- fail "job.manifest: must begin with a PyTorchJob, a TrainJob, a JobSet or a Job, as flk render prints it" }}
{{- end }}
{{- else }}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $command := list }}
{{- range $spec.command }}{{ $command = append $command (replace "$" "$$" .) }}{{ end }}
{{- $env := list }}
{{- $home := hasKey (merge (dict) $spec.secrets $spec.env) "HOME" | ternary dict (dict "HOME" "/flk/work") }}
{{- range $key, $value := merge dict $spec.env $home }}
{{- if hasKey $spec.secrets $key }}{{ fail (printf "job.secrets.%s: is in env too" $key) }}{{ end }}
{{- $env = append $env (dict "name" $key "value" (replace "$" "$$" $value)) }}
{{- end }}
{{- range $key, $reference := $spec.secrets }}
{{- $parts := splitn ":" 2 $reference }}
{{- $source := dict "secretKeyRef" (dict "name" $parts._0 "key" $parts._1) }}
{{- $env = append $env (dict "name" $key "valueFrom" $source) }}
{{- end }}
{{- $place := regexReplaceAll "/+$" ($spec.checkpoint | default "") "" }}
{{- $claims := $spec.volumes | default list }}
{{- if not (hasPrefix "s3://" $place) }}
{{- $claims = append $claims $place | compact }}
{{- $place = empty $place | ternary "" (clean (splitn ":" 2 $place)._1) }}
{{- end }}
{{- $volumes := list }}
{{- $mounts := list }}
{{- $names := dict }}
{{- $paths := list }}
{{- range $claims }}
{{- $parts := splitn ":" 3 . }}
{{- $path := clean $parts._1 }}
{{- if regexMatch "^/((flk|dev|proc|sys)(/|$)|$)" $path }}
{{- fail (printf "job.volumes: %s is a folder that flk or the system uses: choose another path" $path) }}
{{- end }}
{{- if has $path $paths }}{{ fail (printf "job.volumes: two volumes are mounted at %s" $path) }}{{ end }}
{{- $paths = append $paths $path }}
{{- if not (hasKey $names $parts._0) }}
{{- $_ := set $names $parts._0 (printf "claim-%d" (len $names)) }}
{{- $source := dict "claimName" $parts._0 }}
{{- $volumes = append $volumes (dict "name" (get $names $parts._0) "persistentVolumeClaim" $source) }}
{{- else if eq $spec.target "trainjob" }}
{{- fail (printf "job.volumes: a TrainJob cannot mount %s at two paths: choose another job.target" $parts._0) }}
{{- end }}
{{- $access := empty $parts._2 | ternary dict (dict "readOnly" true) }}
{{- $mounts = append $mounts (merge (dict "name" (get $names $parts._0) "mountPath" $path) $access) }}
{{- end }}
{{- range $outer := $mounts }}
{{- range $path := empty $outer.readOnly | ternary list $paths }}
{{- if hasPrefix (printf "%s/" $outer.mountPath) $path }}
{{- fail (printf "job.volumes: %s is inside of %s, which is read-only: choose another path" $path $outer.mountPath) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.job.script }}
{{- $volumes = append $volumes (dict "name" "code" "configMap" (dict "name" (printf "%s-code" $spec.name))) }}
{{- $path := printf "/flk/work/%s" (first $command) }}
{{- $mounts = append $mounts (dict "name" "code" "mountPath" $path "subPath" (first $command) "readOnly" true) }}
{{- $_ := set $spec "hash" (sha256sum .) }}
{{- end }}
{{- /* The architecture of the nodes, where that of the image is known. */}}
{{- $known := eq $spec.image (include "flk.image" .) | ternary (dict "kubernetes.io/arch" "amd64") dict }}
{{- $values := dict "command" $command "env" $env "volumes" $volumes "mounts" $mounts "version" .Chart.AppVersion
  "spec" (omit $spec "hash" | toJson) "checkpoint" (replace "$" "$$" $place)
  "selector" (mergeOverwrite (deepCopy $known) $spec.nodes.selector)
  "limits" (or $spec.resources.memory $spec.resources.gpu)
  "requests" (or $spec.resources.cpu $spec.resources.memory $spec.resources.gpu) }}
{{- $template := .Files.Get (printf "files/manifests/%s.yaml" $spec.target) }}
{{- $objects = tpl $template (merge $values $spec.resources $spec.nodes (omit $spec "env")) | fromYamlArray }}
{{- $holder := (first $objects).spec }}
{{- with $holder.pytorchReplicaSpecs }}{{ $holder = .Worker }}{{ end }}
{{- range $holder.runtimePatches }}{{ $holder = .trainingRuntimeSpec.template.spec }}{{ end }}
{{- range $holder.replicatedJobs }}{{ $holder = .template.spec }}{{ end }}
{{- with pick ($spec.patch.spec | default dict) "containers" "volumes" }}
{{- fail (printf "job.patch.spec.%s: would replace flk's own, so use job.manifest" (keys . | sortAlpha | first)) }}
{{- end }}
{{- $_ := mergeOverwrite $holder.template $spec.patch }}
{{- end }}
{{- toYaml $objects }}
{{- end }}
