"""``python -m flk_verify REQUEST script.py args``: one of the processes that make the first steps of a script.

REQUEST is a JSON object: role (rank, or whole: the one process with the whole model), steps, strategy, and folder,
where both meet and rank 0 leaves result.json: line, difference or refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim import Optimizer

from flk_runtime.contract.ranges import plural
from flk_runtime.discovery import discover
from flk_runtime.distributed import parameters_in
from flk_runtime.system import trial
from flk_verify.causes import Evidence, cause_of
from flk_verify.channel import Channel
from flk_verify.compare import Comparison, Difference, text_of
from flk_verify.watch import Done, Step, Watch, broadcast, leave_together, set_parameters, whole

_LIMIT: Final = 600.0  # seconds in which the one process has to begin
_END: Final = "the script made {} there, and more here: what it does depends on the number of ranks"


class Whole:
    """The one process: it shows each step to rank 0, and takes over the parameters that the ranks have after it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._channel: Channel | None = None

    def compare(self, step: Step) -> None:
        if not self._ask(vars(step)):
            raise Done

    def after(self, optimizer: Optimizer, step: Step) -> None:
        answer = self._ask({"parameters": [whole(each) for each in parameters_in(optimizer)]})
        if not answer:
            raise Done
        set_parameters(optimizer, answer["parameters"])

    def end(self, compared: int) -> None:
        self._ask({"compared": compared})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's answer; empty if it needs no more."""
        self._channel = self._channel or Channel.listen(self._folder)
        self._channel.send(message)
        return self._channel.receive()


class Ranks:
    """One of the ranks. Rank 0 compares its steps with those of the one process, for all of them."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request, info = request, discover()
        self._is_main, self._world_size = info.rank == 0, info.world_size
        self._channel: Channel | None = None
        self._comparisons: dict[int, Comparison] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}  # of the latest step of each optimizer
        self._whole: Step | None = None
        self.result: dict[str, str] = {}

    def compare(self, step: Step) -> None:
        """Compare what a step begins with. Ends the script on all ranks at a difference. Collective."""
        self._agree(self._compare(step) if self._is_main else "")
        self._gradients[step.optimizer] = step.gradients

    def after(self, optimizer: Optimizer, step: Step) -> None:
        """Compare what a step has made of the parameters. Collective."""
        values = [whole(each) for each in parameters_in(optimizer)]
        self._agree(self._compare_after(step, values) if self._is_main else "")

    def end(self, compared: int) -> None:
        """Write the result, after so many steps that agree."""
        if self._is_main and not self.result:
            largest = max((each.largest for each in self._comparisons.values()), default=0.0)
            ranks = plural(self._world_size, "rank")
            self.result = {
                "line": f"verified: {plural(compared, 'step')} under {self._request['strategy']} on {ranks} "
                f"{'equals' if compared == 1 else 'equal'} the whole model in one process, largest relative "
                f"difference {largest:.1g}"
            }
            if not compared:
                self.result = {"refused": "no optimizer of torch.optim has made a step, so there is nothing to compare"}
        if self.result:
            Path(self._request["folder"], "result.json").write_text(json.dumps(self.result))

    def _agree(self, error: str) -> None:
        if broadcast(error):
            leave_together()
            raise Done

    def _compare(self, step: Step) -> str:
        self._channel = self._channel or Channel.connect(self._request["folder"], _LIMIT)
        message = self._channel.receive()
        if "compared" in message or not message:
            return self._refuse(
                _END.format(plural(message["compared"], "step")) if message else "the script fails in one process"
            )
        other = self._whole = Step(**message)
        shapes = [[tuple(each.shape) for each in one.parameters] for one in (step, other)]
        if shapes[0] != shapes[1] or (step.optimizer, step.number) != (other.optimizer, other.number):
            return self._refuse("the optimizers hold other parameters in one process, or make steps in another order")
        comparison = self._comparisons.setdefault(step.optimizer, Comparison())
        found = comparison.before(step, other)
        if not found:
            self._channel.send({"go": True})
        return self._differ(step, other, found)

    def _compare_after(self, step: Step, values: list[torch.Tensor]) -> str:
        assert self._channel is not None and self._whole is not None  # noqa: PT018, S101
        others = self._channel.receive().get("parameters")
        if others is None:
            return self._refuse("the script fails in one process")
        found = self._comparisons[step.optimizer].after(step, values, others)
        if not found:
            pairs = enumerate(zip(values, others, strict=True))
            self._channel.send({"parameters": {n: one for n, (one, other) in pairs if not torch.equal(one, other)}})
        return self._differ(step, self._whole, found)

    def _refuse(self, why: str) -> str:
        self.result = {"refused": why}
        return why

    def _differ(self, step: Step, other: Step, found: list[Difference]) -> str:
        if not found:
            return ""
        before = self._gradients.get(step.optimizer, [])
        name, text = cause_of(Evidence(step, other, found, self._world_size, before))
        most = max(found, key=lambda each: each.error)
        parameter = step.names[most.place]
        self.result = {
            "difference": f"step {step.number} under {self._request['strategy']} differs from the whole model in one "
            f"process: {most.what} {parameter!r}: largest difference {text_of(most.largest)}, norm "
            f"{text_of(most.ranks)} on the ranks and {text_of(most.whole)} in one process ({len(found)} of "
            f"{plural(len(step.parameters), 'parameter')} differ). Cause: {f'{name}: ' if name else ''}{text}"
        }
        return self.result["difference"]


def follow(request: dict[str, Any], command: Sequence[str]) -> None:
    """Run ``script.py args`` or ``-m module args`` until its steps are compared. Raises what the script raises."""
    side = Whole(request["folder"]) if request["role"] == "whole" else Ranks(request)
    watch = Watch(request["steps"], side.compare, side.after)
    try:
        with watch.watching():
            trial.run_script(command)
    except Done:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    side.end(watch.compared)


def main() -> int:
    """Follow the script, and return an exit code."""
    follow(json.loads(sys.argv[1]), sys.argv[2:])
    return 0


if __name__ == "__main__":
    trial.leave(main())
