{{/*
The PyTorchJob that `flk render` prints for a job with these values and `ship: false` (operator_client/flk/manifest).
tests/unit/test_chart_values.py compares the two. A template returns text, so other values are returned as JSON.
*/}}

{{- define "flk.jobName" -}}
{{ .Values.job.name | default .Release.Name }}
{{- end }}

{{/* A value as text: whole numbers as such, which Helm may write as 1e+09. */}}
{{- define "flk.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The seconds in a duration, 75s, 1h30m, or a number of seconds; takes a list of the field's name and the duration. */}}
{{- define "flk.seconds" -}}
{{- $seconds := include "flk.secondsOrZero" (last .) }}
{{- if lt (int64 $seconds) 1 }}{{ fail (printf "job.%s must be at least one second (is %q)" (first .) (include "flk.text" (last .))) }}{{ end }}
{{- $seconds }}
{{- end }}

{{- define "flk.secondsOrZero" -}}
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
{{- include "flk.merged" (list (dict "key" "" "operator" "Equal" "value" "" "effect" "") $toleration) }}
{{- end }}

{{/* The job with all its defaults, as flk records it in the annotation flk.dev/spec. */}}
{{- define "flk.spec" -}}
{{- $job := .Values.job }}
{{- $defaults := .Values.defaults }}
{{- $name := include "flk.jobName" . }}
{{- $last := printf "%s-worker-%d" $name (sub (int64 $job.replicas) 1) }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "job.name must be lower-case letters, digits and '-', starting with a letter and not ending with '-' (is %q)" $name) }}
{{- end }}
{{- if gt (len $last) 63 }}
{{- fail (printf "job.name is too long: with %d replicas its last pod is named %q, and 63 characters is the limit" (int64 $job.replicas) $last) }}
{{- end }}
{{- $command := $job.command }}
{{- if kindIs "string" $command }}{{ $command = regexSplit "\\s+" (trim $command) -1 }}{{ end }}
{{- $asked := $job.resources | default dict }}
{{- $resources := dict "gpu" (int64 ($asked.gpu | default 0)) }}
{{- range list "cpu" "memory" "shm" }}
{{- $amount := get $asked . }}
{{- if $amount }}{{ $_ := set $resources . (include "flk.text" $amount) }}{{ end }}
{{- end }}
{{- with $asked.extended }}
{{- $extended := dict }}
{{- range $resource, $amount := . }}{{ $_ := set $extended $resource (int64 $amount) }}{{ end }}
{{- $_ := set $resources "extended" $extended }}
{{- end }}
{{- $nodes := $job.nodes | default dict }}
{{- $tolerations := list }}
{{- range concat ($nodes.tolerations | default list) ($defaults.tolerations | default list) }}
{{- $toleration := include "flk.toleration" . | fromJson }}
{{- if not (has $toleration $tolerations) }}{{ $tolerations = append $tolerations $toleration }}{{ end }}
{{- end }}
{{- $volumes := list }}
{{- range $job.volumes }}{{ $volumes = append $volumes (include "flk.claim" .) }}{{ end }}
{{- $spec := dict "name" $name "command" $command "replicas" (int64 $job.replicas) "resources" $resources
  "strategy" ($job.strategy | lower | trimPrefix "_") "fabric" ($job.fabric | default $defaults.fabric | default "auto")
  "restarts" (int64 $job.restarts) "disruptions" (int64 $job.disruptions) "env" ($job.env | default dict) "secrets" ($job.secrets | default dict)
  "volumes" $volumes "nodes" (dict "selector" ($nodes.selector | default dict) "tolerations" $tolerations)
  "patch" ($job.patch | default dict) "ship" false }}
{{- with $job.image | default $defaults.image }}{{ $_ := set $spec "image" . }}{{ end }}
{{- with $job.processes }}{{ $_ := set $spec "processes" (int64 .) }}{{ end }}
{{- with $job.deadline }}{{ $_ := set $spec "deadline" (include "flk.seconds" (list "deadline" .) | include "flk.duration") }}{{ end }}
{{- $_ := set $spec "grace" (include "flk.seconds" (list "grace" $job.grace) | include "flk.duration") }}
{{- if not (has $job.hang_timeout (list nil "")) }}
{{- $_ := set $spec "hang_timeout" (include "flk.secondsOrZero" $job.hang_timeout | include "flk.duration" | default "0s") }}
{{- end }}
{{- with $job.pods }}
{{- $pods := dict "labels" (.labels | default dict) "annotations" (.annotations | default dict) "pull_secrets" (.pull_secrets | default list) }}
{{- with .service_account }}{{ $_ := set $pods "service_account" . }}{{ end }}
{{- with .priority_class }}{{ $_ := set $pods "priority_class" . }}{{ end }}
{{- $_ := set $spec "pods" $pods }}
{{- end }}
{{- with $job.save_every }}{{ $_ := set $spec "save_every" (int64 .) }}{{ end }}
{{- with $job.queue | default $defaults.queue }}{{ $_ := set $spec "queue" . }}{{ end }}
{{- with $job.checkpoint }}
{{- $claim := . }}
{{- if kindIs "map" . }}{{ $claim = printf "%s:%s" .volume .path }}{{ end }}
{{- $parts := splitn ":" 2 (include "flk.claim" $claim) }}
{{- $_ := set $spec "checkpoint" (dict "volume" $parts._0 "path" $parts._1) }}
{{- end }}
{{- toJson $spec }}
{{- end }}

