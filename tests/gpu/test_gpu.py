"""What a single GPU can show: NCCL's start, memory as predicted, compiled blocks, the model FLOPs utilisation."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flk.manifest.runtime import module_source
from flk_runtime.contract import ExitCode, pod_env, user_env
from flk_runtime.system import mfu
from tests.support.gpu import Launch, said
from tests.support.ports import held_ports

SHARDED = ("shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")


def test_nccl_starts_on_the_device_of_the_rank(launch: Launch) -> None:
    script = """
        with flk.init() as run:
            total = torch.ones(1, device=run.device)
            dist.all_reduce(total)
            on_cpu = torch.ones(1)
            dist.all_reduce(on_cpu)
            group = dist.group.WORLD
            run.log(device=str(run.device), backends=str(dist.get_backend_config()), bound=str(group.bound_device_id),
                    current=torch.cuda.current_device(), total=total, on_cpu=on_cpu)
    """
    found = said(launch(script))
    assert found["device"] == found["bound"] == "cuda:0"  # device_id: NCCL's communicator is made at once
    assert "cuda:nccl" in found["backends"]
    assert "cpu:gloo" in found["backends"]
    assert (found["current"], found["total"], found["on_cpu"]) == (0, 1.0, 1.0)


def test_ranks_are_forked_and_the_fork_server_has_no_cuda_context(launch: Launch) -> None:
    script = """
        def driver(process):
            folder = f"/proc/{process}/fd"
            return sorted({path for number in os.listdir(folder)
                           if os.path.exists(f"{folder}/{number}")
                           and (path := os.readlink(f"{folder}/{number}")).startswith("/dev/nvidia-uvm")})

        def parent(process):
            with open(f"/proc/{process}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        with flk.init() as run:
            torch.ones(1, device=run.device)
            server = os.getppid()
            run.log(own=driver("self"), server=driver(server), launcher=driver(parent(server)))
    """
    ended = launch(script)
    found = said(ended)
    assert found["own"] != []  # what is looked for is there where CUDA is in use
    assert found["server"] == found["launcher"] == []
    assert "FLK_START=spawn" not in ended.stdout + ended.stderr


def test_cuda_in_use_where_torch_is_imported_means_fresh_interpreters(launch: Launch, tmp_path: Any) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    script = "with flk.init() as run:\n    run.log(total=torch.ones(1, device=run.device))\n"
    folders = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    ended = launch(script, PYTHONPATH=os.pathsep.join(filter(None, folders)))
    assert said(ended)["total"] == 1.0
    assert "falling back to FLK_START=spawn: CUDA is initialized already" in ended.stderr


@pytest.mark.parametrize("strategy", ["no_shard", *SHARDED])
def test_memory_is_as_predicted(launch: Launch, strategy: str) -> None:
    """bf16 with fp32 masters and AdamW, a world of one: 4 + 8 bytes per parameter between steps, + 4 for gradients."""
    script = f"""
        with flk.init(strategy={strategy!r}) as run:
            model = make()
            count = sum(parameter.numel() for parameter in model.parameters())
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = run.parallelize(model, optimizer, precision=BF16, blocks="Block")
            x = torch.randn(8, WIDTH, device=run.device)
            for step in range(3):
                loss = model(x).square().mean()
                loss.backward()
                torch._C._cuda_clearCublasWorkspaces()  # 64 MiB on Hopper, of the forward and the backward thread
                with_gradients = torch.cuda.memory_allocated()
                optimizer.step()
                optimizer.zero_grad()
                between = torch.cuda.memory_allocated()
                run.step(loss=loss)
            run.log(count=count, between=between / count, with_gradients=with_gradients / count,
                    loss=loss, device=torch.cuda.get_device_name())
    """
    found = said(launch(script))
    assert found["loss"] > 0
    assert found["between"] == pytest.approx(12, rel=0.05), found
    assert found["with_gradients"] == pytest.approx(16, rel=0.05), found


def test_two_ranks_on_one_gpu_are_refused_with_the_reason(launch: Launch) -> None:
    ended = launch("flk.init()\n", processes=2, failing=True)
    assert ended.returncode != 0
    assert "Duplicate GPU detected" in ended.stdout + ended.stderr  # NCCL: one that a launcher has shown to both


def test_a_hang_names_the_collective_of_nccl_that_does_not_end(launch: Launch) -> None:
    script = """
        with flk.init() as run:
            total = torch.ones(1, device=run.device)
            dist.all_reduce(total)
            torch.cuda.synchronize()
            torch.cuda._sleep(1 << 42)  # the collective begins after it, in some ten minutes
            dist.all_reduce(total)
            torch.cuda.synchronize()
    """
    ended = launch(script, failing=True, **{user_env.HANG_TIMEOUT: "8"})
    output = ended.stdout + ended.stderr
    assert ended.returncode == ExitCode.INFRASTRUCTURE, output
    assert re.search(r"is in all_reduce \d+", output), output


def test_mfu_is_a_part_of_the_peak(launch: Launch) -> None:
    name = torch.cuda.get_device_name()
    if mfu.peak(name, torch.bfloat16) is None:
        pytest.skip(f"no peak is known for {name}")
    script = """
        with flk.init(strategy="full_shard", log_every=10) as run:
            model = make()
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = run.parallelize(model, optimizer, precision=BF16, blocks="Block")
            x = torch.randn(4096, WIDTH, device=run.device)
            for step in range(30):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
            run.log(mfu=run.mfu, flops=run.flops_per_step)
    """
    found = said(launch(script))
    assert found["flops"] == 2 * 4096 * 1024 * 1024 * (3 * (1 + 8 * 8) - 1)  # the input needs no gradient
    assert 0.01 < found["mfu"] < 1


def test_the_launcher_reads_the_gpu_through_nvml(launch: Launch, tmp_path: Path) -> None:
    script = """
        import pathlib, time, urllib.request
        with flk.init() as run:
            page, limit = "", time.monotonic() + 120
            x = torch.ones(4096, 4096, device=run.device)
            while "flk_pod_gpu_busy_ratio" not in page and time.monotonic() < limit:
                for _ in range(100):
                    x = (x @ x).clamp(max=1)
                torch.cuda.synchronize()
                address = f"http://127.0.0.1:{os.environ['FLK_METRICS_PORT']}/metrics"
                page = urllib.request.urlopen(address, timeout=60).read().decode()
            pathlib.Path("metrics").write_text(page)
    """
    with held_ports() as free_port:
        variables = {pod_env.GPUS: "1", user_env.METRICS_PORT: str(free_port())}
        launch(script, **variables)
    page = (tmp_path / "metrics").read_text()

    (busy,) = re.findall(r"^flk_pod_gpu_busy_ratio\{.*\} (.*)$", page, re.MULTILINE)
    assert 0 <= float(busy) <= 1


def test_a_profile_has_kernels(launch: Launch, tmp_path: Path) -> None:
    for name in ("ask", "rank"):
        (tmp_path / f"{name}.program").write_text(module_source(f"flk_runtime/profiling/{name}.py"))
    script = """
        import pathlib, shutil, subprocess, sys
        folder = pathlib.Path(os.environ["FLK_OBSERVER"]).parents[2]
        ask, source = (pathlib.Path(f"{name}.program").read_text() for name in ("ask", "rank"))
        with flk.init() as run:
            arguments = {"steps": 5, "timeout": 60, "rank": run.rank}
            request = {"folders": folder.name, "local_rank": 0, "arguments": arguments, "source": source}
            model = make()
            model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01))
            asked = subprocess.Popen(
                [sys.executable, "-c", ask, json.dumps(request)], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "TMPDIR": str(folder.parent)},
            )
            while asked.poll() is None:
                loss = model(torch.randn(64, WIDTH, device=run.device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss)
            answer = json.loads(asked.stdout.read())
            for path in answer.get("files", ()):
                shutil.copy(path, "profile" + pathlib.Path(path).suffix)
            run.log(error=answer.get("error", "none"))
    """
    assert said(launch(script))["error"] == "none"
    with gzip.open(tmp_path / "profile.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert len(steps) == 5
    assert any(event.get("cat") == "kernel" for event in events)
