"""Measure flk on one NVIDIA GPU: rates, the plan's predictions, saves in memory, recovery and start.

    python benchmarks/gpu.py [--rounds 6] [--parts rates plan saves large recovery]

A GPT-2 with 124 million parameters and a Llama with 1.4 billion train in bf16 with fused AdamW, on one rank. Parts:

- rates: steps per second with flk.init, parallelize, loader and step, and by hand with torch in the same process, under
  ddp and full_shard, plain and with compiled blocks. Goal: at least 0.98.
- plan: memory and tokens per second that `flk plan` predicts, and measured. Goals: within a factor of 1.1 for memory,
  as torch's allocator has reserved it, and of 1.25 for tokens per second. No constant was chosen by these figures.
- saves: how long a save in memory of the small model's state, 1.5 GB, stops the training. Goals: at most 0.1 of
  torch.save to the same tmpfs, at most the time of torch's async_save with pinned memory, at most 1.3 times that of a
  plain copy of as many bytes to pinned memory. Steps per second with saves, against none: at least 0.9 every 10 steps
  and 0.5 in every step; against a plain copy in every step: at least 0.9.
- large: the same stops for the state of the large model, 16 GB, in few rounds.
- recovery: from the SIGKILL of the rank to its next step with the state restored from memory, and from the launch to
  the first step, against torchrun with a torch.save in tmpfs. Goals: at most 0.5, and at most 0.7.

It needs torch 2.9. Each part prints a table for benchmarks/results.md when it has ended. --tiny tries everything with
small models; with --device cpu it needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import launch
import measure
import run_all
from flk_runtime.contract import pod_env, user_env
from flk_runtime.system import mfu
from gpu_models import MODELS, make
from recovery import NoRecoveryError, until

RANKS = Path(__file__).with_name("gpu_ranks.py")
LARGE_ROUNDS, LARGE_NEEDS = 2, 3.3  # bytes in memory for a byte of the state: two files of flk's, one by hand
SHORTER = 5  # times fewer steps in a round of the large model
SAVE_AT, STEPS = 3, 6  # of an attempt: the step after which it saves, and the one after which the rank is killed
KILLS = 3  # of the rank, in one job

# Each attempt makes steps until it is killed; the last one ends by itself. It writes its number, the step and the time
# of each step into a file.
BEGIN = """
    import os, sys, time
    import torch, torch.distributed as dist
    from gpu_models import make, tokens_of

    name, device, kills = sys.argv[1], torch.device(sys.argv[2]), int(sys.argv[3])
    log = open("steps", "a", buffering=1)

    def train(loss_of, optimizer, attempt, first, save):
        batch = tokens_of(name).to(device)
        for number in range(1, 1_000_000 if attempt < kills else %(steps)d + 1):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(attempt, first + number, os.getpid(), time.time(), file=log)
            save(number, first + number)
"""
WITH_FLK = """
    import flk_runtime as flk

    with flk.init(strategy="ddp", device=device, log_every=0, save_every=0) as run:
        with device:
            model = make(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = run.parallelize(model, optimizer)

        def save(number, step):
            run.step()
            if number == %(save_at)d:
                run.save(wait=True)

        train(model, optimizer, run.attempt, run.steps, save)
"""
BY_HAND = """
    from torch.nn.parallel import DistributedDataParallel

    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with device:
        model = make(name)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    first, file = 0, os.path.join(sys.argv[4], "state.pt")
    if os.path.exists(file):
        content = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        first = content["step"]

    def save(number, step):
        if number == %(save_at)d:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(content, file + ".new")
            os.replace(file + ".new", file)

    train(ddp, optimizer, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), first, save)
    dist.destroy_process_group()
