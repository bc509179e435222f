"""Measure the time from the SIGKILL of a rank to the next step that all ranks have finished.

    python benchmarks/recovery.py [--rounds 8] [--ranks 4]

The same script runs under flk's launcher, under torchrun, and under ft_launcher of nvidia-resiliency-ext 0.4.1 and
0.7.0, which are installed into the user's cache folder if that is possible. There is one launcher with all ranks, and
then there are two launchers with half of the ranks each. torchrun and ft_launcher run with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which the restarts of torch 2.13 do not recover. Goal: at most a tenth of
the time of each of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import launch
import measure

T = TypeVar("T")

GOAL = measure.at_most(0.1)
STEPS_BEFORE = 20  # steps of the first attempt, so that everything is warm when the rank is killed
LIMIT = 120.0  # seconds for an attempt to come so far

# Each process writes the time of each of its steps into a file of its own. The second attempt ends by itself.
SCRIPT = textwrap.dedent(
    f"""
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    second = os.path.exists("killed")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    with open(f"{{'second' if second else 'first'}}.{{os.getpid()}}", "w", buffering=1) as steps:
        for step in range({STEPS_BEFORE} if second else 100_000):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(time.time(), file=steps)
    dist.destroy_process_group()
    """
)


class NoRecoveryError(Exception):
    """The ranks have not made a step in time."""


def seconds_to_recover(launcher: launch.Launcher, ranks: int, launchers: int, script: str = SCRIPT) -> float:
    """Seconds from the kill of a rank to the first step that all ranks have finished afterwards.

    ``script`` writes the times of its steps as SCRIPT does. Raises NoRecoveryError if that takes more than LIMIT
    seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script)
        jobs = [
            process.start(folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for process in launcher(["train.py"], ranks, launchers, 1)
        ]
        try:
            first = until(lambda: steps(folder, "first", ranks, STEPS_BEFORE))
            (folder / "killed").touch()
            killed = time.time()
            os.kill(max(first), signal.SIGKILL)
            second = until(lambda: steps(folder, "second", ranks, 1))
            if launcher is launch.flk:  # torchrun sometimes ends with 1 although all its ranks have ended well
                codes = [job.wait(LIMIT) for job in jobs]
                if any(codes):
                    raise SystemExit(f"flk ended with {codes}")
            return max(times[0] for times in second.values()) - killed
        finally:
            end(jobs, folder)


def steps(folder: Path, attempt: str, ranks: int, least: int) -> dict[int, list[float]] | None:
    """The times of the steps of an attempt by process, or None until all ranks have made ``least`` steps."""
    found: dict[int, list[float]] = {}
    for file in folder.glob(f"{attempt}.*"):
        lines = file.read_text().split("\n")[:-1]  # the text after the last line break is not a complete line yet
        if len(lines) >= least:
            found[int(file.suffix[1:])] = [float(line) for line in lines]
    return found if len(found) >= ranks else None


def until(check: Callable[[], T | None]) -> T:
    """The first value of ``check`` that is not None. Raises NoRecoveryError after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = check()
        if found is not None:
            return found
        time.sleep(0.005)
    raise NoRecoveryError


def end(jobs: list[subprocess.Popen[Any]], folder: Path) -> None:
    """End the launchers and their ranks, if they still run."""
    for job in jobs:
        job.terminate()
    for job in jobs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(10)
        job.kill()
        job.wait()
    for file in [*folder.glob("first.*"), *folder.glob("second.*")]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.suffix[1:]), signal.SIGKILL)


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    report = measure.Report("recovery", arguments)
    peers: dict[str, launch.Launcher] = {"torchrun": launch.torchrun}
    peers |= {name: launcher for name, launcher in launch.FT_LAUNCHERS.items() if launcher.folder()}
    everyone = {"flk": launch.flk, **peers}
    for launchers in (1, 2):
        measure.progress(f"{arguments.ranks} ranks, {launchers} launchers")
        what = f"recovery of {arguments.ranks} ranks, {launchers} launcher{'s' * (launchers - 1)}"
        cases = {
            name: partial(seconds_to_recover, launcher, arguments.ranks, launchers)
            for name, launcher in everyone.items()
        }
        compare(report, what, cases, arguments.rounds, GOAL)
    return report.finish()


def compare(
    report: measure.Report, what: str, cases: Mapping[str, Callable[[], float]], rounds: int, goal: measure.Goal
) -> list[float]:
    """Measure the recovery of flk, the first case, and of its peers, and report the ratios. Returns flk's times.

    Rounds in which a peer did not recover are left out, and told.
    """
    times = measure.alternate(
        {name: partial(_unless_lost, case) for name, case in cases.items()},
        rounds,
        show=lambda seconds: "-" if seconds is None else f"{seconds:.2f} s",
    )
    ours = [seconds for seconds in times.pop("flk") if seconds is not None]
    if len(ours) < rounds:
        raise SystemExit(f"flk did not recover in {LIMIT:.0f} s")
    for peer, theirs in times.items():
        pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if other is not None]
        if len(pairs) < rounds:
            print(f"{what}: {peer} did not recover in {LIMIT:.0f} s in {rounds - len(pairs)} of {rounds} rounds")
        if pairs:
            report.compare(
                f"{what}, flk / {peer}", [mine for mine, _ in pairs], [other for _, other in pairs], goal, "s"
            )
    return ours


def _unless_lost(case: Callable[[], float]) -> float | None:
    try:
        return case()
    except NoRecoveryError:
        return None


if __name__ == "__main__":
    sys.exit(main())
