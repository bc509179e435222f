"""Train the bundled GPT with torchft's DiLoCo, as one of several workers of one process each. For slow_link.py.

    python benchmarks/torchft_gpt.py WORKER WORKERS ADDRESS LIGHTHOUSE EVERY [arguments of the example]

ADDRESS is this worker's address, and LIGHTHOUSE the address of worker 0, which coordinates. Model, data, inner and
outer optimizer are the same as in the example under flk. Worker 0 prints the held-out loss in the form of flk's metric
lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from example import encode_text, load_example

PORT = 29510  # port of the lighthouse; the worker's store has the next one
LIMIT = timedelta(seconds=600)


def batches(data: Any, size: int, worker: int, workers: int) -> Iterator[list[torch.Tensor]]:
    """Batches of this worker's share of the pieces, in a new order in each epoch."""
    generator = torch.Generator().manual_seed(0)
    while True:
        own = torch.randperm(len(data), generator=generator)[worker::workers].tolist()
        for begin in range(0, len(own) - size + 1, size):
            pieces = [data[number] for number in own[begin : begin + size]]
            yield [torch.stack(tensors) for tensors in zip(*pieces, strict=True)]


def process_mean(losses: list[torch.Tensor], weight: list[int]) -> float:
    """The weighted mean of ``losses``, as `Run.mean` in one process."""
    weights = torch.tensor(weight, dtype=torch.float64)
    return float((torch.stack(losses).double() * weights).sum() / weights.sum())


def main() -> None:
    worker, workers, every = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
    address, first = sys.argv[3:5]
    sys.argv[1:] = sys.argv[6:]
    example = load_example()
    args = example.options()
    torch.manual_seed(0)
    lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=workers) if worker == 0 else None
    store = TCPStore(address, PORT + 1, is_master=True, wait_for_workers=False)
    numbers, vocabulary = encode_text(example.read_text())
    characters = torch.tensor(numbers)
    pieces = range((len(numbers) - 1) // args.block)
    training = example.Pieces(characters, args.block, [n for n in pieces if n % example.HELD_OUT])
    held_out = example.Pieces(characters, args.block, [n for n in pieces if n % example.HELD_OUT == 0])
    model = example.GPT(vocabulary, args.block, args.layers, args.heads, args.width, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    evaluation = [(batch, len(batch[0])) for batch in torch.utils.data.DataLoader(held_out, batch_size=64)]
    alone = SimpleNamespace(mean=process_mean)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=workers,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=PORT + 1,
        lighthouse_addr=f"http://{first}:{PORT}",
        replica_id=f"worker{worker}",
        hostname=address,
        init_sync=False,
    )

    def report(step: int) -> None:
        loss = example.held_out_loss(model, evaluation, alone)
        if worker == 0:
            print(f"[rank 0] {json.dumps({'step': step, 'heldout_loss': loss})}", flush=True)

    report(0)
    stream = batches(training, args.batch_size, worker, workers)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=every, use_bucketization=True):
        for step in range(1, args.steps + 1):
            loss = example.loss_of(model, *next(stream))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.evaluate_every and step % args.evaluate_every == 0 and step < args.steps:
                report(step)
    report(args.steps)
    manager.shutdown(wait=False)
    del store, lighthouse


if __name__ == "__main__":
    main()
