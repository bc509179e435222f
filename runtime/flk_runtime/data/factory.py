"""make_loader(): the loader for a dataset, map-style or iterable."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from flk_runtime.data.iterable import IterableLoader
from flk_runtime.data.loader import EpochLoader, LoaderContext
from flk_runtime.data.map_style import Loader
from flk_runtime.data.reader import set_epoch
from flk_runtime.errors import SetupError


def make_loader(dataset: Any, context: LoaderContext) -> EpochLoader:
    """The loader for this kind of dataset.

    Raises SetupError for an object that is not a dataset, and for options that do not fit its kind.
    """
    if isinstance(dataset, DataLoader):
        raise SetupError("a DataLoader is not a dataset: pass its dataset, and its options to the loader")
    if not is_stream(dataset):
        return Loader(dataset, context)
    if context.options.shuffle:
        raise SetupError(
            f"shuffle=True: a {type(dataset).__name__} has its own order: shuffle the dataset itself (Hugging Face: "
            ".shuffle(seed, buffer_size))"
        )
    return IterableLoader(dataset, context)


def share_of_worker(dataset: Any, worker: int, workers: int) -> Any:
    """Every ``workers``-th sample of ``dataset``, from the one with index ``worker`` on.

    For workers that train without a common process group, each with a loader of its own.
    """
    if not is_stream(dataset):
        return Subset(dataset, range(worker, len(dataset), workers))
    return _EveryNth(dataset, worker, workers)


class _EveryNth(IterableDataset[Any]):
    def __init__(self, dataset: Any, first: int, distance: int) -> None:
        self._dataset, self._first, self._distance = dataset, first, distance

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._first, None, self._distance)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self._dataset, epoch)


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` has no length and index. Raises SetupError for a dictionary of datasets."""
    if isinstance(dataset, Mapping):
        raise SetupError(
            f"a {type(dataset).__name__} is not a dataset: pass one of its entries "
            f"({', '.join(map(repr, list(dataset)[:3]))})"
        )
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_index and not hasattr(dataset, "__iter__"):
        raise SetupError(f"{type(dataset).__name__} has no length and index: a loader needs a dataset or an iterable")
    return isinstance(dataset, IterableDataset) or not has_index  # that has a __getitem__ which always fails
