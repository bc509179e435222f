{{/*
What travels to the pods in ConfigMaps: flk's runtime, each module as a file of its own, and the code of the job. It is
mounted where `flk submit` mounts its archives.
*/}}

{{/* The files of the job's code by their paths, its command and its hash, as JSON. */}}
{{- define "flk.code" -}}
{{- $job := .Values.job }}
{{- $command := $job.command }}
{{- if kindIs "string" $command }}{{ $command = regexSplit "\\s+" (trim $command) -1 }}{{ end }}
{{- $words := list }}
{{- range $command }}{{ $words = append $words (include "flk.text" .) }}{{ end }}
{{- $command = $words }}
{{- $files := dict }}
{{- range $path, $text := $job.files }}{{ $_ := set $files $path $text }}{{ end }}
{{- $script := $job.script }}
{{- if not (or $script $command) }}{{ $script = .Files.Get "files/gpt.py" }}{{ end }}
{{- if $script }}
{{- $command = $command | default (list "train.py") }}
{{- $name := first $command }}
{{- if or (hasPrefix "-" $name) (hasPrefix "/" $name) (has ".." (splitList "/" $name)) }}
{{- fail (printf "job.command: must begin with the file name of job.script, as in [train.py, --steps, \"100\"] (is %q)" $name) }}
{{- end }}
{{- if hasKey $files $name }}{{ fail (printf "job.files: %s is job.script already" $name) }}{{ end }}
{{- $_ := set $files $name $script }}
{{- end }}
{{- $sums := "" }}
{{- $keys := dict }}
{{- range $path := keys $files | sortAlpha }}
{{- $sums = printf "%s%s  %s\n" $sums (get $files $path | sha256sum) $path }}
{{- $key := include "flk.fileKey" $path }}
{{- if hasKey $keys $key }}{{ fail (printf "job.files: %s and %s differ only in / and .: rename one" (get $keys $key) $path) }}{{ end }}
{{- $_ := set $keys $key $path }}
{{- end }}
{{- dict "files" $files "command" $command "hash" (ternary (sha256sum $sums) "" (gt (len $files) 0)) | toJson }}
{{- end }}

{{/* The key of a file in a ConfigMap, in which / is not allowed. */}}
{{- define "flk.fileKey" -}}
{{ replace "/" "." . }}
{{- end }}

{{/* The modules of the runtime as a JSON list of lists of paths: one for each ConfigMap, which may have 1 MiB. */}}
{{- define "flk.runtimeParts" -}}
{{- $parts := list }}
{{- $part := list }}
{{- $size := 0 }}
{{- range $path, $content := .Files.Glob "files/flk_runtime/**.py" }}
{{- $size = add $size (len $content) }}
{{- if gt $size 900000 }}
{{- $parts = append $parts $part }}
{{- $part = list }}
{{- $size = len $content }}
{{- end }}
{{- $part = append $part $path }}
{{- end }}
{{- append $parts $part | toJson }}
{{- end }}

{{/* The volume with the runtime and the code, as JSON. */}}
{{- define "flk.shipVolume" -}}
{{- $name := include "flk.jobName" . }}
{{- $sources := list }}
{{- range $number, $part := include "flk.runtimeParts" . | fromJsonArray }}
{{- $items := list }}
{{- if eq $number 0 }}{{ $items = append $items (dict "key" "__main__.py" "path" "flk_runtime/__main__.py") }}{{ end }}
{{- range $part }}
{{- $path := trimPrefix "files/" . }}
{{- $items = append $items (dict "key" (include "flk.fileKey" $path) "path" (printf "flk_runtime/%s" $path)) }}
{{- end }}
{{- $sources = append $sources (dict "configMap" (dict "name" (printf "%s-runtime-%d" $name $number) "items" $items)) }}
{{- end }}
{{- $items := list }}
{{- range $path := keys (include "flk.code" . | fromJson).files | sortAlpha }}
{{- $items = append $items (dict "key" (include "flk.fileKey" $path) "path" (printf "code/%s" $path)) }}
{{- end }}
{{- with $items }}
{{- $sources = append $sources (dict "configMap" (dict "name" (printf "%s-code" $name) "items" .)) }}
{{- end }}
{{- dict "name" "ship" "projected" (dict "sources" $sources) | toJson }}
{{- end }}

{{/* A ConfigMap that never changes, as JSON, from a list of its name, its metadata without the name, and its data. */}}
{{- define "flk.configMap" -}}
{{- $metadata := include "flk.merged" (list (index . 1) (dict "name" (first .))) | fromJson }}
{{- dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "immutable" true "data" (last .) | toJson }}
{{- end }}