{{/* Mappings merged into one, as JSON. The later one wins, also with an empty value (unlike `merge`). */}}
{{- define "flk.merged" -}}
{{- $result := dict }}
{{- range . }}
{{- range $key, $value := . }}{{ $_ := set $result $key $value }}{{ end }}
{{- end }}
{{- toJson $result }}
{{- end }}

{{/* A value of a patch without the keys that are null, as JSON in `value`. */}}
{{- define "flk.withoutNulls" -}}
{{- $result := . }}
{{- if kindIs "map" . }}
{{- $result = dict }}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $result $key (include "flk.withoutNulls" $value | fromJson).value }}{{ end }}
{{- end }}
{{- else if kindIs "slice" . }}
{{- $result = list }}
{{- range . }}{{ $result = append $result (include "flk.withoutNulls" . | fromJson).value }}{{ end }}
{{- end }}
{{- dict "value" $result | toJson }}
{{- end }}

{{/* The key by which the lists `.base` and `.patch` are merged, or nothing where the list is replaced. */}}
{{- define "flk.listKey" -}}
{{- $result := "" }}
{{- if and .base .patch }}
{{- $items := concat .base .patch }}
{{- range $candidate := list "name" "mountPath" }}
{{- $all := true }}
{{- range $items }}
{{- if not (kindIs "map" .) }}{{ $all = false }}{{ else if not (kindIs "string" (get . $candidate)) }}{{ $all = false }}
{{- else if not (hasKey . $candidate) }}{{ $all = false }}{{ end }}
{{- end }}
{{- if $all }}{{ $result = $candidate }}{{ end }}
{{- end }}
{{- end }}
{{- $result }}
{{- end }}

