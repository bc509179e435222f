"""What a Lightning Trainer keeps in flk's checkpoints of the model's state."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from tests.support.collection import skip_without

skip_without("lightning")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what Lightning says of the machine


def state_of(callback: Callable[[], Any] | None = None) -> Any:
    """The state that flk keeps of a Trainer, as `Flk` has it, with a model of one layer."""
    import lightning

    from flk_hosts.lightning import Flk

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback()] if callback else [],
    )
    trainer.strategy.connect(Model())
    state = Flk()._state
    state.trainer = trainer
    return state


def test_the_state_of_the_model_is_kept_only_if_a_callback_has_replaced_it() -> None:
    import lightning

    class Replaces(lightning.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["current"], checkpoint["state_dict"] = checkpoint["state_dict"], {"layer.bias": torch.ones(1)}

    replaced, plain = state_of(Replaces), state_of()
    assert set(replaced.state_dict()["state_dict"]) == {"layer.bias"}
    assert set(replaced.state_dict()["current"]) == {"layer.weight", "layer.bias"}
    plain.load_state_dict(plain.state_dict())
    assert "state_dict" not in plain.saved
    assert set(plain.with_weights()["state_dict"]) == {"layer.weight", "layer.bias"}


def test_what_a_callback_changes_in_the_state_of_the_model_is_kept() -> None:
    import lightning

    class Adds(lightning.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["extra"] = torch.ones(1)

    class Averages(lightning.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].update({"layer.bias": torch.full((1,), 7.0)})

    assert set(state_of(Adds).state_dict()["state_dict"]) == {"layer.weight", "layer.bias", "extra"}
    assert state_of(Averages).state_dict()["state_dict"]["layer.bias"].item() == 7


def test_a_ckpt_path_that_is_not_read_is_named() -> None:
    from flk_hosts.lightning import Flk

    flk, printed = Flk(), list[str]()
    flk._ours, flk._state.saved = True, {"global_step": 1000}
    flk._loop = SimpleNamespace(print=printed.append)  # type: ignore[assignment]
    connector = SimpleNamespace(_loaded_checkpoint={"global_step": 1900})
    flk._choose(connector)
    assert connector._loaded_checkpoint == {}
    assert printed == ["flk: ckpt_path, of step 1900, is ignored: flk has a checkpoint, of step 1000"]


def test_pruning_is_refused_by_name() -> None:
    from lightning.pytorch.callbacks import ModelPruning

    from flk_hosts.lightning import Flk

    trainer = state_of(lambda: ModelPruning("l1_unstructured")).trainer
    with pytest.raises(SetupError, match="Flk: ModelPruning gives the weights other names as it prunes"):
        Flk().setup(trainer, trainer.lightning_module, "fit")


def test_the_options_of_the_callback_are_named_for_command_lines_that_read_them() -> None:
    import inspect

    from flk_hosts.lightning import Flk
    from flk_runtime.training.entry.adopt import adopt

    options = inspect.signature(adopt).parameters
    assert set(inspect.signature(Flk).parameters) == {name for name, each in options.items() if each.kind.value == 3}
