{{/*
What travels to the pods in ConfigMaps: flk's runtime, as the archive that `flk submit` ships, and the code of the job, as
files. Both are mounted where `flk submit` mounts its archives.
*/}}

{{/* The files of the job's code by their paths, its command and its hash, as JSON. */}}
{{- define "flk.code" -}}
{{- $job := .Values.job }}
{{- $command := $job.command | default list }}
{{- if kindIs "string" $command }}{{ $command = regexSplit "\\s+" (trim $command) -1 }}{{ end }}
{{- $words := list }}
{{- range $command }}{{ $words = append $words (include "flk.text" .) }}{{ end }}
{{- $command = $words }}
{{- if regexMatch "^(.*/)?(torchrun|python[0-9.]*)$" (first $command | default "") }}
{{- fail (printf "job.command: begins with the script or with -m, not with %s: flk starts the ranks itself" (first $command)) }}
{{- end }}
{{- $files := dict }}
{{- range $path, $text := $job.files | default dict }}{{ $_ := set $files $path $text }}{{ end }}
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

{{/* The source of the code in the volume that the pods mount, as JSON; empty if the image has the code. */}}
{{- define "flk.codeSource" -}}
{{- $items := list }}
{{- range $path := keys (include "flk.code" . | fromJson).files | sortAlpha }}
{{- $items = append $items (dict "key" (include "flk.fileKey" $path) "path" (printf "code/%s" $path)) }}
{{- end }}
{{- ternary (dict "configMap" (dict "name" (printf "%s-code" (include "flk.jobName" .)) "items" $items)) dict (gt (len $items) 0) | toJson }}
{{- end }}

{{/* A ConfigMap that never changes, as JSON, from a list of its name, its metadata without the name, the field of its
data and the data. */}}
{{- define "flk.configMap" -}}
{{- dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" (set (index . 1) "name" (first .)) "immutable" true (index . 2) (last .) | toJson }}
{{- end }}
