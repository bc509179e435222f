{{/*
Rules of flk.spec between several fields, which no JSON schema can have. tests/unit/chart/test_rules.py compares them with flk's.
*/}}

{{/* Fails for a job of `flk.spec` that flk would refuse. Takes a list of the context and the job. */}}
{{- define "flk.check" -}}
{{- $spec := last . }}
{{- range $name := list "cpu" "memory" }}
{{- $request := get $spec.resources $name }}
{{- $limit := get $spec.resources (printf "%s_limit" $name) }}
{{- if and $request $limit }}
{{- if lt (include "flk.quantity" $limit | float64) (include "flk.quantity" $request | float64) }}
{{- fail (printf "job.resources.%s_limit: is %s, less than %s, which is %s" $name $limit $name $request) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := $spec.secrets }}
{{- if hasKey $spec.env $name }}{{ fail (printf "job.secrets.%s: is in env too" $name) }}{{ end }}
{{- end }}
{{- range $name := list "memory" "memory_limit" "ephemeral_storage" "shm" }}
{{- with get $spec.resources $name }}{{ if lt (include "flk.quantity" . | float64) 1048576.0 }}
{{- fail (printf "job.resources.%s: must be at least 1Mi; without a unit it is a number of bytes (is %q)" $name .) }}
{{- end }}{{ end }}
{{- end }}
{{- $paths := list }}
{{- $closed := list }}
{{- range $spec.volumes }}
{{- $mount := include "flk.mount" . | fromJson }}
{{- $paths = append $paths $mount.path }}
{{- if $mount.readOnly }}{{ $closed = append $closed $mount }}{{ end }}
{{- end }}
{{- with ($spec.checkpoint | default dict).path }}{{ $paths = append $paths . }}{{ end }}
{{- range $index, $path := $paths }}
{{- if has $path (slice $paths (add1 $index | int)) }}{{ fail (printf "job.volumes: two volumes are mounted at %s" $path) }}{{ end }}
{{- range $closed }}{{ if hasPrefix (printf "%s/" .path) $path }}
{{- fail (printf "job.volumes: %s is inside of %s, which is read-only, so that no folder can be made there to mount it: choose another path" $path .text) }}
{{- end }}{{ end }}
{{- end }}
{{- range $spec.nodes.tolerations }}
{{- if not (or .key (eq .operator "Exists")) }}{{ fail "job.nodes.tolerations: without a key its operator must be Exists" }}{{ end }}
{{- if and .value (eq .operator "Exists") }}{{ fail "job.nodes.tolerations: with the operator Exists it has no value" }}{{ end }}
{{- if and (hasKey . "tolerationSeconds") (ne .effect "NoExecute") }}{{ fail "job.nodes.tolerations: tolerationSeconds needs the effect NoExecute" }}{{ end }}
{{- end }}
{{- range $key, $value := $spec.patch }}
{{- if not (has $key (list "metadata" "spec")) }}{{ fail (printf "job.patch.%s: a pod template has only metadata and spec" $key) }}{{ end }}
{{- end }}
{{- $place := (first .).Values.job.checkpoint }}
{{- if kindIs "map" $place }}
{{- if and $place.address (or $place.volume $place.path) }}{{ fail "job.checkpoint: has an address in S3 and a volume: leave out one of the two" }}{{ end }}
{{- end }}
{{- include "flk.checkCommand" $spec.command }}
{{- include "flk.checkVolumes" . }}
{{- include "flk.checkPackages" (list (include "flk.code" (first .) | fromJson).files $spec) }}
{{- end }}

{{/* Fails for a volume of a kind that the site forbids. Takes a list of the context and the job. */}}
{{- define "flk.checkVolumes" -}}
{{- $spec := last . }}
{{- $forbidden := (first .).Values.defaults.forbidden_volumes | default list }}
{{- $volumes := list }}
{{- range $spec.volumes }}{{ $volumes = append $volumes (list "volumes" (include "flk.mount" . | fromJson).kind .) }}{{ end }}
{{- with $spec.checkpoint }}
{{- if .volume }}{{ $volumes = append $volumes (list "checkpoint" "claim" (printf "%s:%s" .volume .path)) }}{{ end }}
{{- end }}
{{- $kinds := dict "persistentVolumeClaim" "claim" "ephemeral" "claim" "nfs" "nfs" "secret" "secret" "configMap" "configmap" "hostPath" "hostpath" }}
{{- $pod := ($spec.patch | default dict).spec }}
{{- if kindIs "map" $pod }}{{ $pod = $pod.volumes }}{{ end }}
{{- range $volume := kindIs "slice" $pod | ternary $pod list }}
{{- $parts := list $volume }}
{{- if kindIs "map" $volume }}
{{- if kindIs "map" $volume.projected }}{{ with $volume.projected.sources }}{{ if kindIs "slice" . }}{{ $parts = concat $parts . }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- range $part := $parts }}
{{- range $key := kindIs "map" $part | ternary (keys $kinds | sortAlpha) list }}
{{- if not (kindIs "invalid" (get $part $key)) }}{{ if hasKey $part $key }}{{ $volumes = append $volumes (list "patch.spec.volumes" (get $kinds $key) $volume.name) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $volumes }}
{{- if has (index . 1) $forbidden }}{{ fail (printf "job.%s: the defaults of this namespace forbid volumes of kind %s: %s" (index . 0) (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- end }}

{{- define "flk.checkCommand" -}}
{{- $name := first . | base }}
{{- if or (eq $name "torchrun") (and (hasPrefix "python" $name) (not (hasSuffix ".py" $name))) }}
{{- fail (printf "job.command: begins with the script or with -m, not with %s: flk starts the ranks itself" $name) }}
{{- end }}
{{- if eq (first .) "-m" }}
{{- if lt (len .) 2 }}{{ fail "job.command: -m needs a module" }}{{ end }}
{{- if has (index . 1) (list "torch.distributed.run" "torch.distributed.launch") }}
{{- fail (printf "job.command: begins with the script or with -m, not with %s: flk starts the ranks itself" (index . 1)) }}
{{- end }}
{{- else if hasPrefix "-" (first .) }}{{ fail (printf "job.command: begins with the script or with -m (is %q)" (first .)) }}
{{- end }}
{{- end }}

{{/* Takes a list of the files of the code by their paths, and the job. Only these files can be read here. */}}
{{- define "flk.checkPackages" -}}
{{- $files := first . }}
{{- $spec := last . }}
{{- with $spec.accelerate_config }}
{{- if not (or (hasPrefix "/" .) (hasKey $files .) (empty $files)) }}{{ fail (printf "job.accelerate_config: there is no file %s in job.files" .) }}{{ end }}
{{- end }}
{{- with $spec.requirements }}
{{- if not (or (hasPrefix "/" .) (hasKey $files .) (empty $files)) }}{{ fail (printf "job.requirements: there is no file %s in job.files" .) }}{{ end }}
{{- if and $spec.pip (contains "--hash=" (get $files . | default "")) }}
{{- fail (printf "job.pip: %s has no hash, and %s has hashes, so pip refuses packages without one" (first $spec.pip) .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes as a number, as text: 1500m is 1.5, 4Gi is 4294967296. */}}
{{- define "flk.quantity" -}}
{{- $suffix := regexFind "([numkMGTPE]|[KMGTPE]i)$" . }}
{{- $factors := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
  "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- printf "%.17g" (mulf (trimSuffix $suffix . | float64) (get $factors $suffix)) }}
{{- end }}
