"""What TensorBoard's files have where a run is resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_sinks.sink import Row, RunInfo
from flk_sinks.tensorboard import TensorBoard


@pytest.mark.parametrize("began", [1000.4, 990.0], ids=["in the same second", "a clock that is behind"])
def test_an_attempt_is_read_after_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: float
) -> None:
    """Readers take files by their names, which have the time, and the number of the process as text."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, at, process in ((0, 1000.0, 99), (1, began, 105)):
        monkeypatch.setattr("flk_sinks.tensorboard.time", SimpleNamespace(time=lambda at=at: at))
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        sink = TensorBoard(RunInfo("run", "run", "run", resumed=resumed), str(tmp_path))
        sink.open()
        sink.write([Row(step, at, {"loss": float(process)}) for step in range(resumed + 1, 4)])
        sink.close("stopped")
    points = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("loss")
    assert [(point.step, point.value) for point in points] == [(1, 99.0), (2, 105.0), (3, 105.0)]
