"""The telemetry of a job: from its launcher, from the archived record, or from the log of pod 0.

At its end a launcher writes there what it has measured; the metrics lines tell less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from flk.errors import ApiError, FlkError, JobNotFoundError
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.pods import has_log, launcher_command, phase_of, training_container
from flk.observe.progress import read_telemetry_of
from flk.observe.reader import find_record
from flk_runtime.contract import foreign, log_format
from flk_runtime.contract.telemetry import Telemetry, unpack_telemetry

_LINES: Final = 20_000  # last lines of the log that are read


def read_telemetry(client: JobClient, job: str) -> Telemetry:
    """Return what is known of a job's measurements now; without any, a Telemetry whose lists are empty.

    Raises JobNotFoundError if there is neither such a job nor an archived record of one, and ApiError if nothing but
    the log of pod 0 could tell and it cannot be read.
    """
    missing: JobNotFoundError | None = None
    pods: list[Object] = []
    try:
        found = client.get_job(job)
        uid = found["metadata"].get("uid")
        pods = client.pods_of(found)
    except JobNotFoundError as error:
        missing, uid = error, client.ref(job).uid or None
    first = min(pods, key=lambda pod: str(pod["metadata"]["name"]), default=None)
    running = [pod for pod in pods if phase_of(pod) == "Running" and launcher_command(pod)]
    for pod in sorted(running, key=lambda pod: str(pod["metadata"]["name"]))[:1]:
        try:
            return _with_image(_measured(client, pod), pod)
        except FlkError:  # without the rights to pods/exec, or the launcher has just ended
            pass
    seen = find_record(client, job, uid)
    if seen and seen.entry and (kept := unpack_telemetry(seen.entry.telemetry)):
        return _with_image(kept, first)
    if missing and not (seen and seen.entry):
        raise missing
    lines: list[str] = []
    if first is not None and has_log(first):
        lines = client.last_lines(first, _LINES, timestamps=True)
    packed = next(filter(None, (log_format.parse_telemetry(line.partition(" ")[2]) for line in reversed(lines))), "")
    return _with_image(unpack_telemetry(packed) or read_telemetry_of(lines, client.now()), first)


def _measured(client: JobClient, pod: Object) -> Telemetry:
    """Return what one pod's launcher answers, which asks pod 0's. Raises FlkError if it does not answer."""
    who = f"the launcher in {pod['metadata']['name']}"
    answer = client.execute(pod, [*launcher_command(pod), "metrics"], _TIMEOUT).answer(who)
    try:
        return foreign.read(Telemetry, answer)
    except foreign.ForeignError as error:
        raise ApiError(f"{who} does not answer: {error}") from None


def _with_image(found: Telemetry, pod: Object | None) -> Telemetry:
    """Add the image of a pod to the settings, which no launcher knows."""
    image = training_container(pod).get("image") if pod else None
    return replace(found, settings={**found.settings, "image": str(image)}) if image else found


_TIMEOUT: Final = 45.0  # seconds; the leader waits 12 for the stacks of all pods


def read_stacks(client: JobClient, job: str, rank: int | None = None) -> dict[str, Any]:
    """Return the stacks of all ranks of a running job, or of one, as `flk stacks -o json` prints them.

    ``groups`` has equal stacks once, the odd ones first: their ``ranks``, a ``heading`` and ``lines``. ``cause`` says
    which rank the others wait for. Raises ApiError if no pod runs, if none has flk's launcher, which shows them, or if
    the rank has no stack.
    """
    found = client.get_job(job)
    running = [pod for pod in client.pods_of(found) if phase_of(pod) == "Running"]
    if not running:
        raise ApiError(f"no pod of {job} runs", hint=f"{client.commands.flk('why', job)} says why")
    launchers = [pod for pod in running if launcher_command(pod)]
    if not launchers:
        raise ApiError(
            f"{running[0]['metadata']['name']} does not run with flk's launcher, which shows the stacks",
            hint="submit the script with flk, or run py-spy in the pod: "
            f"{client.commands.flk('exec', job)} -- py-spy dump --pid 1",
        )
    pod = min(launchers, key=lambda each: each["metadata"]["name"])
    done = client.execute(pod, [*launcher_command(pod), "stacks"], _TIMEOUT)  # it asks the others
    report: dict[str, Any] = done.answer(f"the launcher in {pod['metadata']['name']}")
    if rank is not None:
        report["groups"] = [group for group in report["groups"] if rank in group["ranks"]]
        if not report["groups"]:
            raise ApiError(
                f"no stack of rank {rank}", hint=f"{client.commands.flk('stacks', job)} shows all that there are"
            )
    return report
