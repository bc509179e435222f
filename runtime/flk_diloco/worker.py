"""OuterLoop: the rounds of one worker, a group of ranks that trains with an inner strategy between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flk_diloco import fragments
from flk_diloco.lead import JOINED, STOP, Lead, say
from flk_diloco.options import DiLoCo, Membership
from flk_diloco.step_streams import StepStreams
from flk_runtime.contract.ranges import plural
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel
from flk_runtime.shared import progress
from flk_runtime.system import device as devices

_NOTICE = 30.0  # seconds after which a wait is reported
_MIX = 0.5  # share of the local parameters in what follows a delayed result (arXiv 2501.18512, section 2.3)


class OuterLoop:
    """Sends outer gradients and applies the averages, after the same steps on all ranks of the worker.

    The agreed parameters are on the CPU of rank 0 only. It gathers each fragment there, and broadcasts the new one to
    the other ranks, of which each keeps its shard. The methods are collective among the ranks of the worker. It is a
    `flk_runtime.checkpoint.Stateful`.
    """

    def __init__(
        self, parallel: ParallelModel, blocks: Sequence[nn.Module], options: DiLoCo, membership: Membership, steps: int
    ) -> None:
        """``blocks`` are passed to `fragments.split`; ``steps`` were made before."""
        self._parallel, self._options, self._membership = parallel, options, membership
        self._fragments = fragments.split(parallel, blocks, options.fragments)
        self._names = {name for part in self._fragments for name in part.names}
        self._schedule = fragments.Schedule(options.every, options.delay, len(self._fragments))
        self._versions = [self._schedule.rounds_before(number, steps) for number in range(len(self._fragments))]
        # The step after which the result of each fragment that was sent is applied.
        self._apply_at: list[int | None] = [None] * len(self._fragments)
        self._lead: Lead | None = None
        self._streams = StepStreams(parallel.parameters().values())
        start = [self._gather(number) for number in range(len(self._fragments))]
        if dist.get_rank() == 0:
            values = [each for each in start if each is not None]
            self._lead = Lead(self._fragments, values, self._versions, options, membership)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return self._lead.outer.state_dict() | {"names": self._all_names()} if self._lead else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["names"] != self._all_names():  # the outer state is flat, in their order
            raise ValueError("the model has other parameters, or has them in another order: define them as before")
        if self._lead:
            self._lead.restore(state)
        self._versions = list(state["versions"])

    def _all_names(self) -> list[list[list[str]]]:
        """The names of each parameter of each fragment, by which weights are read from a checkpoint."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._parallel.parameters().items():  # a tied parameter has several
            names.setdefault(id(parameter), []).append(name)
        count = len(self._fragments)
        return [[names[id(parameter)] for parameter in self._parameters(number)] for number in range(count)]

    # Rounds

    def restart(self) -> None:
        """Take the model's parameters as the agreed ones. Before the first step, and in all workers alike."""
        for number in range(len(self._fragments)):
            local = self._gather(number)
            if self._lead and local is not None:
                self._lead.outer.parameters[number].copy_(local)

    def begin(self, steps: int) -> int:
        """Meet the other workers, and catch up with them if they are further. Returns the steps that are done then.

        Raises SetupError if this worker's model or options differ from the others', and RendezvousError if there is no
        hub.
        """
        self._on_lead(Lead.connect)
        outcome = self._wait(Lead.poll_begin)
        if outcome == STOP:
            return steps
        versions = self._on_lead(lambda lead: list(lead.outer.versions))
        if outcome == JOINED or versions != self._versions:
            steps = self._adopt(versions, steps)
        own = self._membership
        self._say(f"worker {own.worker} of {own.workers} begins at step {steps}")
        return steps

    def step(self, steps: int) -> int:
        """Send and apply the fragments that are due after ``steps`` inner steps. Returns the steps that are done then.

        They are more than before if this worker was behind the others and has caught up.
        """
        for number, apply_at in enumerate(self._apply_at):
            if apply_at is None and steps >= self._schedule.due(number, self._versions[number] + 1):
                local = self._gather(number)
                if self._lead and local is not None:
                    self._lead.submit(number, local)
                self._apply_at[number] = steps + self._options.delay
        for number, apply_at in enumerate(self._apply_at):
            if apply_at is None or steps < apply_at:
                continue
            outcome = self._wait(partial(Lead.poll_result, fragment=number))
            if outcome == STOP:
                break
            if outcome == JOINED:
                return self._adopt(self._on_lead(lambda lead: list(lead.outer.versions)), steps)
            if self._lead:
                self._lead.apply(number)
            self._apply_at[number] = None
            self._versions[number] += 1
            self._scatter(number, _MIX if self._options.delay else 0.0)
        return steps

    @property
    def metrics(self) -> dict[str, Any]:
        """The round, the workers that take part, and the megabytes on the wire, for the line of metrics; on rank 0."""
        if not self._lead:
            return {}
        wire = round(self._lead.wire_bytes / 1e6, 3)
        return {"round": max(self._versions), "workers": self._lead.workers, "wire_mb": wire}

    def close(self, steps: int) -> None:
        """Tell the hub that this worker has finished."""
        if self._lead:
            self._lead.close()
        since = self._schedule.since_round(self._versions, steps)
        if since > 0 and self._membership.workers > 1:
            together = self._schedule.count == 1 and not self._options.delay
            which = "its last round" if together else "the last round of a fragment"
            advice = "" if together else "use fragments=1 and delay=0, and "
            self._say(
                f"the last {plural(since, 'step')} of this worker came after {which}: to share all steps, {advice}end "
                f"after a multiple of {self._options.every}"
            )

    def _wait(self, poll: Callable[[Lead], str]) -> str:
        """Wait on all ranks until rank 0's ``poll`` has an outcome."""
        page, began, noticed = progress.own_page(), time.monotonic(), False
        with page.during(progress.Phase.MEETING):
            while not (outcome := self._on_lead(poll)):
                progress.heartbeat()
                if not noticed and time.monotonic() - began > _NOTICE:
                    noticed = True
                    self._say(f"worker {self._membership.worker} waits for the others")
        return str(outcome)

    def _adopt(self, versions: list[int], steps: int) -> int:
        """Go on from the agreed parameters of all fragments, which are at these versions. Returns the steps done."""
        self._versions = list(versions)
        self._apply_at = [None] * len(versions)
        for number in range(len(versions)):
            self._scatter(number, 0.0)
        steps = max(steps, self._schedule.steps_at(versions))
        self._say(f"worker {self._membership.worker} has caught up: it goes on after step {steps}")
        return steps

    # Between the ranks

    def _gather(self, number: int) -> torch.Tensor | None:
        """This worker's parameters of a fragment: float32 of shape (size,) on the CPU of rank 0, None elsewhere."""
        main, parts = dist.get_rank() == 0, []
        with torch.no_grad(), self._streams.between_steps():
            for parameter in self._parameters(number):
                full = self._parallel.full_tensor(parameter)
                if main and full is not None:
                    parts.append(full.to("cpu", torch.float32).flatten())
        return torch.cat(parts) if main else None

    def _parameters(self, number: int) -> list[nn.Parameter]:
        """The parameters of a fragment. Raises SetupError if the script trains others than at the beginning."""
        trained, names = self._parallel.trained(), self._fragments[number].names
        if new := next((name for name in trained if name not in self._names), ""):
            raise SetupError(
                f"{new!r} was frozen or absent in parallelize, so the workers of strategy diloco do not exchange it, "
                "and each would train its own: have all parameters that are trained later require gradients there"
            )
        if gone := next((name for name in names if name not in trained), ""):
            raise SetupError(
                f"{gone!r} is not trained any more, and the workers of strategy diloco would go on to move it by the "
                "outer momentum: freeze parameters before parallelize"
            )
        return [trained[name] for name in names]

    def _scatter(self, number: int, mix: float) -> None:
        """Set this worker's parameters of a fragment to the agreed ones, with a share of ``mix`` of their own."""
        part = self._fragments[number]
        fulls = [torch.empty(shape) for shape in part.shapes]
        if self._lead:
            flat = torch.split(self._lead.outer.parameters[number], [shape.numel() for shape in part.shapes])
            fulls = [values.view(shape) for values, shape in zip(flat, part.shapes, strict=True)]
        with torch.no_grad(), devices.across_streams():
            for parameter, full in zip(self._parameters(number), fulls, strict=True):
                full = full.to(process_group.comm_device(parameter.device))
                dist.broadcast(full, src=0)
                shard = self._parallel.local_shard(parameter, full.to(parameter.device, parameter.dtype))
                parameter.copy_(parameter * mix + shard * (1 - mix) if mix else shard)

    def _on_lead(self, function: Callable[[Lead], Any]) -> Any:
        """Call ``function`` on rank 0, and return its result on every rank."""
        lead = self._lead
        if lead and dist.get_world_size() == 1:
            return function(lead)
        return process_group.on_main(lambda: function(lead) if lead else None)

    def _say(self, text: str) -> None:
        if self._lead:
            say(text)
