"""``python -m flk_plan.bench REQUEST script.py args``: the program that the ranks of `flk bench` run.

REQUEST is a JSON object: strategies (empty: all that differ on these nodes), steps, and timeout, the seconds that a
case may take. Rank 0 prints lines of progress, and at the end one line with the result: BENCH_MARKER of
flk_runtime.contract.log_format, and JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch.distributed as dist

from flk_plan.automatic import run_plan
from flk_plan.bench.cases import Cases
from flk_runtime.contract import ExitCode, log_format, user_env
from flk_runtime.discovery import RankInfo, discover
from flk_runtime.errors import RuntimeFailure
from flk_runtime.preflight.bootstrap import connect_store
from flk_runtime.shared import failure_report
from flk_runtime.system import device as devices

_FLAT: Final = ("ddp", "shard_grad_op", "full_shard")
_HYBRID: Final = ("hybrid_shard", "hybrid_shard_zero2")
_ROUNDS: Final = 2


class Benchmark:
    """All cases, one after the other. All ranks make the same calls."""

    def __init__(self, info: RankInfo, request: dict[str, Any], command: list[str]) -> None:
        self._info, self._request, self._command = info, request, command
        limit = user_env.PREFLIGHT_TIMEOUT.default
        store = connect_store(info, limit) if info.world_size > 1 else dist.HashStore()  # type: ignore[attr-defined]
        self._cases = Cases(info, store, request["timeout"])

    def run(self) -> dict[str, Any]:
        """Run all cases and return the result, on rank 0 with its key: the model and the hardware. Collective."""
        strategies = self._request["strategies"] or strategies_of(self._info)
        measured: dict[str, dict[str, Any]] = {}
        for number in range(_ROUNDS):  # each strategy once in each, so that a slow minute is not one strategy's
            for name in strategies:
                before = measured.get(name, {})
                if "error" not in before:
                    measured[name] = faster(before, self._measure(name, number))
        result = {"strategies": measured, "steps": self._request["steps"], "warnings": []}
        if self._info.rank == 0:
            try:
                result |= run_plan(self._info, devices.select(self._info), self._command, identify=True)
            except RuntimeFailure as error:
                result["warnings"] = [f"the script cannot be planned: {error}"]
        return result

    def _measure(self, strategy: str, number: int) -> dict[str, Any]:
        """Measure one strategy; the result is the slowest rank's result."""
        request = {"strategy": strategy, "steps": self._request["steps"]}
        ended = self._cases.run(request, self._command, {user_env.STRATEGY: strategy})
        if ended.error:
            self._say("\n".join([f"{strategy}: {ended.error}", *(f"    {line}" for line in ended.output[-8:])]))
            return {"error": ended.error}
        ranks = self._cases.gather(f"result-{strategy}-{number}", ended.result)
        seconds = max(each["seconds"] for each in ranks)
        self._say(f"{strategy}: {seconds * 1e3:.4g} ms for a step")
        return {
            "seconds": seconds,
            "mfu": ended.result["mfu"],
            "memory": [each["memory"] for each in ranks],
        }

    def _say(self, text: str) -> None:
        if self._info.rank == 0:
            print(f"flk bench: {text}", file=sys.stderr, flush=True)


def faster(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The result of one strategy in both rounds: that of the faster one; an error, if there was one."""
    is_slower = before and "error" not in found and found["seconds"] > before["seconds"]
    return before if is_slower else found


def strategies_of(info: RankInfo) -> tuple[str, ...]:
    """The strategies that differ from each other on the nodes of this job."""
    if info.world_size == 1:
        return ("ddp",)
    has_two_levels = 1 < info.local_world_size < info.world_size == info.nodes * info.local_world_size
    return _FLAT + _HYBRID * has_two_levels


def main() -> int:
    """Run the benchmark on this rank and return its exit code. Collective."""
    try:
        info = discover()
        result = Benchmark(info, json.loads(sys.argv[1]), sys.argv[2:]).run()
        if info.rank == 0:
            print(log_format.BENCH_MARKER + json.dumps(result | {"time": time.time()}), flush=True)
    except RuntimeFailure as error:
        failure_report.send(failure_report.describe(error) | {"kind": "usage"})  # a restart would not help
        print(f"flk bench: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.USAGE)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
