"""A save in memory of a state on a GPU: what it needs there and on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import RESTARTED, Launch, restarts, said


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_a_save_needs_little_memory_of_the_gpu_and_pins_that_of_the_host(
    launch: Launch, tmp_path: Path, root: Path, strategy: str
) -> None:
    script = f"""
        import gc

        from flk_runtime.checkpoint.save.staging import StagedShard

        with flk.init(strategy={strategy!r}, save_every=0, log_every=0) as run:
            model = make()
            model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()), blocks="Block")
            model(torch.randn(8, WIDTH, device=run.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            used = []
            for _ in range(3):
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run.save(wait=True)
                used.append(torch.cuda.max_memory_allocated() - before)
            pinned = [each._pinned is not None for each in gc.get_objects() if isinstance(each, StagedShard)]
            run.log(used=used, pinned=pinned)
    """
    found = said(launch(RESTARTED, script, **restarts(tmp_path, memory=root)))
    assert max(found["used"]) < 4 * 1024 * 4096  # the largest tensor
    assert found["pinned"]
    assert all(found["pinned"])
