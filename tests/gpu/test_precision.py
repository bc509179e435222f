"""Mixed precision on a GPU: float16 with a GradScaler trains as torch does by hand, and goes on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import RESTARTED, Launch, restarts, said, seen

# Six steps of which the third overflows. The scale grows after two steps without an overflow.
SCALED = """
    def scaled(model, optimizer, scaler, device, first=0, after_step=lambda step: None):
        seen = []
        for step in range(first, 6):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(model, x)
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append([loss.item(), scaler.get_scale()])
            after_step(step)
        return seen

    def new_scaler():
        return torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)

    def plain():
        # Without dropout, whose numbers depend on what was drawn before.
        model = noisy()
        F.dropout = lambda x, *_: x
        return model

    def adam(model, fused):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
"""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_float16_with_a_grad_scaler_is_as_by_hand_and_resumes(
    launch: Launch, tmp_path: Path, root: Path, strategy: str, fused: bool
) -> None:
    script = f"""
        if ATTEMPT == 0:
            model = plain().to("cuda")
            note("by hand", scaled(model, adam(model, {fused}), new_scaler(), "cuda"))
        with flk.init(strategy={strategy!r}, save_every=0, log_every=0) as run:
            model = plain()
            model, optimizer = run.parallelize(model, adam(model, {fused}))
            scaler = new_scaler()
            run.register("scaler", scaler)
            begun = run.steps

            def after_step(step):
                run.step()
                note(f"state {{step}}", digest(model, optimizer))
                if step == 2 and not begun:
                    run.save(wait=True)

            note("run", scaled(model, optimizer, scaler, run.device, begun, after_step))
            if ATTEMPT == 0:
                kill()
            run.log(begun=begun)
    """
    assert said(launch(RESTARTED, SCALED, script, **restarts(tmp_path, memory=root)))["begun"] == 3
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    assert [scale for _, scale in first["by hand"]] == [1024, 2048, 1024, 1024, 2048, 2048]
    assert [scale for _, scale in first["run"]] == [scale for _, scale in first["by hand"]]
    wanted = [loss for loss, _ in first["by hand"]]
    assert [loss for loss, _ in first["run"]] == pytest.approx(wanted, rel=1e-3)
    assert first["state 1"] != first["state 3"]
    assert second["run"] == first["run"][3:]
    assert [second[f"state {step}"] for step in (3, 4, 5)] == [first[f"state {step}"] for step in (3, 4, 5)]


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_bfloat16_computes_in_it_and_keeps_the_weights_in_float32(launch: Launch, strategy: str) -> None:
    script = f"""
        with flk.init(strategy={strategy!r}, log_every=0) as run:
            losses = {{}}
            for precision in (None, BF16):
                model = noisy()
                F.dropout = lambda x, *_: x
                model, optimizer = run.parallelize(
                    model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), precision=precision
                )
                used = set()
                model[0].up.register_forward_hook(lambda module, given, made: used.add(str(made.dtype)))
                found = []
                for step in range(5):
                    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(run.device)
                    loss = loss_of(model, x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    found.append(loss.item())
                kept = sorted({{str(each.dtype) for each in (*model.parameters(), *model.buffers())}})
                losses[str(precision is None)] = [found, sorted(used), kept]
            run.log(**losses)
    """
    found = said(launch(RESTARTED, script))
    (exact, in_float32, kept), (rounded, in_bfloat16, kept_too) = found["True"], found["False"]
    assert (in_float32, in_bfloat16) == (["torch.float32"], ["torch.bfloat16"])
    assert kept == kept_too == ["torch.float32", "torch.int64"]
    assert rounded == pytest.approx(exact, rel=2e-2)
    assert rounded != exact
    assert exact[-1] < exact[0]
