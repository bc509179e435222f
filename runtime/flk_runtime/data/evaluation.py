"""EvaluationLoader: batches of this rank's share of a dataset, for an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flk_runtime.data.factory import make_loader
from flk_runtime.data.loader import LoaderContext
from flk_runtime.errors import SetupError
from flk_runtime.shared.progress import Phase, heartbeat, own_page


class EvaluationLoader:
    """Pairs of a batch of this rank and the number of its samples. Made by `Run.evaluation`.

    Each iteration is over the whole dataset, from its beginning. Each sample counts once over all ranks, and all ranks
    get equally many batches: a rank that has no sample left gets one that counts already, with the number 0. A mean
    ignores values of weight 0:

        losses, counts = [], []
        for (x, y), count in evaluation:
            losses.append(loss_of(model, x, y))
            counts.append(count)
        loss = run.mean(losses, weight=counts)
    """

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        """Raises SetupError as loaders do, and for options that choose samples."""
        of_torch = dict(context.options.of_torch)
        for name in ("shuffle", "drop_last", "sampler", "batch_sampler"):
            if of_torch.pop(name, False) is not False:
                raise SetupError(
                    f"{name}= cannot be passed: an evaluation takes every sample once, in the data's order"
                )
        options = dataclasses.replace(context.options, shuffle=False, of_torch=of_torch)
        self._loader = make_loader(dataset, dataclasses.replace(context, options=options, evaluates=True))

    def __len__(self) -> int:
        """The number of batches, which is the same on all ranks. Raises TypeError for an iterable."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        with own_page().during(Phase.EVALUATING):
            for batch in self._loader:
                heartbeat()
                yield batch, self._loader.latest.own