{{/* `.base` merged with `.patch`, as JSON in `value`; `.path` names the patch in errors. The rules are those of patched()
in operator_client/flk/manifest/patch.py, and tests/unit/data/patches.yaml has cases that test both. */}}
{{- define "flk.patched" -}}
{{- range $kind, $name := dict "map" "a mapping" "slice" "a list" }}
{{- if and (kindIs $kind $.base) $.base (not (kindIs $kind $.patch)) }}
{{- fail (printf "%s: must be %s, as in the pod template (is %s)" $.path $name (toJson $.patch)) }}
{{- end }}
{{- end }}
{{- $result := dict }}
{{- if and (kindIs "map" .patch) (kindIs "map" .base) }}
{{- $result = deepCopy .base }}
{{- range $key, $value := .patch }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $result $key }}
{{- else if hasKey $result $key }}
{{- $inner := dict "base" (get $result $key) "patch" $value "path" (printf "%s.%s" $.path $key) }}
{{- $_ := set $result $key (include "flk.patched" $inner | fromJson).value }}
{{- else }}{{ $_ := set $result $key (include "flk.withoutNulls" $value | fromJson).value }}
{{- end }}
{{- end }}
{{- else if and (kindIs "slice" .patch) (kindIs "slice" .base) (include "flk.listKey" .) }}
{{- $id := include "flk.listKey" . }}
{{- $given := dict }}
{{- $order := list }}
{{- range .patch }}
{{- if not (hasKey $given (get . $id)) }}{{ $order = append $order (get . $id) }}{{ end }}
{{- $_ := set $given (get . $id) . }}
{{- end }}
{{- $result = list }}
{{- $kept := dict }}
{{- range .base }}
{{- $own := get . $id }}
{{- $_ := set $kept $own true }}
{{- $inner := dict "base" . "patch" (get $given $own | default dict) "path" (printf "%s[%s]" $.path $own) }}
{{- $result = append $result (include "flk.patched" $inner | fromJson).value }}
{{- end }}
{{- range $order }}
{{- if not (hasKey $kept .) }}{{ $result = append $result (include "flk.withoutNulls" (get $given .) | fromJson).value }}{{ end }}
{{- end }}
{{- else }}{{ $result = (include "flk.withoutNulls" .patch | fromJson).value }}
{{- end }}
{{- dict "value" $result | toJson }}
{{- end }}

{{/* The PyTorchJob, as JSON. */}}
{{- define "flk.pytorchjob" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $gpu := int64 $spec.resources.gpu }}
{{- $accelerators := $gpu }}
{{- $extended := dict }}
{{- range $resource, $amount := $spec.resources.extended }}
{{- $_ := set $extended $resource (include "flk.text" $amount) }}
{{- if hasSuffix "/gpu" $resource }}{{ $accelerators = add $accelerators (int64 $amount) }}{{ end }}
{{- end }}
{{- $processes := $spec.processes | default (max 1 $accelerators) | int64 | toString }}
{{- $pods := $spec.pods | default (dict "labels" dict "annotations" dict) }}
{{- $fabric := get (.Files.Get "files/fabrics.json" | fromJson) $spec.fabric }}
{{- $labels := include "flk.merged" (list $pods.labels (dict "app.kubernetes.io/managed-by" "flk" "flk.dev/job" $spec.name)) | fromJson }}

{{- $volumes := list (dict "name" "work" "emptyDir" dict) }}
{{- $shm := dict "medium" "Memory" }}
{{- with $spec.resources.shm }}{{ $_ := set $shm "sizeLimit" . }}{{ end }}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" $shm) }}
{{- $mounts := list (dict "name" "work" "mountPath" "/flk/work") (dict "name" "shm" "mountPath" "/dev/shm") }}
{{- $claims := $spec.volumes }}
{{- $checkpoint := "/flk/checkpoint" }}
{{- with $spec.checkpoint }}
{{- $claims = append $claims (printf "%s:%s" .volume .path) }}
{{- $checkpoint = printf "%s/%s" .path $spec.name }}
{{- else }}
{{- $volumes = append $volumes (dict "name" "checkpoint" "emptyDir" dict) }}
{{- $mounts = append $mounts (dict "name" "checkpoint" "mountPath" $checkpoint) }}
{{- end }}
{{- $known := dict }}
{{- range $claims }}
{{- $parts := splitn ":" 2 . }}
{{- if not (hasKey $known $parts._0) }}
{{- $_ := set $known $parts._0 (printf "claim-%d" (len $known)) }}
{{- $volumes = append $volumes (dict "name" (get $known $parts._0) "persistentVolumeClaim" (dict "claimName" $parts._0)) }}
{{- end }}
{{- $mounts = append $mounts (dict "name" (get $known $parts._0) "mountPath" $parts._1) }}
{{- end }}

