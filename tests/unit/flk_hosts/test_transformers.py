"""What flk says of a Transformers Trainer's own checkpoints, and of one that it cannot resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.errors import SetupError
from tests.support.collection import skip_without

skip_without("transformers")


def trainer_of(folder: Path, batch: int = 8) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder)),
        state=SimpleNamespace(global_step=0),
        get_total_train_batch_size=lambda args: batch,
        add_callback=lambda callback: None,
    )


@pytest.mark.parametrize("asked", [True, "checkpoint-1900"])
def test_a_checkpoint_of_the_trainer_that_is_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    from flk_hosts import transformers

    (tmp_path / "checkpoint-1900").mkdir()
    printed: list[str] = []
    loop = SimpleNamespace(steps=1000, print=printed.append)
    monkeypatch.setattr(transformers, "adopt_training", lambda **options: loop)
    host = transformers._Host(trainer_of(tmp_path), {})
    host._counters.saved = {"state": "{}"}
    host.train(lambda **named: None)(resume_from_checkpoint=asked)
    assert len(printed) == 1
    assert printed[0].endswith("checkpoint-1900 is ignored: flk has a checkpoint, of step 1000")


def test_a_resume_with_more_ranks_is_refused_by_what_must_be_the_same(tmp_path: Path) -> None:
    from flk_hosts.transformers import _Host

    host = _Host(trainer_of(tmp_path, batch=16), {})
    host._loop, host._counters.saved = SimpleNamespace(steps=3), {"batch": 8}  # type: ignore[assignment]
    with pytest.raises(SetupError) as caught:
        host.begin()
    text = str(caught.value)
    assert "the same number of ranks, per_device_train_batch_size and gradient_accumulation_steps" in text
