"""References of the environment: Secrets and ConfigMaps whose keys become variables, and the Secrets of registries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk import labels
from flk.health.cause import Cause, Find, Match, tell, waiting
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.observe.view import JobView
from flk.targets.rendezvous import secret_name_of

CONFIG_ERRORS: Final = ("CreateContainerConfigError", "CreateContainerError")
_MOUNTED: Final = "which the pods mount"
_PULLS: Final = "with which the image is pulled"
_KEY: Final = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+/)?(\S+)")


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that Secrets and ConfigMaps exist: of variables, with their keys, of volumes, and for pulling images."""
    wanted = [(kind, name, key, f"for key {key}") for kind, name, key in pods.keys]
    wanted += [(kind, name, "", _MOUNTED) for kind, name in pods.mounted]
    wanted += [("secrets", name, "", _PULLS) for name in pods.pull_secrets]
    fine: list[str] = []
    for kind, name, key, purpose in wanted:
        what, found = kind.removesuffix("s"), cluster.named.get((kind, name))
        if isinstance(found, Unreadable):
            if found.missing:
                remedy = cluster.commands.kubectl(f"create {_create_command(kind, name, key, purpose)}")
                code = "SecretMissing" if what == "secret" else "ConfigMapMissing"
                code = "VolumeSourceMissing" if purpose == _MOUNTED else code
                yield Result(what, Level.FAILED, f"there is no {what} {name} {purpose}", remedy, code)
            else:
                remedy = "the pods may use it all the same"
                yield Result(what, Level.UNKNOWN, f"{what} {name} cannot be read: {found.reason}", remedy)
        elif found is not None:
            keys = {*(found.get("data") or {}), *(found.get("binaryData") or {})}
            if key and key not in keys:
                known = ", ".join(sorted(keys)) or "none"
                remedy = cluster.commands.kubectl(f"edit {what} {name}") + " to add it"
                found_text = f"{what} {name} has no key {key}; its keys: {known}"
                yield Result(what, Level.FAILED, found_text, remedy, "KeyMissing")
            else:
                fine.append(f"{name}:{key}" if key else name)
    if fine:
        yield Result("secret", Level.OK, f"exist: {', '.join(sorted(fine))}")


def _create_command(kind: str, name: str, key: str, purpose: str) -> str:
    if purpose == _MOUNTED:
        return f"{'configmap' if kind == 'configmaps' else 'secret generic'} {name} --from-file=FILE"
    if kind == "configmaps":
        return f"configmap {name} --from-literal={key}=VALUE"
    if key:
        return f"secret generic {name} --from-file={key}=FILE"
    return f"secret docker-registry {name} --docker-server=REGISTRY --docker-username=USER --docker-password=TOKEN"


def _object_missing(kind: str, create: str) -> Find:
    def remedy(view: JobView, trace: Match) -> str:
        if kind == "Secret" and trace[1] == secret_name_of(view.job):
            if labels.INCOMPLETE in labels.annotations_of(view.job):
                return (
                    "flk makes it before the submission ends, and that has not ended or was interrupted: if nobody is "
                    f"submitting the job now, delete it and submit it again: {view.flk('delete')}"
                )
            return f"flk makes it only when it creates the job: {view.flk('delete')}, then submit the job again"
        return f"{view.kubectl(f'create {create} {trace[1]} --from-literal=KEY=VALUE')} creates it; the pods start then"

    return tell(
        waiting(CONFIG_ERRORS, re.compile(rf'{kind.lower()} "([^"]+)" not found')),
        lambda view, trace: f"{trace} cannot start: the {kind} {trace[1]} does not exist in namespace {view.namespace}",
        remedy,
    )


READ: Final = "flk reads why the container waits (CreateContainerConfigError)."
CAUSES: Final = (
    Cause(
        "KeyMissing",
        tell(
            waiting(CONFIG_ERRORS, _KEY),
            lambda view, trace: f"{trace} cannot start: the {trace[2]} {trace[3]} has no key {trace[1]}",
            lambda view, trace: (
                f"{view.kubectl(f'describe {trace[2].lower()} {trace[3]}')} shows its keys; "
                "the pods start once it has the key"
            ),
        ),
        grace=30,
    ),
    Cause(
        "SecretMissing",
        _object_missing("Secret", "secret generic"),
        grace=30,
    ),
    Cause(
        "ConfigMapMissing",
        _object_missing("ConfigMap", "configmap"),
        grace=30,
    ),
)
