"""``python -m flk_verify REQUEST script.py args``: one of the processes that make the first steps of a script.

REQUEST is a JSON object: role (rank, or whole: the one process with the whole model), steps, strategy, parent (the
process that has started this one), and folder, where both meet and rank 0 leaves result.json: line, difference,
refused or failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flk_runtime.contract import user_env
from flk_runtime.contract.quantities import plural
from flk_runtime.data import LoaderOptions
from flk_runtime.discovery import discover
from flk_runtime.distributed import parameters_in, process_group
from flk_runtime.errors import setting
from flk_runtime.system import host, trial
from flk_verify.causes import INCOMPARABLE, UNKNOWN, Evidence, cause_of
from flk_verify.compare import Comparison, Difference
from flk_verify.watch import Done, Step, Watch, end, whole

_POLL: Final = 0.05  # seconds
_TOLD: Final = 1.0  # seconds: a process that fails because of another one ends after that was told to all ranks
_FAILS: Final = "the script fails in one process"


class Whole:
    """The one process: it shows each step to rank 0, and takes over the parameters that the ranks have after it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._folder = Path(request["folder"])
        self._ranks = setting(user_env.STANDS_FOR)
        self._connection: Connection | None = None

    def loader(self, number: int, options: LoaderOptions) -> LoaderOptions:
        """Batches of all ranks. A script may divide the size of its batch by the number of ranks, so theirs counts."""
        file = self._folder / f"loader-{number}"
        while not file.exists():  # the ranks make it, too
            time.sleep(_POLL)
        batch_size, accumulate = json.loads(file.read_text())
        return replace(options, batch_size=batch_size and batch_size * self._ranks, accumulate=accumulate)

    def before(self, step: Step) -> None:
        """Show what a step begins with."""
        self._ask(vars(step))

    def after(self, optimizer: Optimizer, step: Step) -> None:
        """Show the parameters after a step, and take over those of the ranks that differ."""
        parameters = parameters_in(optimizer)
        answer = self._ask({"parameters": [whole(each) for each in parameters]})
        with torch.no_grad():
            for place, value in answer["parameters"].items():
                parameter = parameters[place]
                target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                target.copy_(value.to(target.device))

    def end(self, compared: int) -> None:
        """Say that the script has ended after so many steps."""
        with contextlib.suppress(Done):
            self._ask({"compared": compared})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's answer. Ends the script if there is none."""
        while self._connection is None:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # rank 0 has not come so far
                self._connection = Client(str(self._folder / "socket"), "AF_UNIX")
            time.sleep(_POLL)
        _send(self._connection, message)
        if not (answer := _receive(self._connection)):
            raise Done
        return answer


