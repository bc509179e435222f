"""OuterLoop: the rounds of one worker, a group of ranks that trains with an inner strategy between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flk_diloco.lead import JOINED, STOP, Lead, say
from flk_diloco.options import DiLoCo, Membership
from flk_runtime.contract.quantities import plural
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel
from flk_runtime.shared import progress
from flk_runtime.system import device as devices

_NOTICE = 30.0  # seconds after which a wait is reported


class OuterLoop:
    """Sends outer gradients and applies the averages, after the same steps on all ranks of the worker.

    The agreed parameters are on the CPU of rank 0 only. It gathers this worker's there, and broadcasts the new ones to
    the other ranks, of which each keeps its shard. The methods are collective among the ranks of the worker. It is a
    `flk_runtime.checkpoint.Stateful`.
    """

    def __init__(self, parallel: ParallelModel, options: DiLoCo, membership: Membership, steps: int) -> None:
        """``steps`` were made before. Raises SetupError for a complex parameter."""
        self._parallel, self._options, self._membership = parallel, options, membership
        parameters = parallel.trained()
        if other := next((name for name, each in parameters.items() if not each.is_floating_point()), ""):
            raise SetupError(
                f"{other!r} is complex, and the workers of strategy diloco exchange real parameters: keep its real and "
                "its imaginary part, and join them by torch.complex in forward"
            )
        self._shapes = {name: each.shape for name, each in parameters.items()}
        self._version = steps // options.every  # the rounds that the parameters have been through
        self._sent = False  # the outer gradient of the round that is due
        self._lead: Lead | None = None
        start = self._gather()
        if start is not None:
            self._lead = Lead(self._shapes, start, self._version, options, membership)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        if not self._lead:
            return {}
        return self._lead.outer.state_dict() | {"names": list(self._shapes), "every": self._options.every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["names"] != list(self._shapes):  # the outer state is flat, in their order
            raise ValueError("the model has other parameters, or has them in another order: define them as before")
        if (every := state.get("every", self._options.every)) != self._options.every:
            raise ValueError(f"its rounds come every {every} steps: keep every={every}, by which workers count rounds")
        if self._lead:
            self._lead.restore(state)
        self._version = state["version"]

    # Rounds

    def restart(self) -> None:
        """Take the model's parameters as the agreed ones. Before the first step, and in all workers alike."""
        local = self._gather()
        if self._lead and local is not None:
            self._lead.outer.parameters.copy_(local)

    def begin(self, steps: int) -> int:
        """Meet the other workers, and catch up with them if they are further. Returns the steps that are done then.

        Raises SetupError if this worker's model or options differ from the others', and RendezvousError if there is no
        hub.
        """
        self._on_lead(Lead.connect)
        outcome = self._wait(Lead.poll_begin)
        if outcome == STOP:
            return steps
        version = self._on_lead(lambda lead: lead.outer.version)
        if outcome == JOINED or version != self._version:
            steps = self._adopt(version, steps)
        own = self._membership
        self._say(f"worker {own.worker} of {own.workers} begins at step {steps}")
        return steps

    def step(self, steps: int) -> int:
        """Make the round that is due after ``steps`` inner steps. Returns the steps that are done then.

        They are more than before if this worker was behind the others and has caught up.
        """
        if steps < (self._version + 1) * self._options.every:
            return steps
        if not self._sent:
            local = self._gather()
            if self._lead and local is not None:
                self._lead.submit(local)
            self._sent = True
        outcome = self._wait(Lead.poll_result)
        if outcome == STOP:
            return steps
        if outcome == JOINED:
            return self._adopt(self._on_lead(lambda lead: lead.outer.version), steps)
        if self._lead:
            self._lead.apply()
        self._sent = False
        self._version += 1
        self._scatter()
        return steps

    @property
    def metrics(self) -> dict[str, Any]:
        """The round and the workers that take part, for the line of metrics; on rank 0."""
        return {"round": self._version, "workers": self._lead.workers} if self._lead else {}

    def close(self, steps: int) -> None:
        """Tell the hub that this worker has finished."""
        if self._lead:
            self._lead.close()
        since = steps - self._version * self._options.every
        if since > 0 and self._membership.workers > 1:
            self._say(
                f"the last {plural(since, 'step')} of this worker came after its last round: to share all steps, end "
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
                    self._say(f"worker {self._membership.worker} waits for {self._lead and self._lead.missing}")
        return str(outcome)

    def _adopt(self, version: int, steps: int) -> int:
        """Go on from the agreed parameters, which are at this version. Returns the steps that are done."""
        self._version, self._sent = version, False
        self._scatter()
        steps = max(steps, version * self._options.every)
        self._say(f"worker {self._membership.worker} has caught up: it goes on after step {steps}")
        return steps

    # Between the ranks

    def _gather(self) -> torch.Tensor | None:
        """This worker's parameters: float32 of shape (size,) on the CPU of rank 0, None elsewhere."""
        main, parts = dist.get_rank() == 0, []
        with torch.no_grad(), devices.across_streams():
            for parameter in self._parameters():
                full = self._parallel.full_tensor(parameter)
                if main:
                    parts.append(full.to("cpu", torch.float32).flatten())
        return torch.cat(parts) if main else None

    def _parameters(self) -> list[nn.Parameter]:
        """The trained parameters. Raises SetupError if the script trains others than at the beginning."""
        trained = self._parallel.trained()
        if new := next((name for name in trained if name not in self._shapes), ""):
            raise SetupError(
                f"{new!r} was frozen or absent in parallelize, so the workers of strategy diloco do not exchange it, "
                "and each would train its own: have all parameters that are trained later require gradients there"
            )
        if gone := next((name for name in self._shapes if name not in trained), ""):
            raise SetupError(
                f"{gone!r} is not trained any more, and the workers of strategy diloco would go on to move it by the "
                "outer momentum: freeze parameters before parallelize"
            )
        return [trained[name] for name in self._shapes]

    def _scatter(self) -> None:
        """Set this worker's parameters to the agreed ones."""
        fulls = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self._shapes.values()]
        if self._lead:
            flat = torch.split(self._lead.outer.parameters, [full.numel() for full in fulls])
            fulls = [values.view(full.shape) for values, full in zip(flat, fulls, strict=True)]
        with torch.no_grad(), devices.across_streams():
            for parameter, full in zip(self._parameters(), fulls, strict=True):
                full = full.to(process_group.comm_device(parameter.device))
                dist.broadcast(full, src=0)
                parameter.copy_(self._parallel.local_shard(parameter, full.to(parameter.device, parameter.dtype)))

    def _on_lead(self, function: Callable[[Lead], Any]) -> Any:
        """Call ``function`` on rank 0, and return its result on every rank."""
        lead = self._lead
        if lead and dist.get_world_size() == 1:
            return function(lead)
        return process_group.on_main(lambda: function(lead) if lead else None)

    def _say(self, text: str) -> None:
        if self._lead:
            say(text)
