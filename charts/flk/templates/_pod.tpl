{{/* The pod template, with the patch, as JSON: all pods of a job are equal. */}}
{{- define "flk.podTemplate" -}}
{{- $spec := include "flk.spec" . | fromJson }}
{{- $gpu := int64 $spec.resources.gpu }}
{{- $processes := include "flk.processes" $spec }}
{{- $extended := dict }}
{{- range $resource, $amount := $spec.resources.extended }}{{ $_ := set $extended $resource (include "flk.text" $amount) }}{{ end }}
{{- $code := include "flk.code" . | fromJson }}
{{- $target := include "flk.target" . | fromJson }}
{{- $count := include "flk.pods" . | fromJson }}
{{- $gang := include "flk.gang" . | fromJson }}
{{- $pods := $spec.pods | default (dict "labels" dict "annotations" dict) }}
{{- $fabric := get (.Files.Get "files/fabrics.json" | fromJson) $spec.fabric }}
{{- $labels := include "flk.jobLabels" . | fromJson }}

{{- $volumes := list (dict "name" "work" "emptyDir" dict) }}
{{- $shm := dict "medium" "Memory" }}
{{- with $spec.resources.shm }}{{ $_ := set $shm "sizeLimit" . }}{{ end }}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" $shm) }}
{{- $mounts := list (dict "name" "work" "mountPath" "/flk/work") (dict "name" "shm" "mountPath" "/dev/shm") }}
{{- $volumes = append $volumes (include "flk.shipVolume" . | fromJson) }}
{{- $mounts = append $mounts (dict "name" "ship" "mountPath" "/flk/ship" "readOnly" true) }}
{{- if $spec.records }}
{{- $volumes = append $volumes (dict "name" "api" "projected" (dict "sources" (list
  (dict "serviceAccountToken" (dict "path" "token" "expirationSeconds" 3600))
  (dict "configMap" (dict "name" "kube-root-ca.crt" "items" (list (dict "key" "ca.crt" "path" "ca.crt")) "optional" true))
  (dict "downwardAPI" (dict "items" (list (dict "path" "namespace" "fieldRef" (dict "fieldPath" "metadata.namespace")))))))) }}
{{- $mounts = append $mounts (dict "name" "api" "mountPath" "/flk/api" "readOnly" true) }}
{{- end }}
{{- $claims := $spec.volumes }}
{{- $checkpoint := "/flk/checkpoint" }}
{{- with $spec.checkpoint }}
{{- if .volume }}{{ $claims = append $claims (printf "%s:%s" .volume .path) }}{{ end }}
{{- $checkpoint = printf "%s/%s" (.address | default .path) $spec.name }}
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
{{- $plain := dict "FLK_RDZV_ENDPOINT" (printf "%s:%d" $target.host (int64 $port)) "FLK_WORK" "/flk/work" "FLK_MEMORY_ROOT" "/dev/shm" "HOME" "/flk/work"
  "FLK_TERMINATION_LOG" "/dev/termination-log" "FLK_JOB" $spec.name "FLK_PODS" (include "flk.text" $count.most)
  "FLK_PROCESSES" $processes "FLK_RESTARTS" (include "flk.text" $spec.restarts)
  "FLK_DISRUPTIONS" (include "flk.text" $spec.disruptions)
  "FLK_GRACE" (include "flk.seconds" (list "grace" $spec.grace)) "FLK_STRATEGY" $spec.strategy
  "FLK_FABRIC" $spec.fabric "FLK_CHECKPOINT" $checkpoint }}
{{- with $count.elastic }}
{{- $_ := set $plain "FLK_MIN_PODS" (include "flk.text" .min) }}
{{- $_ := set $plain "FLK_BATCH" .batch }}
{{- end }}
{{- if $count.spares }}{{ $_ := set $plain "FLK_SPARES" (include "flk.text" $count.spares) }}{{ end }}
{{- with $spec.deadline }}{{ $_ := set $plain "FLK_DEADLINE" (include "flk.seconds" (list "deadline" .)) }}{{ end }}
{{- with $spec.hang_timeout }}{{ $_ := set $plain "FLK_HANG_TIMEOUT" (include "flk.secondsOrZero" .) }}{{ end }}
{{- with $spec.save_every }}{{ $_ := set $plain "FLK_SAVE_EVERY" (include "flk.text" .) }}{{ end }}
{{- with $spec.keep }}{{ $_ := set $plain "FLK_KEEP" (include "flk.text" .) }}{{ end }}
{{- with $spec.keep_every }}{{ $_ := set $plain "FLK_KEEP_EVERY" (include "flk.text" .) }}{{ end }}
{{- with $spec.records }}{{ $_ := set $plain "FLK_RECORDS" . }}{{ end }}
{{- if $gpu }}{{ $_ := set $plain "FLK_GPUS" (toString $gpu) }}{{ end }}
{{- with $code.hash }}{{ $plain = include "flk.merged" (list $plain (dict "FLK_CODE" "/flk/ship/code" "FLK_CODE_HASH" .)) | fromJson }}{{ end }}
{{- $plain = include "flk.merged" (list $plain $fabric.env $spec.env) | fromJson }}
{{- range $variable, $_ := $spec.secrets }}{{ $plain = omit $plain $variable }}{{ end }}
{{- $env := list }}
{{- range $variable, $path := dict "FLK_POD_INDEX" $target.index
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
{{- $command := list "/bin/sh" "-c" (replace "$" "$$" $start) "flk" "python3" "-u" "/flk/ship/flk_runtime.zip" "--" }}
{{- range $spec.command }}{{ $command = append $command (replace "$" "$$" .) }}{{ end }}
{{- $container := dict "name" $target.container "image" ($spec.image | default (printf "flktrain/flk:%s-%s" .Chart.AppVersion (ternary "cuda" "cpu" (gt $gpu 0))))
  "imagePullPolicy" "IfNotPresent" "command" $command "env" $env
  "ports" (list (dict "name" $target.port "containerPort" $port)) "volumeMounts" $mounts
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
{{- with $spec.topology }}
{{- $parts := splitn ":" 2 . }}
{{- $term := dict "topologyKey" $parts._0 "labelSelector" (dict "matchLabels" (dict "flk.dev/job" $spec.name)) }}
{{- $affinity := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) }}
{{- if eq $parts._1 "preferred" }}
{{- $affinity = dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) }}
{{- end }}
{{- $_ := set $pod "affinity" (dict "podAffinity" $affinity) }}
{{- end }}
{{- $pod = include "flk.merged" (list $pod $gang.pod) | fromJson }}
{{- $labels = include "flk.merged" (list $labels $gang.labels) | fromJson }}
{{- $template := dict "metadata" (dict "labels" $labels "annotations" (include "flk.merged" (list (dict "sidecar.istio.io/inject" "false") $pods.annotations $gang.annotations) | fromJson)) "spec" $pod }}
{{- with $spec.patch }}
{{- $template = (include "flk.patched" (dict "base" ($template | toJson | fromJson) "patch" . "path" "job.patch") | fromJson).value }}
{{- $found := false }}
{{- range dig "spec" "containers" list $template }}{{ if eq (toString (get . "name")) $target.container }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}{{ fail (printf "job.patch: leaves no container named %s, which the operator looks for" $target.container) }}{{ end }}
{{- end }}
{{- toJson $template }}
{{- end }}
