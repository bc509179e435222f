"""Answer: what flk says about a job, and the store that keeps the last answer about each job.

`look` asks the cluster. Commands that are about named jobs `keep` their answer in the user's state folder, so that
`look` has one when somebody has deleted the job. An answer is kept as it was given: nothing of it is found out anew.

The folder is ``$XDG_STATE_HOME/flk/jobs``, by default ``~/.local/state/flk/jobs``. Below it, a folder for each
cluster and namespace has a compressed JSON file for each job, which only the user may read. ``FLK_ARCHIVE=off`` has flk
keep and read none.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from datetime import datetime
from pathlib import Path
from typing import Final

from flk.errors import FlkError, JobNotFoundError
from flk.health import Diagnosis, diagnose
from flk.health.ending import DELETION
from flk.health.queue import SUSPENDED
from flk.health.why import HAPPENED_LATER, Other
from flk.jobs.state import State, deleted, derive
from flk.kube import Object
from flk.kube.connection import cluster_key
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.pods import last_end
from flk.observe.pool import ReadPool
from flk.observe.progress import split_stamp
from flk.observe.reader import find_record, view_job
from flk.observe.redaction import masked, secrets_of
from flk.observe.view import JobView
from flk.spec.units import short_duration
from flk.targets import target_of
from flk.user.files import state_folder, write_whole
from flk_runtime.contract import foreign, log_format
from flk_runtime.contract.secrets import hidden
from flk_runtime.contract.values import asdict, dataclass, field, replace

SCHEMA: Final = "flk.dev/answer/v1"
MAX_FILES: Final = 500  # answers that are kept
MAX_AGE: Final = 60 * 86_400  # seconds since a file was written
MAX_READ: Final = 64 << 20  # bytes of one file after decompression: a larger one is not flk's
MAX_LINES: Final = 20_000  # lines of all pods together
EARLIER_PODS: Final = 50  # that others have replaced, of which lines are kept
LINES_OF_A_POD: Final = (5, 200)  # fewest and most lines of one pod
LINE_LIMIT: Final = 1000  # characters of a line
TAILS: Final = 32  # pods whose logs are read at the end of a wait: failed pods before successful ones
_IDLE: Final = 5.0  # seconds without a byte after which such a log is given up
_TODAY: Final = 12 * 3600.0  # seconds for which the time of day says enough
_SUFFIX: Final = ".json.gz"
Lines = Sequence[Sequence[str]]  # pairs of a time, as RFC 3339 or empty, and a text


@dataclass(frozen=True)
class Answer:
    """What flk says about a job: now, or (``gone``) when it said so last."""

    state: State
    report: Diagnosis
    time: float  # when, in seconds since the epoch by the API server's clock
    view: JobView | None = None  # what it was read from; None: it was kept
    pods: Sequence[str] = ()  # names of all pods
    lines: Mapping[str, Lines] = field(default_factory=dict)  # the last ones of pods
    gone: bool = False  # the job does not exist any more

    def as_of(self, now: float) -> str:
        """Return when the answer was given: ``as of 10:42 (5m ago)``."""
        # The API server's clock is known to a second, so an answer of this moment may be of a later one.
        form = "%H:%M" if abs(now - self.time) < _TODAY else "%Y-%m-%d %H:%M"
        return f"as of {datetime.fromtimestamp(self.time):{form}} ({short_duration(now - self.time)} ago)"


@dataclass(frozen=True)
class _Kept:
    """The content of a file."""

    time: foreign.Time
    state: State
    report: Diagnosis
    pods: list[str]
    lines: dict[str, list[list[str]]]
    schema: str = SCHEMA


def answer_of(view: JobView) -> Answer:
    """Return the answer about a job that was seen: its state and its cause are made here, and nowhere else."""
    return Answer(derive(view), diagnose(view), view.now, view)


def look(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> Answer:
    """Return the answer about a job now, and keep it. If the job is gone, return the last one, and call ``note``.

    Raises JobNotFoundError if there is no such job and no answer about one was kept.
    """
    try:
        view = view_job(client, name)
    except JobNotFoundError:
        last = last_answer(client, name)
        if last is None:
            raise
        note(f"job {name} is gone; this is the last answer about it, {last.as_of(client.now())}")
        return last
    return answered(client, view, note)


def answered(
    client: JobClient,
    view: JobView,
    note: Callable[[str], None] = lambda text: None,
    lines: Mapping[str, Lines] | None = None,
) -> Answer:
    """Return the answer about a job that exists, and keep it, with ``lines`` of its pods.

    If its pods are gone, and flk has said how it ended while they were there, that is the answer: the pods said more.
    """
    if view.has_lost_pods and (last := _read(client, view.name, view.uid)) and not last.state.was_deleted:
        note(f"pods of job {view.name} are gone; this is the last answer about it, {last.as_of(client.now())}")
        return replace(last, gone=False)
    answer = answer_of(view)
    keep(client, answer, lines)
    return answer


def last_answer(client: JobClient, name: str, uid: str = "") -> Answer | None:
    """Return the last answer about a job that is gone: the one that was kept, or one from its launchers' record.

    The newer one counts. ``uid`` chooses among jobs of one name; without it, the newest is meant.
    """
    uid = uid or client.ref(name).uid
    found = [answer for answer in (_read(client, name, uid), _recorded(client, name, uid)) if answer is not None]
    return max(found, key=lambda answer: answer.time, default=None)


def keep(client: JobClient, answer: Answer, lines: Mapping[str, Lines] | None = None) -> None:
    """Keep an answer in place of an earlier one about this job, without the secrets of its object.

    Lines of the earlier one stay where there are no new ones. Answers about jobs that the user has neither
    submitted from here nor named are not kept. A folder that cannot be written disturbs no command.
    """
    view = answer.view
    path = _path(client, answer.state.name, answer.state.uid)
    if view is None or not _is_on() or not (client.ref(answer.state.name).named or os.path.exists(path)):
        return
    before, secrets = _load(path), secrets_of(view.job)
    if before is not None and before.state.finished and not answer.state.finished:
        return  # its pods are gone: they said more
    count = lines_of_a_pod(len(view.pods))
    read = {pod: view.seen.lines_of(pod) for pod in view.seen.logs} | dict(lines or {})
    texts = {
        pod: [[time, hidden(text, secrets)[:LINE_LIMIT]] for time, text in found if is_kept(text)][-count:]
        for pod, found in read.items()
    }
    earlier = before.lines if before else {}
    every = [(pod, found) for pod, found in earlier.items() if pod not in texts] + [*texts.items()]
    kept = _Kept(
        answer.time,
        # Without the records of its pods, which the state itself tells.
        masked(replace(answer.state, pods=[replace(pod, record=None) for pod in answer.state.pods]), secrets),
        masked(answer.report, secrets),
        [pod.name for pod in view.pods],
        dict(every[-(len(view.pods) + EARLIER_PODS) :]),
    )
    # A number that JSON does not have, such as a loss that is none, is null.
    content = json.dumps(
        json.loads(json.dumps(asdict(kept)), parse_constant=lambda name: None), separators=(",", ":")
    ).encode()
    if len(content) > MAX_READ:
        return
    with contextlib.suppress(OSError):
        write_whole(path, gzip.compress(content, 6, mtime=0))
        if before is None:
            prune()


def is_kept(line: str) -> bool:
    """Return whether a line of a log is kept: not a record or telemetry. The mark of an attempt says what came last."""
    return not log_format.is_record(line) or log_format.parse_attempt(line) is not None


def prune(files: int = MAX_FILES, age: float = MAX_AGE) -> None:
    """Delete the oldest answers beyond these bounds, of all clusters. Raises OSError."""
    now = time.time()
    for count, path in enumerate(sorted(_root().glob(f"*/*/*{_SUFFIX}"), key=_modified, reverse=True)):
        if count >= files or now - _modified(path) > age:
            path.unlink(missing_ok=True)


def tails(client: JobClient, pods: Sequence[Object], timeout: float) -> dict[str, Lines]:
    """Return the last lines of the pods that have ended, of those whose logs are read within ``timeout`` seconds."""
    ended = [(code, pod) for pod in pods if (code := last_end(pod).get("exitCode")) is not None]
    chosen = [pod for _, pod in sorted(ended, key=lambda item: item[0] == 0)][:TAILS]
    with ReadPool() as pool:
        reads = {pod["metadata"]["name"]: pool.submit(_tail, client, pod) for pod in chosen}
        wait(reads.values(), timeout)
        return {name: lines for name, read in reads.items() if read.done() and (lines := read.result())}


def _tail(client: JobClient, pod: Object) -> Lines:
    try:
        with client.stream_log(pod, _IDLE, tailLines=LINES_OF_A_POD[1], timestamps=True) as lines:
            return [split_stamp(line) for line in lines]
    except FlkError:
        return []  # the log is gone already


def lines_of_a_pod(pods: int) -> int:
    """Return how many last lines are kept of each pod of a job with so many pods."""
    fewest, most = LINES_OF_A_POD
    return max(fewest, min(most, MAX_LINES // max(1, pods)))


def _recorded(client: JobClient, name: str, uid: str) -> Answer | None:
    """Return an answer from the record that the launchers have archived in the cluster; None without one."""
    seen = find_record(client, name, uid or None)
    if seen is None:
        return None
    view = JobView(replace(seen, gone=seen.time), client.commands)
    lines = {pod: [["", text] for text in texts] for pod, texts in seen.logs.items()}
    said, pods = answer_of(view), [pod.name for pod in view.pods]
    return replace(said, report=replace(said.report, as_of=seen.time), pods=pods, lines=lines, gone=True)


def _read(client: JobClient, name: str, uid: str) -> Answer | None:
    """Return the answer that was kept about a job; None without one. A damaged file counts as none."""
    if not _is_on():
        return None
    path, ref = _path(client, name, uid or "*"), client.ref(name)
    for candidate in sorted(path.parent.glob(path.name), key=_modified, reverse=True):
        kept = _load(candidate)
        if kept is not None and ref.target in (None, target_of({"kind": kept.state.kind})):
            state, report = _after_deletion(kept)
            return Answer(state, report, kept.time, None, kept.pods, kept.lines, gone=True)
    return None


def _after_deletion(kept: _Kept) -> tuple[State, Diagnosis]:
    """Return state and report of a job that is gone. One that had not ended was deleted.

    That is its cause too, unless something else kept it from running. Nobody can wait for a job that is gone.
    """
    state, report = kept.state, replace(kept.report, as_of=kept.time)
    if state.finished:
        return state, report
    job = {"kind": state.kind, "metadata": {"name": state.name, "namespace": state.namespace, "uid": state.uid}}
    gone = JobView(Observation(job, time=kept.time, gone=kept.time))
    (deletion,) = [found for row in DELETION if (found := row.finding(gone))]
    cause, others = report.cause, report.others
    if cause is None or cause.code == SUSPENDED:  # whoever suspends a job does not end it
        cause, summary = deletion, deletion.sentence
    else:
        summary = report.summary
        others = [Other(deletion.sentence, HAPPENED_LATER, code=deletion.code), *others]
        if cause.resolves_itself:
            cause = replace(cause, remedy=deletion.remedy, resolves_itself=False)
    report = replace(report, cause=cause, summary=summary, known=True, stuck=False, others=others)
    return replace(deleted(state, now=kept.time), cause=cause), report


def _load(path: Path) -> _Kept | None:
    """Return the content of a file; None if there is none, or it is damaged."""
    try:
        with gzip.open(path) as file:
            return foreign.load(_Kept, file.read(MAX_READ), MAX_READ)
    except (foreign.ForeignError, OSError, EOFError, zlib.error):
        return None


def _path(client: JobClient, name: str, uid: str) -> Path:
    """Return the path of the file of a job; with ``*`` for a UID, the pattern of the files of all jobs of the name."""
    cluster = cluster_key(client.api.access.context)
    return _root() / cluster / _safe(client.namespace) / f"{_safe(name)}@{uid if uid == '*' else _safe(uid)}{_SUFFIX}"


def _root() -> Path:
    return state_folder() / "jobs"


def _is_on() -> bool:
    return os.environ.get("FLK_ARCHIVE", "").lower() != "off"


def _safe(text: str) -> str:
    """Return text as part of a file name. Names of the API are safe; a server may answer anything."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:200].lstrip(".") or "_"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
