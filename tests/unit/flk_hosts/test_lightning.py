"""What a Lightning Trainer keeps in flk's checkpoints in the place of the model's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.errors import MismatchError
from tests.support.collection import skip_without

skip_without("lightning")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what Lightning says of the machine


def state_of(callback: type[Any] | None = None) -> Any:
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


def test_a_tensor_in_the_memory_of_a_weight_that_a_callback_has_dropped_is_no_weight() -> None:
    import lightning

    class Replaces(lightning.Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]
            checkpoint["averages"] = [torch.ones(1) for _ in range(64)]

    averages = state_of(Replaces).state_dict()["averages"]
    assert all(isinstance(each, torch.Tensor) for each in averages), averages


def test_a_weight_that_the_model_has_no_more_is_refused_by_name() -> None:
    state = state_of()
    state.load_state_dict(state.state_dict())
    assert set(state.with_weights()["state_dict"]) == {"layer.weight", "layer.bias"}
    state.load_state_dict({"state_dict": {"old.weight": "flk.weight:old.weight"}})
    with pytest.raises(MismatchError, match=r"the tensor 'old\.weight' of the model, which has no such tensor now"):
        state.with_weights()


def test_the_options_of_the_callback_are_named_for_command_lines_that_read_them() -> None:
    import inspect

    from flk_hosts.lightning import Flk
    from flk_runtime.training.entry.adopt import adopt

    options = inspect.signature(adopt).parameters
    assert set(inspect.signature(Flk).parameters) == {name for name, each in options.items() if each.kind.value == 3}
