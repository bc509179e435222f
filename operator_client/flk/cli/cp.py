"""`flk cp`: copy files between this machine and the pod of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flk.cli.exec import Container, PodName, Rank
from flk.cli.options import Context, Namespace, job_ref, note, open_job
from flk.errors import UsageError
from flk_runtime.contract.quantities import plural, size_text


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="JOB:PATH, or a path here.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path here, or JOB:PATH.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
    rank: Rank = None,
    pod: PodName = None,
    container: Container = "",
) -> int | None:
    """Copy a file or a folder from the pod of a rank to this machine, or the other way.

    JOB:PATH is in the pod of rank 0, JOB:rank/3:PATH in the pod of rank 3, and JOB:pod/1:PATH in pod 1. A path without
    a slash at its beginning is below the container's working folder. As with `cp -r`, a target that is a folder gets
    the source inside. What comes from a pod is there whole or not at all. A local path with a colon is written ./a:b.
    """
    ends = [_remote(source), _remote(target)]
    remote = ends[0] or ends[1]
    if remote is None or (ends[0] and ends[1]):
        what = "both are" if remote else "neither is"
        raise UsageError(f"one of SOURCE and TARGET must be JOB:PATH, and {what}")
    if (remote.rank is not None or remote.pod) and (rank is not None or pod):
        raise UsageError(f"{remote.text}: names the pod, so --rank and --pod cannot")
    from flk.jobs import copying
    from flk.observe.reader import container_in, pod_of

    client, job = open_job(remote.job, context, namespace)
    name = pod_of(client, job, rank if remote.rank is None else remote.rank, remote.pod or pod).name
    place = copying.Container(client, name, container_in(client, job, name, container))
    try:
        if ends[0]:
            copied = place.read(remote.path, target, note)
            where = f"{name}:{remote.path} to {copied.path}"
        else:
            copied = place.write(Path(source), remote.path, note)
            where = f"{source} to {name}:{copied.path}"
    except KeyboardInterrupt as interrupt:
        interrupt.args = ("nothing was kept" if ends[0] else f"a part may be in {name}:{remote.path}",)
        raise
    note(f"copied {plural(copied.files, 'file')}, {size_text(copied.size)}: {where}")
    return None


@dataclass(frozen=True)
class _Remote:
    text: str
    job: str
    path: str
    rank: int | None = None
    pod: str | None = None


def _remote(text: str) -> _Remote | None:
    """Return what ``JOB:PATH`` means, None for a path of this machine. Raises UsageError for half of either."""
    job, colon, path = text.partition(":")
    if not colon or text.startswith(("/", ".", "~")):
        return None
    job_ref(job)
    kind, slash, rest = path.partition("/")
    if slash and kind in ("rank", "pod") and ":" in rest:
        which, _, path = rest.partition(":")
        if kind == "rank" and not (which.isascii() and which.isdigit() and len(which) < 7):
            raise UsageError(f"{text}: must be JOB:rank/NUMBER:PATH (is {which!r})")
        found = _Remote(text, job, path, rank=int(which)) if kind == "rank" else _Remote(text, job, path, pod=which)
    else:
        found = _Remote(text, job, path)
    if not found.path:
        raise UsageError(f"{text}: names no path in the pod", hint=f"as in {job}:/tmp/trace.json")
    return found
