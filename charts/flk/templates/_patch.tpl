{{/* The key by which the lists `.base` and `.patch` are merged, or nothing where the list is replaced. */}}
{{- define "flk.listKey" -}}
{{- $result := "" }}
{{- if and .base .patch (kindIs "slice" .base) }}
{{- $items := concat .base .patch }}
{{- range $key := list "name" "mountPath" }}
{{- $named := list }}
{{- range $items }}
{{- if kindIs "map" . }}{{ if kindIs "string" (dig $key 0 .) }}{{ $named = append $named . }}{{ end }}{{ end }}
{{- end }}
{{- if eq (len $named) (len $items) }}{{ $result = $key }}{{ end }}
{{- end }}
{{- end }}
{{- $result }}
{{- end }}

{{/* `.base` merged with `.patch`, as JSON in `value`; `.path` names the patch in errors. The rules are those of
patched() in operator_client/flk/manifest/patch.py; tests/unit/flk/manifest/patches.yaml has cases that test both. */}}
{{- define "flk.patched" -}}
{{- range $kind, $name := dict "map" "a mapping" "slice" "a list" }}
{{- if and (kindIs $kind $.base) $.base (not (kindIs $kind $.patch)) }}
{{- fail (printf "%s: must be %s, as in the pod template (is %s)" $.path $name (toJson $.patch)) }}
{{- end }}
{{- end }}
{{- $result := .patch }}
{{- if kindIs "map" .patch }}
{{- $result = kindIs "map" .base | ternary .base dict | deepCopy }}
{{- range $key, $value := .patch }}
{{- $other := get (dict "value" "valueFrom" "valueFrom" "value") $key }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $result $key }}
{{- else }}
{{- if and $other (not (hasKey $.patch $other)) }}{{ $_ := unset $result $other }}{{ end }}
{{- $inner := dict "base" (get $result $key) "patch" $value "path" (printf "%s.%s" $.path $key) }}
{{- $_ := set $result $key (include "flk.patched" $inner | fromJson).value }}
{{- end }}
{{- end }}
{{- else if kindIs "slice" .patch }}
{{- $result = list }}
{{- $id := include "flk.listKey" . }}
{{- $own := dict }}
{{- $given := dict }}
{{- $order := list }}
{{- if $id }}
{{- range .base }}{{ $_ := set $own (get . $id) . }}{{ $order = append $order (get . $id) }}{{ end }}
{{- range .patch }}{{ $_ := set $given (get . $id) . }}{{ $order = append $order (get . $id) }}{{ end }}
{{- range uniq $order }}
{{- $inner := dict "base" (get $own .) "patch" (get $given . | default dict) "path" (printf "%s[%s]" $.path .) }}
{{- $result = append $result (include "flk.patched" $inner | fromJson).value }}
{{- end }}
{{- else }}
{{- range .patch }}
{{- $result = append $result (include "flk.patched" (dict "base" nil "patch" . "path" $.path) | fromJson).value }}
{{- end }}
{{- end }}
{{- end }}
{{- dict "value" $result | toJson }}
{{- end }}
