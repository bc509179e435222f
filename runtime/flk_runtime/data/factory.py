"""make_loader(): the loader for a dataset, map-style or iterable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from flk_runtime.data.iterable import IterableLoader
from flk_runtime.data.loader import EpochLoader, LoaderContext
from flk_runtime.data.map_style import Loader
from flk_runtime.errors import SetupError


def make_loader(
    dataset: Any, context: LoaderContext, *, shuffle: bool | None, split: bool, **options: Any
) -> EpochLoader:
    """The loader for this kind of dataset; ``options`` are those of `Loader` and `IterableLoader`.

    Raises SetupError for what is not a dataset, and for options that do not fit its kind.
    """
    if not _is_iterable_only(dataset):
        if not split:
            raise SetupError("split=False is for iterables: a dataset with length and index is split by the loader")
        return Loader(dataset, context, shuffle=shuffle is not False, **options)
    if shuffle:
        raise SetupError(
            f"shuffle=True: a {type(dataset).__name__} has its own order: shuffle the dataset itself (Hugging Face: "
            ".shuffle(seed, buffer_size))"
        )
    return IterableLoader(dataset, context, split=split, **options)


def _is_iterable_only(dataset: Any) -> bool:
    """Whether ``dataset`` has no length and index. Raises SetupError for a dictionary of datasets."""
    if isinstance(dataset, Mapping):
        entries = ", ".join(map(repr, list(dataset)[:3]))
        raise SetupError(f"a {type(dataset).__name__} is not a dataset: pass one of its entries ({entries})")
    if isinstance(dataset, IterableDataset):  # has a __getitem__ that always fails
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))
