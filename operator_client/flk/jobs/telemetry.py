"""The telemetry of a job: from its launcher, from the archived record, or from the log of pod 0.

At its end a launcher writes there what it has measured; the metrics lines tell less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flk.errors import ApiError, FlkError, JobNotFoundError
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.pods import has_log, launcher_command, phase_of, training_container
from flk.observe.progress import read_telemetry_of
from flk.observe.records import find_record
from flk_runtime.contract import foreign, telemetry_archive
from flk_runtime.contract.log_format import parse_telemetry
from flk_runtime.contract.telemetry import Telemetry

_TIMEOUT: Final = 45.0  # seconds in which the launcher answers
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
            return _with_image(_of_launcher(client, pod), pod)
        except FlkError:  # without the rights to pods/exec, or the launcher has just ended
            pass
    seen = find_record(client, job, uid)
    if seen and seen.entry and (kept := telemetry_archive.unpack(seen.entry.telemetry)):
        return _with_image(kept, first)
    if missing and not (seen and seen.entry):
        raise missing
    lines: list[str] = []
    if first is not None and has_log(first):
        lines = client.last_lines(first, _LINES, timestamps=True)
    packed = next(filter(None, (parse_telemetry(line.partition(" ")[2]) for line in reversed(lines))), "")
    return _with_image(telemetry_archive.unpack(packed) or read_telemetry_of(lines, client.now()), first)


def _of_launcher(client: JobClient, pod: Object) -> Telemetry:
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