{{- $port := 29400 }}
{{- if eq (dig "spec" "hostNetwork" false ($spec.patch | default dict) | toString) "true" }}
{{- /* The pods of two jobs may share the address of a node. */}}
{{- $port = add 24000 (mod (adler32sum (printf "%s/%s" .Release.Namespace $spec.name) | int64) 5000) }}
{{- end }}
{{- $plain := dict "FLK_RDZV_ENDPOINT" (printf "%s-worker-0:%d" $spec.name (int64 $port)) "FLK_WORK" "/flk/work" "HOME" "/flk/work"
  "FLK_TERMINATION_LOG" "/dev/termination-log" "FLK_JOB" $spec.name "FLK_PODS" (include "flk.text" $spec.replicas)
  "FLK_PROCESSES" $processes "FLK_RESTARTS" (include "flk.text" $spec.restarts)
  "FLK_DISRUPTIONS" (include "flk.text" $spec.disruptions)
  "FLK_GRACE" (include "flk.seconds" (list "grace" $spec.grace)) "FLK_STRATEGY" $spec.strategy
  "FLK_FABRIC" $spec.fabric "FLK_CHECKPOINT" $checkpoint }}
{{- with $spec.deadline }}{{ $_ := set $plain "FLK_DEADLINE" (include "flk.seconds" (list "deadline" .)) }}{{ end }}
{{- with $spec.hang_timeout }}{{ $_ := set $plain "FLK_HANG_TIMEOUT" (include "flk.secondsOrZero" .) }}{{ end }}
{{- with $spec.save_every }}{{ $_ := set $plain "FLK_SAVE_EVERY" (include "flk.text" .) }}{{ end }}
{{- if $gpu }}{{ $_ := set $plain "FLK_GPUS" (toString $gpu) }}{{ end }}
{{- $plain = include "flk.merged" (list $plain $fabric.env $spec.env) | fromJson }}
{{- range $variable, $_ := $spec.secrets }}{{ $plain = omit $plain $variable }}{{ end }}
{{- $env := list }}
{{- range $variable, $path := dict "FLK_POD_INDEX" "metadata.labels['training.kubeflow.org/replica-index']"
  "FLK_POD_NAME" "metadata.name" "FLK_POD_IP" "status.podIP" "FLK_NODE_NAME" "spec.nodeName" }}
{{- $env = append $env (dict "name" $variable "valueFrom" (dict "fieldRef" (dict "fieldPath" $path))) }}
{{- end }}
{{- $env = append $env (dict "name" "FLK_CPUS" "valueFrom" (dict "resourceFieldRef" (dict "resource" "requests.cpu" "divisor" "1"))) }}
{{- range $variable, $key := dict "FLK_JOB_UID" "uid" "FLK_RDZV_SECRET" "secret" }}
{{- $reference := dict "name" (printf "%s-rendezvous" $spec.name) "key" $key "optional" true }}
{{- $env = append $env (dict "name" $variable "valueFrom" (dict "secretKeyRef" $reference)) }}
{{- end }}
{{- range $variable, $value := $plain }}
{{- $env = append $env (dict "name" $variable "value" (replace "$" "$$" $value)) }}
{{- end }}
{{- range $variable, $reference := $spec.secrets }}
{{- $parts := splitn ":" 2 $reference }}
{{- $env = append $env (dict "name" $variable "valueFrom" (dict "secretKeyRef" (dict "name" $parts._0 "key" $parts._1))) }}
{{- end }}

