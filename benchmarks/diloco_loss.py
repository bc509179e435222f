"""Compare the held-out losses of DiLoCo and DDP after the same number of tokens, in many rounds of a small GPT.

    python benchmarks/diloco_loss.py [--rounds 6] [--steps 2000] [--first 500]

One process plays all workers in turns, with flk's outer optimizer and its encoding, so that thousands of steps take
minutes. DDP makes each step with the workers' batches together. As in the paper (Douillard et al., arXiv 2311.08105),
both begin with the same steps of DDP, the inner optimizer is AdamW with warm-up and cosine decay, and the outer one is
Nesterov SGD with learning rate 0.7 and momentum 0.9. Each round of the benchmark has another seed. Goal: a loss at most
1 % higher, with rounds of 50 steps in fp16 and in int4.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import measure
from example import encode_text, load_example
from flk_diloco import DiLoCo
from flk_diloco.compression import ErrorFeedback, decode
from flk_diloco.outer import OuterOptimizer

WORKERS, BATCH, BLOCK = 4, 8, 64
CASES = (("fp16", 50), ("int4", 50))  # encoding, steps in a round
LR, WARMUP = 3e-3, 50


class Text:
    """Random pieces of the example's text for training, and the pieces that are held out."""

    def __init__(self, example: Any) -> None:
        numbers, self.vocabulary = encode_text(example.read_text())
        self._characters = torch.tensor(numbers)
        pieces = torch.arange((len(numbers) - 1) // BLOCK)
        self._training = pieces[pieces % example.HELD_OUT != 0]
        self._held_out = pieces[pieces % example.HELD_OUT == 0]

    def batch(self, pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = pieces[:, None] * BLOCK + torch.arange(BLOCK)
        return self._characters[positions], self._characters[positions + 1]

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """For each step, the numbers of WORKERS * BATCH pieces."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(self._training), (WORKERS * BATCH,), generator=generator)
            yield self._training[chosen]

    @torch.no_grad()
    def held_out_loss(self, example: Any, model: nn.Module) -> float:
        model.eval()
        losses = [float(example.loss_of(model, *self.batch(part))) for part in torch.split(self._held_out, 64)]
        model.train()
        return sum(losses) / len(losses)


class Worker:
    """A model with its inner optimizer."""

    def __init__(self, example: Any, model: nn.Module, steps: int) -> None:
        self.model, self._loss_of = model, example.loss_of
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self._done, self._steps = 0, steps

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * self._done / self._steps))
        self._optimizer.param_groups[0]["lr"] = LR * min(1.0, (self._done + 1) / WARMUP) * decay
        self._loss_of(self.model, x, y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1

    def vector(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()


def train(example: Any, text: Text, seed: int, first: int, steps: int, options: DiLoCo | None) -> float:
    """The held-out loss after ``steps`` steps, of which DDP makes the ``first`` (None: all)."""
    torch.manual_seed(seed)
    one = Worker(example, example.GPT(text.vocabulary, BLOCK, 2, 4, 64, 0.0), steps)
    batches = text.batches(seed)
    for _ in range(first if options else steps):
        one.step(*text.batch(next(batches)))
    if options:
        one = diloco(text, one, batches, steps - first, options)
    return text.held_out_loss(example, one.model)


def diloco(text: Text, start: Worker, batches: Iterator[torch.Tensor], steps: int, options: DiLoCo) -> Worker:
    """Train ``steps`` further steps as DiLoCo's workers. Returns one that has the agreed parameters."""
    workers = [copy.deepcopy(start) for _ in range(WORKERS)]
    outer = [OuterOptimizer(worker.vector(), options) for worker in workers]
    count = len(outer[0].parameters)
    hub = ErrorFeedback(options.dtype, count)
    for step in range(1, steps + 1):
        pieces = torch.split(next(batches), BATCH)
        for worker, own in zip(workers, pieces, strict=True):
            worker.step(*text.batch(own))
        if step % options.every == 0:
            sent = [mine.outer_gradient(worker.vector()) for mine, worker in zip(outer, workers, strict=True)]
            average = hub.encode(torch.stack([decode(data, options.dtype, count) for data in sent]).mean(0))
            for mine, worker in zip(outer, workers, strict=True):
                mine.apply(average)
                vector_to_parameters(mine.parameters.clone(), worker.model.parameters())
    return workers[0]


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of each run (default 2000)")
    parser.add_argument("--first", type=int, default=500, help="of these, steps of DDP at the beginning (default 500)")
    arguments = parser.parse_args()
    report = measure.Report("diloco_loss", arguments)
    example = load_example()
    text = Text(example)
    losses: dict[str, list[float]] = {}
    for seed in range(arguments.rounds):
        for name, options in (("ddp", None), *((n, DiLoCo(dtype=n, every=every)) for n, every in CASES)):
            loss = train(example, text, seed, arguments.first, arguments.steps, options)
            losses.setdefault(name, []).append(loss)
            measure.progress(f"seed {seed}: {name} {loss:.4f}")
    for name, every in CASES:
        what = f"held-out loss, DiLoCo in {name}, every {every} steps / DDP"
        report.compare(what, losses[name], losses["ddp"], measure.at_most(1.01), "nats")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