class Ranks:
    """One of the ranks. Rank 0 compares its steps with those of the one process, for all of them."""

    def __init__(self, request: dict[str, Any]) -> None:
        info = discover()
        self._strategy, self._folder = request["strategy"], Path(request["folder"])
        self._is_main, self._ranks = info.rank == 0, info.world_size
        self._connection: Connection | None = None
        self._comparisons: dict[int, Comparison] = {}
        self._whole: Step | None = None  # the step of the one process
        self._result: dict[str, str] = {}

    def loader(self, number: int, options: LoaderOptions) -> LoaderOptions:
        """Tell the one process the sizes of a loader."""
        if self._is_main:
            file = self._folder / f"new-loader-{number}"
            file.write_text(json.dumps([options.batch_size, options.accumulate]))
            file.rename(self._folder / f"loader-{number}")
        return options

    def before(self, step: Step) -> None:
        """Compare what a step begins with. Ends the script on all ranks at a difference. Collective."""
        self._agree(lambda: self._compare(step))

    def after(self, optimizer: Optimizer, step: Step) -> None:
        """Compare what a step has made of the parameters. Collective."""
        values = [whole(each) for each in parameters_in(optimizer)]
        self._agree(lambda: self._compare_after(step, values))

    def end(self, compared: int) -> None:
        """Write the result, after so many steps that agree."""
        largest = max((each.largest for each in self._comparisons.values()), default=0.0)
        line = (
            f"verified: {plural(compared, 'step')} under {self._strategy} on {plural(self._ranks, 'rank')} "
            f"{'equals' if compared == 1 else 'equal'} the whole model in one process, largest relative difference "
            f"{largest:.1g}, compared without torch.compile"
        )
        nothing = {"refused": "no optimizer of torch.optim has made a step, so there is nothing to compare"}
        result = self._result or ({"line": line} if compared else nothing)
        if self._is_main:
            (self._folder / "result.json").write_text(json.dumps(result))

    def _agree(self, compare: Any) -> None:
        """End the script on all ranks unless ``compare``, on rank 0, finds nothing."""

        def found() -> bool:
            self._result = compare()
            return bool(self._result)

        if process_group.on_main(found):
            end()

    def _compare(self, step: Step) -> dict[str, str]:
        if self._connection is None:
            with Listener(str(self._folder / "socket"), "AF_UNIX") as listener:
                self._connection = listener.accept()
        message = _receive(self._connection)
        if "number" not in message:
            if not message:
                return {"failed": _FAILS}
            return {"refused": f"it makes {plural(message['compared'], 'step')} in one process, and more here"}
        other = self._whole = Step(**message)
        shapes = [[each.shape for each in one.parameters] for one in (step, other)]
        if shapes[0] != shapes[1] or (step.optimizer, step.number) != (other.optimizer, other.number):
            return {"refused": "optimizers hold other parameters in one process, or make their steps in another order"}
        found = self._comparisons.setdefault(step.optimizer, Comparison()).before(step, other)
        return self._answer(step, other, found, {"go": True})

    def _compare_after(self, step: Step, values: list[torch.Tensor]) -> dict[str, str]:
        assert self._connection is not None and self._whole is not None  # noqa: PT018, S101
        others = _receive(self._connection).get("parameters")
        if others is None:
            return {"failed": _FAILS}
        found = self._comparisons[step.optimizer].after(step, values, others)
        pairs = enumerate(zip(values, others, strict=True))
        differing = {place: one for place, (one, other) in pairs if not torch.equal(one, other)}
        return self._answer(step, self._whole, found, {"parameters": differing})

    def _answer(self, step: Step, other: Step, found: list[Difference], answer: dict[str, Any]) -> dict[str, str]:
        """Have the one process go on with ``answer``, or return what was found."""
        assert self._connection is not None  # noqa: S101
        if not found:
            _send(self._connection, answer)
            return {}
        name, text = cause_of(Evidence(step, other, found, self._ranks))
        most = max(found, key=lambda each: each.error)
        message = (
            f"step {step.number} under {self._strategy} differs from the whole model in one process: {most.what} "
            f"{step.names[most.place]!r}: largest difference {most.largest:.3g}, norm {most.ranks:.3g} on the ranks "
            f"and {most.whole:.3g} in one process ({len(found)} of {plural(len(step.names), 'parameter')} "
            f"{'differs' if len(found) == 1 else 'differ'}). {f'Cause: {name}: {text}' if name else UNKNOWN}"
        )
        return {"refused" if name in INCOMPARABLE else "difference": message}


def _send(connection: Connection, message: dict[str, Any]) -> None:
    """Send ``message``. It is lost if the other end has left."""
    file = io.BytesIO()
    torch.save(message, file)
    with contextlib.suppress(OSError):
        connection.send_bytes(file.getbuffer())


def _receive(connection: Connection) -> dict[str, Any]:
    """The next message; empty if the other end has left."""
    try:
        data = connection.recv_bytes()
    except (EOFError, OSError):
        return {}
    return cast("dict[str, Any]", torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def follow(request: dict[str, Any], command: Sequence[str]) -> None:
    """Run ``script.py args`` or ``-m module args`` until its steps are compared. Raises what the script raises."""
    side = Whole(request) if request["role"] == "whole" else Ranks(request)
    watch = Watch(request["steps"], side)
    try:
        with watch.watching():
            trial.run_script(command)
    except Done:
        pass
    side.end(watch.compared)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    host.die_with_parent(given["parent"])
    try:
        follow(given, sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        time.sleep(_TOLD)
        host.exit_at_once(1)
    host.exit_at_once(0)
