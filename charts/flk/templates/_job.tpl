{{/*
The job of this release with all its defaults, as flk.spec has it. The chart renders what `flk render` prints for the same job;
tests/unit/chart/test_parity.py compares the two. A template returns text, so other values are returned as JSON.
*/}}

{{- define "flk.jobName" -}}
{{ .Values.job.name | default .Release.Name }}
{{- end }}

{{/* A value as text: whole numbers as such, which Helm may write as 1e+09. */}}
{{- define "flk.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The seconds in a duration, 75s, 1h30m, or a number of seconds. */}}
{{- define "flk.seconds" -}}
{{- $text := include "flk.text" . }}
{{- $seconds := 0 }}
{{- if regexMatch "^[0-9]+$" $text }}{{ $seconds = int64 $text }}{{ else }}
{{- range $unit, $length := dict "d" 86400 "h" 3600 "m" 60 "s" 1 }}
{{- $seconds = add $seconds (mul $length (regexFind (printf "[0-9]+%s" $unit) $text | trimSuffix $unit | int64)) }}
{{- end }}
{{- end }}
{{- $seconds }}
{{- end }}

{{/* Seconds as a duration: 5400 is 1h30m. */}}
{{- define "flk.duration" -}}
{{- $rest := int64 . }}
{{- range list (list "d" 86400) (list "h" 3600) (list "m" 60) (list "s" 1) }}
{{- $unit := first . }}
{{- $length := last . }}
{{- with div $rest $length }}{{ . }}{{ $unit }}{{ end }}
{{- $rest = mod $rest $length }}
{{- end }}
{{- end }}

{{/* PVC:/PATH with the path normalised. */}}
{{- define "flk.claim" -}}
{{- $parts := splitn ":" 2 . }}
{{- $parts._0 }}:{{ clean $parts._1 }}
{{- end }}

{{/* A volume in one of the forms of flk.spec.mounts, as JSON: its kind, the name of its source, the path, whether it is
read-only, and the whole text with both paths normalised. */}}
{{- define "flk.mount" -}}
{{- $body := trimSuffix ":ro" . }}
{{- $kind := "claim" }}
{{- $prefix := "" }}
{{- range $name, $text := dict "nfs" "nfs://" "secret" "secret:" "configmap" "configmap:" "hostpath" "hostpath:" }}
{{- if hasPrefix $text $body }}{{ $kind = $name }}{{ $prefix = $text }}{{ end }}
{{- end }}
{{- $parts := splitn ":" 2 (trimPrefix $prefix $body) }}
{{- $name := $parts._0 }}
{{- if eq $kind "hostpath" }}{{ $name = clean $name }}{{ end }}
{{- if eq $kind "nfs" }}{{ $server := splitn "/" 2 $name }}{{ $name = printf "%s%s" $server._0 (printf "/%s" $server._1 | clean) }}{{ end }}
{{- $given := and (ne $body .) (not (has $kind (list "secret" "configmap"))) }}
{{- $text := printf "%s%s:%s%s" $prefix $name (clean $parts._1) ($given | ternary ":ro" "") }}
{{- dict "kind" $kind "name" $name "path" (clean $parts._1) "readOnly" (or $given (has $kind (list "secret" "configmap")))
  "source" (printf "%s%s" $prefix $name) "text" $text | toJson }}
{{- end }}

{{/* A toleration with all its fields, from some of them or from key=value:Effect. */}}
{{- define "flk.toleration" -}}
{{- $toleration := . }}
{{- if kindIs "string" . }}
{{- $parts := splitn ":" 2 . }}
{{- $pair := splitn "=" 2 $parts._0 }}
{{- $toleration = dict "key" $pair._0 "effect" ($parts._1 | default "") }}
{{- if contains "=" $parts._0 }}{{ $_ := set $toleration "value" $pair._1 }}
{{- else }}{{ $_ := set $toleration "operator" "Exists" }}{{ end }}
{{- end }}
{{- include "flk.merged" (list (dict "key" "" "operator" "Equal" "value" "" "effect" "") (include "flk.withoutNulls" $toleration | fromJson).value) }}
{{- end }}

{{/* How many pods the job trains with, as JSON: least, and in `elastic` the field of flk.yaml, or nothing; replicas, created
and most, with spares. */}}
{{- define "flk.pods" -}}
{{- $job := .Values.job }}
{{- $spares := int64 ($job.spares | default 0) }}
{{- $replicas := int64 ($job.replicas | default 1) }}
{{- $result := dict "spares" $spares }}
{{- with $job.elastic }}
{{- $elastic := . }}
{{- if kindIs "string" . }}
{{- $parts := splitn ":" 2 . }}
{{- $elastic = dict "min" (int64 $parts._0) "max" (int64 $parts._1) }}
{{- end }}
{{- $least := int64 $elastic.min }}
{{- $most := int64 $elastic.max }}
{{- if gt $least $most }}{{ fail (printf "job.elastic: min is %d, more than max, which is %d" $least $most) }}{{ end }}
{{- $replicas = int64 ($job.replicas | default $most) }}
{{- if $spares }}{{ fail "job.spares: an elastic job goes on with fewer pods, so it has none: leave out one of the two" }}{{ end }}
{{- if or (lt $replicas $least) (gt $replicas $most) }}{{ fail (printf "job.replicas: must be from %d to %d in this elastic job (is %d)" $least $most $replicas) }}{{ end }}
{{- $_ := set $result "elastic" (dict "min" $least "max" $most "batch" ($elastic.batch | default "keep")) }}
{{- $_ := set $result "most" $most }}
{{- $_ := set $result "least" $least }}
{{- end }}
{{- $_ := set $result "replicas" $replicas }}
{{- if not $result.least }}{{ $_ := set $result "least" $replicas }}{{ end }}
{{- $_ := set $result "created" (add $replicas $spares) }}
{{- if not $result.most }}{{ $_ := set $result "most" $result.created }}{{ end }}
{{- $target := get (.Files.Get "files/options.json" | fromJson).targets (include "flk.targetName" .) }}
{{- if and (or $result.elastic $spares) (not $target.scalable) }}{{ fail "job.elastic, job.spares: this job.target has pods of a fixed number, which all must end with success" }}{{ end }}
{{- toJson $result }}
{{- end }}

{{/* The job with all its defaults, as flk records it in the annotation flk.dev/spec. Options with one value come from the job,
the site's defaults or flk.yaml's, in this order. */}}
{{- define "flk.spec" -}}
{{- $job := .Values.job | toJson | fromJson }}{{/* the numbers of --set are integers, those of files and of JSON are not */}}
{{- $defaults := .Values.defaults | toJson | fromJson }}
{{- $known := .Files.Get "files/options.json" | fromJson }}
{{- $nothing := list "" "<nil>" }}
{{- $spec := dict }}
{{- $parts := dict "resources" dict "pods" dict "elastic" dict }}
{{- range $path, $mark := $known.marks }}
{{- $at := splitList "." $path }}
{{- $name := last $at }}
{{- $given := list $job $defaults $known.defaults }}
{{- $holder := $spec }}
{{- if gt (len $at) 1 }}
{{- $part := get $job (first $at) }}
{{- $given = list (kindIs "map" $part | ternary $part dict) }}
{{- $holder = get $parts (first $at) }}
{{- end }}
{{- $value := "" }}
{{- range $given }}{{ if has (toString $value) $nothing }}{{ $value = get . $name }}{{ end }}{{ end }}
{{- if not (has (toString $value) $nothing) }}
{{- if hasKey $known.durations $path }}
{{- $seconds := include "flk.seconds" $value }}
{{- if lt (int64 $seconds) (get $known.durations $path | int64) }}{{ fail (printf "job.%s must be at least one second (is %q)" $path (include "flk.text" $value)) }}{{ end }}
{{- $value = include "flk.duration" $seconds | default "0s" }}
{{- else if and (kindIs "string" $mark) (kindIs "float64" $value) }}{{ $value = include "flk.text" $value }}
{{- else if and (kindIs "float64" $mark) (ne (toString $value) "auto") }}{{ $value = int64 $value }}
{{- end }}
{{- $_ := set $holder $name $value }}
{{- end }}
{{- end }}
{{- with $spec.requirements }}{{ $_ := set $spec "requirements" (clean .) }}{{ end }}
{{- with $spec.accelerate_config }}{{ $_ := set $spec "accelerate_config" (clean .) }}{{ end }}
{{- $name := include "flk.jobName" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "job.name must be lower-case letters, digits and '-', starting with a letter and not ending with '-' (is %q)" $name) }}
{{- end }}
{{- if and $spec.queue_priority (not $spec.queue) }}{{ fail "job.queue_priority: needs a queue" }}{{ end }}
{{- $sinks := dict }}
{{- range splitList "," ($spec.metrics | default "") }}
{{- $kind := first (splitList ":" .) }}
{{- if hasKey $sinks $kind }}{{ fail (printf "job.metrics: names %s twice" $kind) }}{{ end }}
{{- $_ := set $sinks $kind true }}
{{- end }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $asked := $job.resources | default dict }}
{{- $gpu := splitn ":" 2 (include "flk.text" ($asked.gpu | default 0)) }}
{{- $type := $asked.gpu_type | default "" }}
{{- if $gpu._1 }}{{ $type = upper $gpu._0 }}{{ end }}
{{- $resources := set (omit $parts.resources "gpu_type") "gpu" (int64 ($gpu._1 | default $gpu._0)) }}
{{- with $type }}
{{- $known := keys ($.Files.Get "files/gpus.json" | fromJson) | sortAlpha }}
{{- if not (has . $known) }}{{ fail (printf "job.resources.gpu: flk knows no GPUs of type %s, only %s" . (join ", " $known)) }}{{ end }}
{{- if not $resources.gpu }}{{ fail (printf "job.resources.gpu_type: needs a number of GPUs: %s:1" .) }}{{ end }}
{{- $_ := set $resources "gpu_type" . }}
{{- end }}
{{- with $asked.extended }}
{{- $extended := dict }}
{{- range $resource, $amount := . }}{{ $_ := set $extended $resource (int64 $amount) }}{{ end }}
{{- $_ := set $resources "extended" $extended }}
{{- end }}
{{- $nodes := $job.nodes | default dict }}
{{- $tolerations := list }}
{{- range concat ($nodes.tolerations | default list) (.Values.defaults.tolerations | default list) }}
{{- $toleration := include "flk.toleration" . | fromJson }}
{{- if not (has $toleration $tolerations) }}{{ $tolerations = append $tolerations $toleration }}{{ end }}
{{- end }}
{{- $env := $job.env | default dict }}
{{- if and .Values.podMonitor.enabled (hasKey $env "FLK_METRICS_PORT") (ne (include "flk.text" $env.FLK_METRICS_PORT) (include "flk.text" .Values.podMonitor.port)) }}
{{- fail (printf "podMonitor.port: is %s, and job.env.FLK_METRICS_PORT is %s: Prometheus would find no metrics there" (include "flk.text" .Values.podMonitor.port) (include "flk.text" $env.FLK_METRICS_PORT)) }}
{{- end }}
{{- if .Values.podMonitor.enabled }}{{ $env = merge (dict) $env (dict "FLK_METRICS_PORT" (include "flk.text" .Values.podMonitor.port)) }}{{ end }}
{{- $volumes := list }}
{{- range $job.volumes | default list }}
{{- $volumes = append $volumes (include "flk.mount" . | fromJson).text }}
{{- end }}
{{- $spec = include "flk.merged" (list $spec (dict "name" $name "command" (include "flk.code" . | fromJson).command
  "replicas" (int64 $count.replicas) "strategy" ($spec.strategy | lower | trimPrefix "_") "resources" $resources "env" $env
  "secrets" ($job.secrets | default dict) "volumes" $volumes "claims" ($job.claims | default list) "patch" ($job.patch | default dict) "ship" true
  "nodes" (dict "selector" ($nodes.selector | default dict) "tolerations" $tolerations
  "avoid" ($nodes.avoid | default list)))) | fromJson }}
{{- with $job.pods }}
{{- $lists := dict "labels" (.labels | default dict) "annotations" (.annotations | default dict) "pull_secrets" (.pull_secrets | default list) }}
{{- $_ := set $spec "pods" (merge $lists $parts.pods) }}
{{- end }}
{{- with $count.elastic }}{{ $_ := set $spec "elastic" . }}{{ end }}
{{- with $job.pip }}{{ $_ := set $spec "pip" . }}{{ end }}
{{- with $spec.target }}{{ $_ := set $spec "target" (include "flk.targetName" $) }}{{ end }}
{{- with $spec.gang }}{{ $_ := set $spec "gang" (include "flk.gangName" $) }}{{ end }}
{{- with $spec.topology }}{{ $_ := set $spec "topology" (contains ":" . | ternary . (printf "%s:required" .)) }}{{ end }}
{{- with $spec.records | default (include "flk.records" .) }}{{ $_ := set $spec "records" . }}{{ end }}
{{- with $spec.memory_path }}{{ $_ := set $spec "memory_path" (clean .) }}{{ end }}
{{- with $job.checkpoint }}
{{- $place := . }}
{{- if kindIs "map" . }}{{ $place = .address | default (printf "%s:%s" .volume .path) }}{{ end }}
{{- if hasPrefix "s3://" $place }}
{{- $_ := set $spec "checkpoint" (dict "address" (regexReplaceAll "/+$" $place "")) }}
{{- else }}
{{- $parts := splitn ":" 2 (include "flk.claim" $place) }}
{{- $_ := set $spec "checkpoint" (dict "volume" $parts._0 "path" $parts._1) }}
{{- end }}
{{- end }}
{{- include "flk.check" (list . $spec) }}
{{- toJson $spec }}
{{- end }}

{{/* Ranks in each pod, as text, from the job of `flk.spec`: one for each GPU of any vendor. */}}
{{- define "flk.processes" -}}
{{- $accelerators := int64 .resources.gpu }}
{{- range $resource, $amount := .resources.extended }}
{{- if hasSuffix "/gpu" $resource }}{{ $accelerators = add $accelerators (int64 $amount) }}{{ end }}
{{- end }}
{{- .processes | default (max 1 $accelerators) | int64 }}
{{- end }}

{{/* Labels of the job, its pods and what else belongs to it, as JSON. */}}
{{- define "flk.jobLabels" -}}
{{- include "flk.merged" (list (.Values.job.pods | default dict).labels (dict "app.kubernetes.io/managed-by" "flk" "flk.dev/job" (include "flk.jobName" .))) }}
{{- end }}
