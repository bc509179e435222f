"""State on a GPU: an attempt that restores it computes the same bits as the one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import RESTARTED, Launch, record_in, restarts, said, seen

# Attempt 0 is undisturbed until after step 5. Attempt 1 begins after step 3 and makes steps 4 and 5 again. The batches
# are drawn on the GPU too.
TRAIN = """
    KINDS = {
        "fused": (lambda each: torch.optim.AdamW(each, fused=True), {}),
        "foreach": (lambda each: torch.optim.AdamW(each, foreach=True), {}),
        "capturable": (lambda each: torch.optim.AdamW(each, capturable=True), {}),
        "recomputed": (torch.optim.AdamW, {"recompute": True}),
        "half": (torch.optim.AdamW, {"precision": BF16}),
    }

    def train(strategy):
        sharded = strategy == "full_shard"
        kinds = {name: kind for name, kind in KINDS.items() if sharded or "precision" not in kind[1]}
        with flk.init(strategy=strategy, save_every=0, log_every=0) as run:
            trained = {}
            for name, (make_optimizer, options) in kinds.items():
                model = noisy()
                trained[name] = run.parallelize(model, make_optimizer(model.parameters()), **options)
            begun = run.steps
            while run.steps < 5:
                losses = {}
                for name, (model, optimizer) in trained.items():
                    loss = loss_of(model, torch.randn(64, 256, device=run.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses[name] = loss.item()
                run.step()
                for name, pair in trained.items():
                    note(f"{run.steps} {name}", [losses[name], *digest(*pair)])
                if run.steps == 3 and ATTEMPT == 0:
                    run.save(wait=True)
            if ATTEMPT == 0:
                kill()
            run.log(begun=begun, kinds=list(kinds))
"""


@pytest.mark.parametrize("place", ["memory", "storage"])
@pytest.mark.parametrize("strategy", ["none", "ddp", "full_shard"])
def test_a_killed_rank_goes_on_with_the_same_bits(
    launch: Launch, tmp_path: Path, root: Path, strategy: str, place: str
) -> None:
    where = {"memory": root} if place == "memory" else {"checkpoint": tmp_path / "checkpoint"}
    found = said(launch(RESTARTED, TRAIN, f"train({strategy!r})\n", **restarts(tmp_path, **where)))
    assert found["begun"] == 3
    assert record_in(tmp_path).attempts[-1].restored_from == place
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    for name in found["kinds"]:
        for step in (4, 5):
            assert second[f"{step} {name}"] == first[f"{step} {name}"], (name, step)
        assert first[f"4 {name}"][0] != first[f"5 {name}"][0], name
    assert any("step torch.float32 cuda" in each for each in first["5 fused"][2]), first["5 fused"]
    assert any("step torch.float32 cuda" in each for each in first["5 capturable"][2]), first["5 capturable"]


@pytest.mark.parametrize("strategy", ["none", "ddp", "full_shard"])
def test_a_save_has_what_another_stream_still_computes(
    launch: Launch, tmp_path: Path, root: Path, strategy: str
) -> None:
    """All steps run on one stream, so the training itself needs no event; `run.save` is called outside of it."""
    script = f"""
        side = torch.cuda.Stream()
        with flk.init(strategy={strategy!r}, save_every=0, log_every=0) as run:
            model = noisy()
            model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), fused=True))
            if not run.steps:
                side.wait_stream(torch.cuda.current_stream())
                for step in range(3):
                    with torch.cuda.stream(side):
                        x = torch.randn(64, 256, device=run.device)
                        torch.cuda._sleep(1 << 29)  # a third of a second
                        loss = loss_of(model, x)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    run.step()
                run.save(wait=True)
                torch.cuda.synchronize()
                note("state", digest(model, optimizer))
                kill()
            note("state", digest(model, optimizer))
            run.log(begun=run.steps)
    """
    assert said(launch(RESTARTED, script, **restarts(tmp_path, memory=root)))["begun"] == 3
    assert seen(tmp_path, 1)["state"] == seen(tmp_path, 0)["state"]


def test_recomputed_activations_have_the_dropout_of_the_forward_pass(launch: Launch) -> None:
    script = """
        def gradients(model, device):
            torch.manual_seed(7)
            model(torch.randn(64, 256, device=device)).square().mean().backward()
            return torch.cat([each.grad.detach().flatten() for each in model.parameters()])

        with flk.init(strategy="ddp", log_every=0) as run:
            plain, recomputed = (run.parallelize(noisy(), recompute=recompute) for recompute in (False, True))
            first, second, other = (gradients(each, run.device) for each in (plain, recomputed, plain))
            run.log(same=torch.equal(first, second), accumulated=torch.equal(first, other), size=first.abs().max())
    """
    found = said(launch(RESTARTED, script))
    assert found["same"]
    assert not found["accumulated"]
    assert found["size"] > 0


def test_without_a_seed_ranks_and_attempts_draw_different_numbers_on_the_gpu(launch: Launch, tmp_path: Path) -> None:
    script = """
        import time

        rank = os.environ["RANK"]
        drawn = torch.rand(4, device="cuda").tolist()
        pathlib.Path(f"drawn.{ATTEMPT}.{rank}").write_text(json.dumps(drawn))
        while ATTEMPT == 0:
            if rank == "1" and os.path.exists("drawn.0.0"):
                kill()
            time.sleep(0.01)
    """
    launch(RESTARTED, script, processes=2, **restarts(tmp_path))
    drawn = [path.read_text() for path in tmp_path.glob("drawn.?.?")]
    assert len(drawn) == len(set(drawn)) == 4