"""
SCRIPTS = {"flk": (launch.flk, WITH_FLK), "torchrun": (launch.torchrun, BY_HAND)}


class Benchmark:
    """The parts of this benchmark, and what all of them need."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rounds: int = arguments.rounds
        self.tmpfs: Path = arguments.tmpfs
        self.device: str | None = arguments.device
        self.small, self.large = ("tiny-gpt", "tiny-llama") if arguments.tiny else ("gpt", "llama")
        self.steps: int = arguments.steps
        self.report = measure.Report("gpu", arguments)
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.seen: dict[str, Any] = {}

    def run(self, part: str) -> None:
        """Measure a part, and print its table."""
        began, done = time.monotonic(), len(self.report.results)
        parts: dict[str, Callable[[], None]] = {
            "rates": self.compare_rates,
            "plan": self.compare_plans,
            "saves": lambda: self.compare_saves(self.small, self.rounds, with_rates=True),
            "large": lambda: self.compare_saves(self.large, min(self.rounds, LARGE_ROUNDS), with_rates=False),
            "recovery": self.compare_recoveries,
        }
        try:
            parts[part]()
        except (SystemExit, NoRecoveryError) as error:  # the other parts may work
            self.failed.append(part)
            self.notes.append(f"{part} failed: {error or type(error).__name__}")
        device = f"{self.seen.get('device', 'unknown device')}, {self.seen.get('backend', '')}"
        found = self.report.results[done:]
        if found:
            print(f"\n### {part}\n\n{run_all.table(f'{device}, {measure.environment()}', found)}\n", flush=True)
        for note in self.notes:
            print(f"- {note}", flush=True)
        self.notes.clear()
        measure.progress(f"{part} took {time.monotonic() - began:.0f} s")

    def ranks(self, what: str, *options: str, **variables: str) -> list[Any]:
        """What the rank of gpu_ranks.py has measured, under flk's launcher."""
        variables[str(user_env.HANG_TIMEOUT)] = "0"  # what is measured by hand is no progress to flk
        found = launch.run_ranks([str(RANKS), what, *self.on_device(), *options], 1, launch.flk, variables)
        self.seen = found[-1]
        return found

    def on_device(self) -> list[str]:
        return ["--device", self.device] if self.device else []

    # Steps per second

    def compare_rates(self) -> None:
        options = ["--model", self.small, "--rounds", str(self.rounds), "--steps", str(self.steps)]
        for found in self.ranks("rates", *options):
            if "error" in found:
                self.notes.append(f"{found['case']} was not measured: {found['error']}")
                continue
            what = f"rate of {found['case']}, {self.small}, flk / torch by hand"
            self.report.compare(what, found["flk"], found["by hand"], measure.at_least(0.98), "steps/s")
            peak = mfu.peak(found["device"], torch.bfloat16)
            if peak:
                shares = [statistics.median(found[side]) * found["flops"] / peak for side in ("flk", "by hand")]
                self.notes.append(f"MFU of {found['case']}: {shares[0]:.1%} with flk, {shares[1]:.1%} by hand")

    # The plan

    def compare_plans(self) -> None:
        """Measure, and then predict, which uses the CPU."""
        cases = {
            (self.small, False): self.train(self.small),
            (self.large, False): self.train(self.large),
            (self.large, True): self.train(self.large, recompute=True),
        }
        for (name, recompute), found in cases.items():
            shape = MODELS[name]
            title = f"{name}{', recomputed' if recompute else ''}, full_shard"
            rows = self.plan(name, recompute=recompute)["rows"]
            row = next(row for row in rows if row["strategy"] == "full_shard")
            tokens = shape.batch * shape.length
            rates = [each * tokens for each in found["rates"]]
            prediction = [tokens / row["step_seconds"]] * len(rates)
            self.report.compare(
                f"tokens per second, {title}, predicted / measured",
                prediction,
                rates,
                measure.within_factor(1.25),
                "tokens/s",
            )
            gib = row["total"] / 2**30, found["peak"] / 2**30
            self.report.compute(f"memory, {title}, predicted / measured", *gib, measure.within_factor(1.1), "GiB")

    def train(self, name: str, *, recompute: bool = False) -> dict[str, Any]:
        steps = self.steps if name == self.small else max(1, self.steps // SHORTER)
        options = ["--model", name, "--rounds", str(self.rounds), "--steps", str(steps)]
        options += ["--recompute"] * recompute
        variables = {str(user_env.STRATEGY): "full_shard"}
        found: dict[str, Any] = self.ranks("train", *options, **variables)[0]
        return found

    def plan(self, name: str, *, recompute: bool) -> dict[str, Any]:
        """What `flk plan` says of the script for the GPU that was seen."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            request = {"nodes": 1, "ranks": 1, "fabric": "auto", "output": str(file)}
            request |= {"device": self.seen["device"], "memory": self.seen["memory"]}
            command = [sys.executable, "-m", "flk_plan", json.dumps(request), str(RANKS), "train"]
            command += ["--model", name, *["--recompute"] * recompute]
            subprocess.run(command, env=os.environ | launch.THREADS, stdout=subprocess.DEVNULL)
            found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"error": "the plan failed"}
        if "error" in found:
            raise SystemExit(found["error"])
        return found

    # Saves in memory

    def compare_saves(self, name: str, rounds: int, *, with_rates: bool) -> None:
        needed = LARGE_NEEDS * state_bytes(name)
        free = shutil.disk_usage(self.tmpfs).free
        if free < needed:
            self.notes.append(
                f"the saves of {name} were not measured: {needed / 1e9:.0f} GB of {self.tmpfs} are needed, and "
                f"{free / 1e9:.0f} GB are free"
            )
            return
        options = ["--model", name, "--rounds", str(rounds), "--folder", str(self.tmpfs), *["--rates"] * with_rates]
        with tempfile.TemporaryDirectory(dir=self.tmpfs) as memory:
            variables = {str(pod_env.MEMORY_ROOT): memory, str(user_env.MEMORY_LIMIT): str(int(needed))}
            (found,) = self.ranks("saves", *options, **variables)
        stops, rates = found["stops"], found["rates"]
        state = f"state of {found['size'] / 1e9:.2g} GB"
        peers = {"torch.save": 0.1, "async_save": 1.0, "copy": 1.3}
        for peer, error in found["errors"].items():
            self.notes.append(f"{peer} was not measured: {error}")
        for peer, goal in peers.items():
            if peer not in stops:
                continue
            what = f"stop of a save, {state}, flk / {peer}"
            self.report.compare(what, stops["flk"], stops[peer], measure.at_most(goal), "s")
        if rates:
            for mine, peer, goal in (
                ("every 10 steps", "never", 0.9),
                ("in every step", "never", 0.5),
                ("in every step", "copy", 0.9),
            ):
                what = f"rate of {name} saved in memory {mine} / {'a plain copy' if peer == 'copy' else peer}"
                self.report.compare(what, rates[mine], rates[peer], measure.at_least(goal), "steps/s")

    # Recovery and start

    def compare_recoveries(self) -> None:
        jobs = measure.alternate(
            {side: lambda side=side: self.recover(side) for side in SCRIPTS},  # type: ignore[misc]
            -(-self.rounds // KILLS),
            show=lambda times: ", ".join(f"{each:.2f} s" for each in times),
        )
        starts = {side: [times[0] for times in found] for side, found in jobs.items()}
        recoveries = {side: [each for times in found for each in times[1:]] for side, found in jobs.items()}
        what = f"recovery of {self.small} from SIGKILL to the next step, state in memory, flk / torchrun"
        self.report.compare(what, recoveries["flk"], recoveries["torchrun"], measure.at_most(0.5), "s")
        what = f"launch to first step of {self.small}, flk / torchrun"
        self.report.compare(what, starts["flk"], starts["torchrun"], measure.at_most(0.7), "s")

    def recover(self, side: str) -> list[float]:
        """Run a job whose rank is killed KILLS times. Returns the seconds of its start, and of each recovery."""
        launcher, script = SCRIPTS[side]
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=self.tmpfs) as memory:
            folder = Path(name)
            code = textwrap.dedent(BEGIN) + textwrap.dedent(script)
            (folder / "train.py").write_text(code % {"steps": STEPS, "save_at": SAVE_AT})
            command = ["train.py", self.small, self.device or "cuda:0", str(KILLS), memory]
            (process,) = launcher(command, 1, 1, KILLS)
            path = os.pathsep.join(filter(None, (str(RANKS.parent), os.environ.get("PYTHONPATH"))))
            variables = {**process.variables, str(pod_env.MEMORY_ROOT): memory, "PYTHONPATH": path}
            began = time.time()
            with (folder / "output").open("wb") as output:
                job = launch.Process(process.command, variables).start(
                    folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            try:
                seconds = [lines_of(folder, 0, 1)[0].time - began]
                for attempt in range(KILLS):
                    last = lines_of(folder, attempt, STEPS)[-1]
                    killed = time.time()
                    os.kill(last.process, signal.SIGKILL)
                    first = lines_of(folder, attempt + 1, 1)[0]
                    if first.step != (attempt + 1) * SAVE_AT + 1:
                        raise SystemExit(f"{side} went on with step {first.step} after {attempt + 1} kills")
                    seconds.append(first.time - killed)
                job.wait(120)
                return seconds
            except BaseException:
                measure.progress((folder / "output").read_text(errors="replace")[-3000:])
                raise
            finally:
                job.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)


class Line:
    """A step of a job: the attempt that made it, its number, its process and its time."""

    def __init__(self, text: str) -> None:
        attempt, step, process, when = text.split()
        self.attempt, self.step, self.process, self.time = int(attempt), int(step), int(process), float(when)


def lines_of(folder: Path, attempt: int, least: int) -> list[Line]:
    """The steps of an attempt, when it has made so many. Raises NoRecoveryError if that takes too long."""
    file = folder / "steps"

    def found() -> list[Line] | None:
        if not file.exists():
            return None
        lines = [Line(text) for text in file.read_text().split("\n")[:-1]]
        mine = [line for line in lines if line.attempt == attempt]
        return mine if len(mine) >= least else None

    return until(found)


def state_bytes(name: str) -> int:
    """Bytes of a model's parameters and AdamW's averages."""
    with torch.device("meta"):
        return 12 * sum(each.numel() for each in make(name).parameters())


def main() -> int:
    names = ("rates", "plan", "saves", "large", "recovery")
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round of the rates (default 10)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="folder in memory (default /dev/shm)")
    parser.add_argument("--device", help="cpu tries the benchmark without a GPU")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the benchmark")
    arguments = parser.parse_args()
    if not arguments.device and not torch.cuda.is_available():
        measure.skip(f"torch {torch.__version__} finds no CUDA device here")
    benchmark = Benchmark(arguments)
    for part in arguments.parts:
        benchmark.run(part)
    code = benchmark.report.finish()
    if benchmark.failed:
        measure.progress(f"failed: {', '.join(benchmark.failed)}")
    return int(bool(code or benchmark.failed))


if __name__ == "__main__":
    sys.exit(main())