{{- /* As in operator_client/flk/manifest/pod.py: an image without Python ends the job with the reason. */}}
{{- $start := `command -v "$1" >/dev/null && exec "$@"; echo "[pod $FLK_POD_INDEX] error: the image has no $1" >&2; printf '{"outcome":"failed","code":2,"verdict":"not retried: the next attempt would fail in the same way","failure":{"kind":"usage","pod":%s,"pod_name":"%s","node":"%s","message":"the image has no %s"}}' "$FLK_POD_INDEX" "$FLK_POD_NAME" "$FLK_NODE_NAME" "$1" >"$FLK_TERMINATION_LOG"; exit 2` }}
{{- $command := list "/bin/sh" "-c" (replace "$" "$$" $start) "flk" "python3" "-u" "-m" "flk_runtime" "--" }}
{{- range $spec.command }}{{ $command = append $command (replace "$" "$$" .) }}{{ end }}
{{- $container := dict "name" "pytorch" "image" ($spec.image | default (printf "flktrain/flk:%s-%s" .Chart.AppVersion (ternary "cuda" "cpu" (gt $gpu 0))))
  "imagePullPolicy" "IfNotPresent" "command" $command "env" $env
  "ports" (list (dict "name" "pytorchjob-port" "containerPort" $port)) "volumeMounts" $mounts
  "securityContext" (dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")))
  "terminationMessagePath" "/dev/termination-log" "terminationMessagePolicy" "FallbackToLogsOnError" }}
{{- $limits := pick $spec.resources "memory" }}
{{- if $gpu }}{{ $_ := set $limits "nvidia.com/gpu" (toString $gpu) }}{{ end }}
{{- $limits = include "flk.merged" (list $limits $extended ($fabric.limits | default dict)) | fromJson }}
{{- range $name, $amount := $fabric.limits_per_gpu }}
{{- $number := regexFind "^[0-9]+" $amount }}
{{- if $gpu }}{{ $_ := set $limits $name (printf "%d%s" (mul $gpu (int64 $number)) (trimPrefix $number $amount)) }}{{ end }}
{{- end }}
{{- range $name := keys $limits }}
{{- if and (hasPrefix "hugepages-" $name) (not (or $spec.resources.memory $spec.resources.cpu)) }}
{{- fail (printf "job.resources.memory: is missing: fabric %s requests %s, which Kubernetes accepts only with memory or cpu" $spec.fabric $name) }}
{{- end }}
{{- end }}
{{- $requests := include "flk.merged" (list (pick $spec.resources "cpu") $limits) | fromJson }}
{{- $resources := dict }}
{{- with $limits }}{{ $_ := set $resources "limits" . }}{{ end }}
{{- with $requests }}{{ $_ := set $resources "requests" . }}{{ end }}
{{- with $resources }}{{ $_ := set $container "resources" . }}{{ end }}

{{- $pod := dict "automountServiceAccountToken" false "enableServiceLinks" false "terminationGracePeriodSeconds" (include "flk.seconds" (list "grace" $spec.grace) | int64 | add 5)
  "securityContext" (dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001
    "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault"))
  "containers" (list $container) "volumes" $volumes }}
{{- with $pods.service_account }}{{ $_ := set $pod "serviceAccountName" . }}{{ end }}
{{- with $pods.priority_class }}{{ $_ := set $pod "priorityClassName" . }}{{ end }}
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
{{- $template := dict "metadata" (dict "labels" $labels "annotations" (include "flk.merged" (list (dict "sidecar.istio.io/inject" "false") $pods.annotations) | fromJson)) "spec" $pod }}
{{- with $spec.patch }}
{{- $template = (include "flk.patched" (dict "base" ($template | toJson | fromJson) "patch" . "path" "job.patch") | fromJson).value }}
{{- $found := false }}
{{- range dig "spec" "containers" list $template }}{{ if eq (toString (get . "name")) "pytorch" }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}{{ fail "job.patch: leaves no container named pytorch, which the operator looks for" }}{{ end }}
{{- end }}

{{- $policy := dict "cleanPodPolicy" "None"
  "backoffLimit" (min 2147483647 (mul (add 1 (int64 $spec.restarts) (int64 $spec.disruptions)) (int64 $spec.replicas))) }}
{{- with $spec.deadline }}{{ $_ := set $policy "activeDeadlineSeconds" (include "flk.seconds" (list "deadline" .) | int64) }}{{ end }}
{{- $own := deepCopy $labels }}
{{- with $spec.queue }}
{{- $_ := set $policy "suspend" true }}
{{- $_ := set $own "kueue.x-k8s.io/queue-name" . }}
{{- end }}
{{- $worker := dict "replicas" $spec.replicas "restartPolicy" "ExitCode" "template" $template }}
{{- dict "apiVersion" "kubeflow.org/v1" "kind" "PyTorchJob"
  "metadata" (dict "name" $spec.name "labels" $own
    "annotations" (include "flk.merged" (list $pods.annotations (dict "flk.dev/version" .Chart.AppVersion "flk.dev/spec" (toJson $spec))) | fromJson))
  "spec" (dict "nprocPerNode" $processes "runPolicy" $policy "pytorchReplicaSpecs" (dict "Worker" $worker)) | toJson }}
{{- end }}
