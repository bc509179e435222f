"""Merge a patch into a pod template, as Kubernetes merges strategic merge patches."""

from __future__ import annotations

from typing import Any, Final

from flk.errors import UsageError

_INSTEAD: Final = {"value": "valueFrom", "valueFrom": "value"}  # a variable has one of both


def patched(base: Any, patch: Any, path: str = "patch") -> Any:
    """Return ``base`` merged with ``patch``. ``path`` names the patch in errors.

    Mappings are merged, and null removes a key. ``value`` takes the place of ``valueFrom``, and the other way round.
    Lists of mappings that all have a ``mountPath``, or all have a ``name``, are merged by it; other lists are replaced.
    Raises UsageError if a mapping or a list that is not empty would be replaced by something else.
    """
    for shape, name in ((dict, "a mapping"), (list, "a list")):
        if isinstance(base, shape) and base and not isinstance(patch, shape):
            raise UsageError(f"{path}: must be {name}, as in the pod template (is {patch!r})")
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                if (other := _INSTEAD.get(key)) and other not in patch:
                    merged.pop(other, None)
                merged[key] = patched(merged.get(key), value, f"{path}.{key}")
        return merged
    if isinstance(base, list) and isinstance(patch, list):
        for identity in ("mountPath", "name"):
            if (
                base
                and patch
                and all(isinstance(item, dict) and isinstance(item.get(identity), str) for item in (*base, *patch))
            ):
                given = {item[identity]: item for item in patch}
                kept = {i[identity]: patched(i, given.get(i[identity], {}), f"{path}[{i[identity]}]") for i in base}
                return [*kept.values(), *(_without_nulls(item) for name, item in given.items() if name not in kept)]
    return _without_nulls(patch)


def _without_nulls(value: Any) -> Any:
    """Return a value of a patch without the keys that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
