"""Show what takes the memory of one NVIDIA GPU in a step of gpu.py's models, to compare with what `flk plan` counts.

    python benchmarks/gpu_memory.py [--models gpt llama]

It prints for each model, under full_shard in bf16: bytes that torch's allocator has given out and has reserved, at
their peak, after the start, the forward pass, the backward pass and the optimizer's step; and the largest tensors that
are live at the peak of a step, by the line that made them. It compares nothing. --device cpu tries the program.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flk_runtime as flk
import launch
from flk_runtime.contract import user_env
from gpu_models import MODELS, tokens_of
from gpu_ranks import parallelized

WARM_UP = 3  # steps, after which the allocator gets no more memory from the device
SHOWN = 20  # rows of the tensors
HISTORY = 200_000  # events
OWN = ("gpu_models.py", "_fsdp_", "functional.py", "adamw.py", "optimizer.py")  # of the frames, those that tell most
GIB = 2**30


def watch(name: str, device: str | None) -> list[str]:
    """Train a model for some steps. Returns the lines that describe its memory."""
    with flk.init(device=device, log_every=0) as run:
        on_gpu = run.device.type == "cuda"
        lines: list[str] = []

        def note(what: str) -> None:
            if on_gpu:
                torch.cuda.synchronize()
                sizes = [
                    torch.cuda.memory_allocated(),
                    torch.cuda.max_memory_allocated(),
                    torch.cuda.memory_reserved(),
                    torch.cuda.max_memory_reserved(),
                ]
                torch.cuda.reset_peak_memory_stats()
            else:
                sizes = [0] * 4
            lines.append(f"{what:<18}" + "".join(f"{size / GIB:>12.3f}" for size in sizes))

        module, optimizer = parallelized(run, name, recompute=False)
        batch = tokens_of(name).to(run.device)
        note("start")
        before: Mapping[str, Any] = {}
        for number in range(1, WARM_UP + 2):
            if number == WARM_UP + 1 and on_gpu:
                before = torch.cuda.memory._snapshot()
                torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
            loss: torch.Tensor = module(batch)
            note(f"{number} forward")
            torch.autograd.backward(loss)
            note(f"{number} backward")
            optimizer.step()
            note(f"{number} optimizer")
            optimizer.zero_grad()
            run.step(loss=loss)
        if on_gpu:
            lines += peak_of(before, torch.cuda.memory._snapshot())
        header = "".join(f"{each:>12}" for each in ("allocated", "its peak", "reserved", "its peak"))
        return [f"{name}, GiB", f"{'':<18}{header}", *lines]


def peak_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Rows of the tensors that are live at the peak of what happened between two snapshots of torch's allocator."""
    live: dict[int, tuple[int, str]] = {}
    for segment in before["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                live[block["address"]] = block["size"], "before the step"
    total = most = sum(size for size, _ in live.values())
    at_most = dict(live)
    events = [event for trace in after["device_traces"] for event in trace]
    for event in events:
        address = event["addr"]
        if event["action"] == "alloc":
            live[address] = event["size"], where(event.get("frames", ()))
            total += event["size"]
            if total > most:
                most, at_most = total, {}
        elif event["action"] == "free_completed" and address in live:
            if total == most and not at_most:
                at_most = dict(live)
            total -= live.pop(address)[0]
    tensors = list((at_most or live).values())
    free = collections.Counter(
        (segment["stream"], block["size"] >> 20)
        for segment in after["segments"]
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] >= 64 << 20
    )
    yield f"live at the peak: {most / GIB:.3f} GiB in {len(tensors)} tensors"
    yield from rows(tensors)
    taken = [event["size"] for event in events if event["action"] == "segment_alloc"]
    yield f"segments that this step got from the device: {len(taken)}, {sum(taken) / GIB:.3f} GiB"
    reserved = collections.Counter[Any]()
    for segment in after["segments"]:
        reserved[segment["stream"]] += segment["total_size"]
    for stream, size in reserved.most_common():
        blocks = ", ".join(f"{number} x {mebi} MiB" for (of, mebi), number in sorted(free.items()) if of == stream)
        yield f"stream {stream}: {size / GIB:.3f} GiB reserved; free blocks after the step: {blocks or 'none'}"


def rows(tensors: Sequence[tuple[int, str]]) -> Iterator[str]:
    """The largest groups of tensors of the same size and line."""
    groups = collections.Counter(tensors)
    largest = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])
    for (size, line), number in largest[:SHOWN]:
        yield f"{size * number / GIB:>9.3f} GiB = {number:>4} x {size / 2**20:>9.2f} MiB  {line}"
    rest = sum(size * number for (size, _), number in largest[SHOWN:])
    yield f"{rest / GIB:>9.3f} GiB in {sum(number for _, number in largest[SHOWN:])} other tensors"


def where(frames: Sequence[Mapping[str, Any]]) -> str:
    """The line of a stack that tells most: of the model, of FSDP2 or of the optimizer, else the innermost one."""
    told = [frame for frame in frames if any(name in frame["filename"] for name in OWN)]
    if not (told or frames):
        return "in the backward pass, without a line"
    frame = (told or frames)[0]
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "llama"])
    parser.add_argument("--device", help="default: the GPU")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        launch.write_result(watch(arguments.models[0], arguments.device))
        return 0
    variables = {str(user_env.HANG_TIMEOUT): "0", str(user_env.STRATEGY): "full_shard"}
    for name in arguments.models:
        command = [__file__, "--rank", "--models", name, *(["--device", arguments.device] if arguments.device else [])]
        (lines,) = launch.run_ranks(command, 1, launch.flk, variables)
        print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
