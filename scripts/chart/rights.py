"""The rights of `flk.health.controllers` as rules of Roles: k8s/rbac.yaml, and the chart's, which its values choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import yaml

from flk.health.controllers import OPTIONAL, Right, Rights, resource_attributes, rights_for
from flk.targets import DEFAULT, TARGETS
from flk.targets.gang import GANGS
from scripts.chart.text import WIDTH, compact_json

Rules = list[dict[str, list[str]]]

_VERBS: Final = ("create", "get", "list", "watch", "patch", "delete")
# What a comment of k8s/rbac.yaml says of a rule, by its first resource.
_WHY: Final = {
    **{target.plural: f"--target {name}" for name, target in TARGETS.items()},
    "services": "--target job: the names of the pods",
    "configmaps": "the code that jobs ship, of which each job becomes an owner (patch), and the namespace's defaults",
    "secrets": "the key with which launchers of a job authenticate each other, which Kubernetes deletes with the job",
}
_ROLE: Final = """\
# What people need in a namespace to submit, watch and delete jobs with flk, and nothing more: no reading of secrets, no
# exec, no other objects. Apply it to that namespace (kubectl apply -n NAMESPACE -f k8s/rbac.yaml) with the subject
# changed, and without the rules of targets that nobody uses. The chart charts/flk creates the same from values:
# rbac.targets chooses the targets, and rbac.gangs adds the PodGroups of --gang. `python -m scripts.chart` writes this
# file.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: flk
rules:
{rules}---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: flk
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: flk
subjects:
- apiGroup: rbac.authorization.k8s.io
  kind: Group
  name: researchers
"""


def rights() -> str:
    """The text of files/rights.json: the rules of each target and gang, of the optional commands, and of every Role."""
    of_targets, always = _of_targets()
    data = {
        "targets": of_targets,
        "gangs": {
            name: _rules(_all(rights_for(DEFAULT, gang)) - _all(rights_for(DEFAULT))) for name, gang in GANGS.items()
        },
        "exec": _rules(_all(OPTIONAL)),
        "always": always,
    }
    return compact_json(data) + "\n"


def role() -> str:
    """The text of k8s/rbac.yaml, which has the rules of all targets, and none of a gang."""
    of_targets, always = _of_targets()
    lines = []
    for rule in [*itertools.chain.from_iterable(of_targets.values()), *always]:
        why = _WHY.get(rule["resources"][0])
        lines += [f"# {why}\n"] if why else []
        lines.append(yaml.safe_dump([rule], default_flow_style=None, sort_keys=False, width=WIDTH))
    return _ROLE.format(rules="".join(lines))


def _of_targets() -> tuple[dict[str, Rules], Rules]:
    """The rules that only some targets need, by their names, and those that all need."""
    needed = {name: _all(rights_for(target)) for name, target in TARGETS.items()}
    always = set.intersection(*needed.values())
    return {name: _rules(rights - always) for name, rights in needed.items()}, _rules(always)


def _all(rights: Rights) -> set[Right]:
    return set(itertools.chain.from_iterable(rights.values()))


def _rules(rights: Iterable[Right]) -> Rules:
    """The rules that give rights, with one rule for all resources of a group that need the same verbs."""
    verbs: dict[str, list[str]] = {}
    for verb, resource in sorted(rights, key=lambda right: (right[1], _VERBS.index(right[0]))):
        verbs.setdefault(resource, []).append(verb)
    rules: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for resource, those in verbs.items():
        group, plural, subresource = resource_attributes(resource)
        rules.setdefault((group, tuple(those)), []).append("/".join(filter(None, (plural, subresource))))
    return [
        {"apiGroups": [group], "resources": resources, "verbs": list(those)}
        for (group, those), resources in sorted(rules.items(), key=lambda item: item[0][0])
    ]
