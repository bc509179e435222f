"""Write manifests as text: YAML that every parser reads in the same way, or JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

from flk.spec.fabric import fabrics
from flk.spec.job import Job
from flk_runtime.contract import VERSION

# Text that every version of YAML reads as text. Parsers differ in 1e3, 0o7, 1_000, y and others, so these are quoted.
_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf", "infinity"}
)

_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the dumper of libyaml is many times faster


class _Dumper(_Base):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, value: str) -> Any:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=None if plain else '"')


def _list(dumper: Any, value: list[Any]) -> Any:
    numbers = bool(value) and all(isinstance(item, int) for item in value)  # exit codes, which fill pages otherwise
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=numbers)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)  # names of variables, which are a type of their own
_Dumper.add_representer(list, _list)


def to_yaml(manifests: list[dict[str, Any]], job: Job | None = None) -> str:
    """Return the manifests as YAML documents. With ``job``, a comment names the source of its fabric's values."""
    head = [f"# Rendered by flk {VERSION}. Create it: kubectl create -f FILE (or apply --server-side: code is large)."]
    if job is not None:
        fabric = fabrics()[job.fabric]
        head.append(f"# fabric {fabric.name}: {fabric.description}. Values from: {fabric.source}.")
        if fabric.needs:
            head.append(f"# It also needs {fabric.needs}.")
    text = yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**31 - 1
    )
    return "\n".join(head) + "\n" + text


def to_json(manifests: list[dict[str, Any]]) -> str:
    """Return the manifests as a JSON List of Kubernetes."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2, ensure_ascii=False) + "\n"
