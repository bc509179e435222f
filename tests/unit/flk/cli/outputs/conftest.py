"""Runs command lines of flk in a folder, against the fake API server, and records all that they print.

Each test compares a whole transcript (exit code, stdout, stderr) with the one in `__snapshots__`, one file for each
command. `make accept` accepts what the commands print now; read the difference before you commit it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from flk.__main__ import main
from flk.kube.client import RetryPolicy
from tests.support.api_server import FakeApiServer

# The fake server's clock: two hours after everything was created, so that ages do not depend on the test's speed.
NOW = "Thu, 01 Jan 2026 02:05:10 GMT"


class Terminal:
    """Runs command lines in a folder, and returns transcripts."""

    def __init__(self, folder: Path, server: FakeApiServer, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.server = server
        self._capture = capture

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __call__(self, line: str) -> str:
        """The transcript of one command line: the line, stdout, stderr and the exit code."""
        words = shlex.split(line)
        assert words[0] == "flk"
        code = main(words[1:])
        printed = self._capture.readouterr()
        parts = [f"$ {line}"]
        for name, text in (("stdout", printed.out), ("stderr", printed.err)):
            if text:
                parts += [f"--- {name}", self._normal(text).removesuffix("\n")]
        return "\n".join([*parts, f"--- exit code {code}"])

    def _normal(self, text: str) -> str:
        """The text without what differs from run to run: folders, ports, hashes and random names."""
        text = text.replace(str(self.folder), "/home/ada/work").replace(str(self.folder.parent), "/home/ada")
        text = text.replace(self.server.url, "https://cluster.example:6443")
        text = re.sub(r"sha256 [0-9a-f]{12}", "sha256 <hash>", text)
        # In YAML they have quotation marks if they could be read as numbers.
        text = re.sub(r"\"?\b[0-9a-f]{64}\b\"?", "<sha256>", text)
        text = re.sub(r"\"?\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b\"?", "<uuid>", text)
        text = re.sub(r"-rendezvous-[0-9a-f]{8}\b", "-rendezvous-<random>", text)
        text = re.sub(r"\btrain-[a-z0-9]{5}\b", "train-<random>", text)
        text = re.sub(r"(?m)^(flk: job train-<random> \w+ after) .*$", r"\1 <time>", text)
        text = re.sub(r"(tried \d+ times in )\d+ s\b", r"\1<seconds> s", text)
        text = re.sub(r"(as of [\d :-]+) \(\ds ago\)", r"\1 (0s ago)", text)  # on a slow machine a second has passed
        text = re.sub(r"\d+ bytes compressed", "<number> bytes compressed", text)  # it depends on zlib's version
        return re.sub(r'"[A-Za-z0-9+/=]{100,}"', '"<base64>"', text)  # archives: their bytes depend on zlib's version


@pytest.fixture
def terminal(
    tmp_path: Path,
    fake: FakeApiServer,
    kubeconfig: Path,
    secure: None,
    utc: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Terminal:
    """A terminal in a folder that has a file train.py and nothing else."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["flk"])
    variables = {"HOME": str(tmp_path), "USER": "ada", "LOGNAME": "ada", "NO_COLOR": "1", "COLUMNS": "100"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("FLK_IMAGE", "KUBERNETES_SERVICE_HOST", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    retries = RetryPolicy(backoffs=(0.0, 0.0))  # three attempts, without a pause
    monkeypatch.setattr(RetryPolicy, "within", lambda seconds: retries)
    fake.date = NOW
    terminal = Terminal(folder, fake, capsys)
    terminal.write({"train.py": "print('trained')\n"})
    return terminal
