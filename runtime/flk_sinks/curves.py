"""recording(): give the lines of metrics to the sinks, in one run of theirs through all attempts of the job."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from flk_runtime.checkpoint import INTERNAL, CheckpointManager
from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import MLFLOW, NO_SINK, TENSORBOARD, WANDB, SinkName, implied_sinks, parse_sinks
from flk_runtime.contract.secrets import REDACTED, hidden, is_secret, secrets_in
from flk_runtime.errors import SetupError
from flk_runtime.preflight import report
from flk_runtime.training.context import RunContext
from flk_runtime.training.ending import has_failed
from flk_runtime.training.extensions import BeginRecording
from flk_runtime.training.lines import Line
from flk_sinks.sink import Row, RunInfo, Sink, flat, scalars
from flk_sinks.writer import Writer, close

# Seconds that the end of a run waits for its sinks. The launcher kills a rank 5 s after it has reported its failure.
_TIMEOUTS: Final = {"finished": 60.0, "stopped": 5.0, "failed": 3.0}
# Variables and files that may give W&B a key.
_LOGINS: Final = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS", "WANDB_CONFIG_DIR", "NETRC")
_LOGIN_FILES: Final = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings")
_OTHERS: Final = re.compile(r"[^A-Za-z0-9._-]+")


def recording(text: str | None) -> BeginRecording | None:
    """The function that begins to give lines of metrics to the sinks that ``text`` or the environment chooses.

    It is None if they choose no sink.

    Raises SetupError for sinks that cannot work here.
    """
    sinks = _chosen(text, os.environ)
    return partial(_begin, sinks) if sinks else None


def _chosen(text: str | None, variables: Mapping[str, str]) -> tuple[SinkName, ...]:
    """The sinks of an argument, else of FLK_METRICS, else those that other variables imply and that are installed.

    Raises SetupError for a wrong text, and for a sink that is named and cannot work here.
    """
    name = "metrics" if text is not None else user_env.METRICS
    given = user_env.METRICS.read(variables) if text is None else text or NO_SINK
    if not given:
        return tuple(
            each
            for each in implied_sinks(variables)
            if _is_installed(each.kind) and not (each.kind == WANDB and _would_ask(variables))
        )
    try:
        named = parse_sinks(given)
    except ValueError as error:
        raise SetupError(f"{name}={given}: {error}") from None
    for each in named:
        if not _is_installed(each.kind):
            raise SetupError(
                f"{name}: {each.kind} needs the package {each.kind}, which this image lacks: add --pip {each.kind}, or "
                "install it in the image"
            )
        if each.kind == MLFLOW and not variables.get("MLFLOW_TRACKING_URI"):
            raise SetupError(f"{name}: mlflow needs the address of its server in MLFLOW_TRACKING_URI")
        if each.kind == WANDB and _would_ask(variables):
            raise SetupError(
                f"{name}: wandb needs a key in WANDB_API_KEY, or WANDB_MODE=offline for files that `wandb sync` sends"
            )
    return named


def _would_ask(variables: Mapping[str, str]) -> bool:
    """Whether W&B would ask for a key in this terminal, while the training goes on. A script may log in by itself."""
    asks = bool(sys.stdin and sys.stdin.isatty()) and "wandb" not in sys.modules
    is_told = variables.get("WANDB_MODE", "online") != "online" or any(variables.get(each) for each in _LOGINS)
    return asks and not is_told and not any(os.path.exists(os.path.expanduser(each)) for each in _LOGIN_FILES)


def _is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name, as W&B makes one for its files, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _begin(sinks: Sequence[SinkName], context: RunContext, manager: CheckpointManager) -> None:
    """Give the lines of a run to sinks on rank 0. Its name in them is in the checkpoints. Collective."""
    curves = Curves(context)
    manager.register(f"{INTERNAL}curves", curves, internal=True)
    if context.rank == 0:
        curves.open(sinks)


class Curves:
    """The run in the sinks, whose ID is in the checkpoints: a job that is resumed from one goes on with it."""

    def __init__(self, context: RunContext) -> None:
        job = user_env.JOB.read(os.environ)
        uid = pod_env.JOB_UID.read(os.environ) or secrets.token_hex(16)
        self._context = context
        self._id = _OTHERS.sub("-", f"{job or 'train'}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}")
        self._writers: dict[str, Writer] = {}
        self._info: RunInfo | None = None
        self._closed = False

    def state_dict(self) -> dict[str, str]:
        """The ID of the run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on with the run of a checkpoint."""
        self._id = state["id"]

    def open(self, sinks: Sequence[SinkName]) -> None:
        """Begin to record. A sink itself begins with its first row."""
        context = self._context
        worker = f"-worker-{context.worker}" if context.workers > 1 else ""
        job = user_env.JOB.read(os.environ) or "train"
        self._info = info = RunInfo(f"{self._id}{worker}", f"{job}{worker}", self._id)
        known: dict[str, str | int] = {
            "job": job,
            "namespace": user_env.NAMESPACE.read(os.environ),
            "code": report.code_version(),
            "image": user_env.POD_IMAGE.read(os.environ),
            "strategy": context.options.strategy,
            "world_size": context.world_size,
            "restarts": context.rank_info.attempt,
        }
        if worker:
            known["worker"] = context.worker
        info.settings |= {name: value for name, value in known.items() if value != ""}
        self._writers = {each.kind: Writer(_sink(each, info), context.say) for each in sinks}
        context.lines.recorders.append(self)
        context.closing.append(self.close)
        atexit.register(self.close)

    def record(self, lines: Sequence[Line]) -> None:
        """Have the numbers of lines of metrics written."""
        rows = []
        for line in lines:
            values = scalars(line.values)
            step = values.pop("step", None)
            if step is not None and values:
                rows.append(Row(int(step), line.time, values))
        if rows and self._info is not None:
            self._info.resumed = self._context.page.restored
            for kind in [kind for kind in self._writers if _script_logs_to(kind)]:
                self._context.say(f"the script has a run of its own in {kind}: flk writes nothing there")
                close([self._writers.pop(kind)], "finished", _TIMEOUTS["stopped"])
            for writer in self._writers.values():
                for row in rows:
                    writer.put(row)

    def describe(self, hyperparameters: Mapping[str, Any]) -> None:
        """Have what the script says of the run written."""
        if self._info is not None:
            known = secrets_in(os.environ, sys.argv)
            plain = {name: _shown(name, value, known) for name, value in flat(hyperparameters)}
            self._info.hyperparameters = self._info.hyperparameters | plain  # threads read it
            for writer in self._writers.values():
                writer.describe()

    def close(self) -> None:
        """Write what waits, and end the run in the sinks. A second call does nothing."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            ended = "stopped" if self._context.page.hold else "failed" if has_failed() else "finished"
            close(self._writers.values(), ended, _TIMEOUTS[ended])


def _shown(name: str, value: Any, secrets: Sequence[str]) -> Any:
    """A hyperparameter as sinks show it: a number, or a text without secrets."""
    if isinstance(value, bool | int | float):
        return value
    return REDACTED if is_secret(name, str(value)) else hidden(str(value), secrets)


def _sink(name: SinkName, info: RunInfo) -> Sink:
    if name.kind == TENSORBOARD:
        from flk_sinks.tensorboard import TensorBoard

        return TensorBoard(info, name.place)
    if name.kind == MLFLOW:
        from flk_sinks.mlflow import MLflow

        return MLflow(info)
    from flk_sinks.wandb import WandB

    return WandB(info)


def _script_logs_to(kind: str) -> bool:
    """Whether the script has an active run of its own."""
    module: Any = sys.modules.get(kind)
    if kind == WANDB:
        return getattr(module, "run", None) is not None
    active = getattr(module, "active_run", None) if kind == MLFLOW else None
    return active is not None and active() is not None
