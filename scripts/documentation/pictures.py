"""Make the pictures of the page "Watch a job" anew, from a real job.

    python -m scripts.documentation.pictures

It needs the kind cluster `flk` with the training operator and flk's CPU image (`make image`), Chromium, and the extra
`report`. The job trains in four pods of the namespace `team`, which this program creates and deletes: a rank is killed,
a rank hangs, and the training raises an exception at the end.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from scripts.documentation import browser
from scripts.documentation.outputs import NAMESPACE, kubectl, make_namespace
from scripts.documentation.pages import ROOT
from tests.support.terminal import on_a_terminal

ASSETS: Final = ROOT / "docs" / "assets"
LIMIT: Final = 100_000  # bytes of a picture
SIZE: Final = (30, 108)  # rows and columns of the terminal
JOB: Final = "gpt"
ARGUMENTS: Final = (
    *("--name", JOB, "--replicas", "4", "--cpu", "50m", "--memory", "768Mi", "--restarts", "3", "--strategy", "ddp"),
    *("--hang-timeout", "15s"),
)
TRAIN: Final = """
import os, pathlib, signal, time
import torch
import flk_runtime as flk
run = flk.init(log_every=5, save_every=20)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.003))
torch.manual_seed(run.steps)
while run.steps < 600:
    x = torch.randn(32, 64)
    loss = (model(x) - x.mean(1, keepdim=True) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.16 + 0.05 * (run.rank == 2))
    run.step(loss=loss, total=600)
    if run.rank == 1 and run.steps == 110 and run.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.rank == 3 and run.steps == 260 and run.attempt == 1:
        time.sleep(1000)
    if run.rank == 0 and pathlib.Path("/tmp/end").exists():
        raise ValueError("expected 64 features, got 63")
"""


def main() -> None:
    chromium = browser.program()
    if chromium is None:
        sys.exit("no Chromium was found")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        kubeconfig = make_namespace(folder)
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": name, "TERM": "xterm-256color", "TZ": "UTC"}
        environment.pop("NO_COLOR", None)

        def flk(*arguments: str) -> str:
            command = [str(Path(sys.executable).with_name("flk")), *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            return done.stdout or done.stderr

        print(flk("submit", "train.py", *ARGUMENTS))
        until("step 190 of attempt 2", lambda: reached(flk, 190))
        save("flk-top.svg", terminal(folder, environment).encode())
        until("step 400 of attempt 3", lambda: reached(flk, 400))
        flk("exec", JOB, "--", "touch", "/tmp/end")
        print(flk("wait", JOB, "--timeout", "5m"))
        print(flk("report", JOB))
        take_report(chromium, folder / f"{JOB}.report.html")
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def take_report(chromium: str, page: Path) -> None:
    """Take the picture of a report."""
    with browser.Browser(chromium) as window:
        window.open(page.as_uri())
        window.wait_for("[...document.querySelectorAll('.plot')].every(each => each.querySelector('svg'))")
        height = window.value("document.getElementById('time').getBoundingClientRect().top - 40")
        save("flk-report.webp", webp(window.picture(int(height))))


def until(what: str, is_true: Callable[[], bool], seconds: float = 420.0) -> None:
    """Wait for a condition. Ends the program if it does not come true."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            sys.exit(f"{what}: not reached after {seconds:g} s")
        time.sleep(1)
    print(what)


def reached(flk: Callable[..., str], step: int) -> bool:
    """Return whether all ranks of the job have done so many steps."""
    steps = re.findall(r"^[> ] +\d+ +([\d,]+) ", flk("top", JOB), re.MULTILINE)
    return len(steps) == 4 and min(int(each.replace(",", "")) for each in steps) >= step


def terminal(folder: Path, environment: Mapping[str, str]) -> str:
    """Return what `flk top` shows on a terminal, as SVG that loads nothing."""
    program = [str(Path(sys.executable).with_name("flk")), "top", JOB]
    shown = re.compile(r"RANK(?:.*?loss){6}", re.DOTALL)  # a few drawings with all parts
    _, written = on_a_terminal(program, folder, environment=environment, typed={shown: "q"}, size=SIZE)
    last = written.split("\x1b[H")[-1].split("\x1b[?25h")[0]
    text = Text.from_ansi(re.sub(r"\x1b\[[KJ]", "", last).replace("\r", ""))
    console = Console(record=True, width=SIZE[1], file=io.StringIO(), force_terminal=True)
    console.print(text, no_wrap=True, overflow="crop")
    svg = console.export_svg(title=f"flk top {JOB}", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def webp(png: bytes) -> bytes:
    """Return a picture as WebP, in the best quality that is small enough."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for quality in (90, 80, 70, 60, 50, 40):
        out = io.BytesIO()
        image.save(out, "WEBP", quality=quality, method=6)
        if len(out.getvalue()) <= LIMIT:
            break
    return out.getvalue()


def save(name: str, data: bytes) -> None:
    """Write a picture into the documentation. Raises ValueError if it is too large."""
    if len(data) > LIMIT:
        raise ValueError(f"{name} has {len(data)} bytes, and may have {LIMIT}")
    (ASSETS / name).write_bytes(data)
    print(f"{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
