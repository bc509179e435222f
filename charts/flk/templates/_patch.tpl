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
in operator_client/flk/manifest/pod.py, and tests/unit/flk/manifest/patches.yaml has cases that test both. */}}
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
{{- $other := get (dict "value" "valueFrom" "valueFrom" "value") $key }}
{{- if and $other (not (kindIs "invalid" $value)) (not (hasKey $.patch $other)) }}{{ $_ := unset $result $other }}{{ end }}
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
