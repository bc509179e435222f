"""Tests of one real GPU. Each starts its script through flk's own launcher, as a pod does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.collection import in_folder
from tests.support.gpu import Launch

END = 300  # seconds for one job: the first kernels of a process take a while to load

# Blocks of equal size, so that what is sharded, compiled and predicted is the sum of a few terms.
MODEL = """
    import json, os
    import torch, torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    import flk_runtime as flk

    WIDTH, BLOCKS = 1024, 8

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            return x + self.network(self.norm(x))

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS))))

    BF16 = flk.Precision(param=torch.bfloat16, reduce=torch.float32)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no NVIDIA GPU here"
    for item in in_folder(items, Path(__file__).parent):
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a script (after MODEL, and in several parts) as the ranks of one pod that sees the first GPU only."""

    def run(
        *parts: str, processes: int = 1, failing: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text("".join(map(textwrap.dedent, (MODEL, *parts))))
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": first, "FLK_PROCESSES": str(processes), **variables}
        ended = subprocess.run(
            [sys.executable, "-m", "flk_runtime", "--", "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=END,
        )
        assert failing or ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    return run
