"""The contexts of loaders that belong to no run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from flk_runtime.data import EpochLoader, LoaderContext, LoaderEvents, LoaderOptions, StepShare

_OPTIONS = {field.name for field in fields(LoaderOptions)}


class Shares(LoaderEvents):
    """Keeps the shares of all batches that a loader gives."""

    def __init__(self) -> None:
        self.found: list[StepShare] = []

    def give(self, loader: EpochLoader, share: StepShare) -> None:
        self.found.append(share)


class Counted(LoaderEvents):
    """A run that counts its optimizer steps, and keeps what loaders tell it."""

    counts_steps = True

    def __init__(self) -> None:
        self.done = 0
        self.ended: list[int] = []  # the steps at each end of a loop
        self.drawn: list[int] = []  # the steps before each batch
        self.went_on: list[bool] = []  # whether each is the next one of the training
        self.gone_on: list[str] = []

    def steps_done(self) -> int:
        return self.done

    def draw(self, loader: EpochLoader, *, goes_on: bool) -> None:
        self.drawn.append(self.done)
        self.went_on.append(goes_on)

    def go_on(self, loader: EpochLoader) -> None:
        self.gone_on.append(loader.name)

    def end(self) -> None:
        self.ended.append(self.done)


def loader_context(
    batch_size: int | None,
    rank: int = 0,
    world_size: int = 1,
    *,
    events: LoaderEvents | None = None,
    full_world_size: int = 0,
    seed: int = 0,
    **options: Any,
) -> LoaderContext:
    """The context of a loader on the CPU; ``options`` are LoaderOptions and options of torch's DataLoader."""
    own = {name: options.pop(name) for name in _OPTIONS & options.keys()}
    return LoaderContext(
        LoaderOptions(batch_size, **{"of_torch": options, **own}),
        rank,
        world_size,
        torch.device("cpu"),
        seed,
        events=events or LoaderEvents(),
        full_world_size=full_world_size,
    )
