"""Loaders that an Accelerator has prepared, and their places in checkpoints; options of `accelerate launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from flk_runtime.errors import MismatchError, SetupError
from tests.support.collection import skip_without

skip_without("accelerate")


def prepared(dispatches: bool) -> tuple[Any, Any]:
    """A loader, and what flk keeps of it. ``dispatches``: rank 0 reads the batches of all ranks."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from flk_hosts.accelerate import PreparedLoader

    configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(list(range(8)), 2))  # type: ignore[arg-type]
    return loader, PreparedLoader(loader)


@pytest.mark.parametrize("dispatches", [True, False])
def test_a_place_of_batches_that_other_ranks_have_read_is_refused_by_name(
    dispatches: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader, kept = prepared(dispatches)
    next(iter(loader))
    state = kept.state_dict()
    rest, same = prepared(dispatches)
    same.load_state_dict(state)
    left = [[2, 3], [4, 5], [6, 7]]
    assert [batch.tolist() for batch in rest] == ([[0, 1], *left] if dispatches else left)
    assert ("their place is in no checkpoint: epoch 0 begins anew" in capsys.readouterr().err) == dispatches
    with pytest.raises(MismatchError, match=f"saved with dispatch_batches={dispatches}, .* is {not dispatches} now"):
        prepared(not dispatches)[1].load_state_dict(state)


CONFIGURATION = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
machine_rank: 1
main_process_ip: 10.0.0.1
fsdp_config:
  fsdp_version: 2
  fsdp_transformer_layer_cls_to_wrap: Block
"""


def test_a_configuration_gives_the_variables_of_its_training_and_none_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/local compares all of them with those that accelerate launch sets, in the soak."""
    from accelerate.commands import launch

    from flk_hosts import accelerate_launch

    (tmp_path / "accelerate.yaml").write_text(CONFIGURATION)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")  # as flk has
    words = ["--config_file", str(tmp_path / "accelerate.yaml"), "train.py"]
    found = accelerate_launch.variables(launch.launch_command_parser().parse_args(words), {"WORLD_SIZE": "2"})
    training = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert found.items() >= {*training.items(), ("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")}
    assert "MASTER_ADDR" not in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tpu show.py", "--tpu cannot be used under flk, which starts the ranks itself: leave it out"),
        ("--num_processes two show.py", "accelerate launch refuses these arguments: argument --num_processes"),
    ],
)
def test_options_that_flk_or_accelerate_refuses_end_with_one_sentence(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from flk_hosts import accelerate_launch

    with pytest.raises(SetupError, match=message):
        accelerate_launch.main(words.split())
    assert "usage:" not in "".join(capsys.readouterr())
