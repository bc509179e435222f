"""Logs of many pods: every line in its order, with bounded memory, connections and notes."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs

# Runs flk and prints the most memory that it had, in MiB.
MEASURED = """
import re, sys
from flk.__main__ import main
code = main(sys.argv[1:])
# Not ru_maxrss, which a process inherits from the one that started it.
print(int(re.search(r"VmHWM:[^0-9]+([0-9]+)", open("/proc/self/status").read())[1]) // 1024, file=sys.stderr)
sys.exit(code)
"""


def add_job(fake: FakeApiServer, pods: int, lines: int) -> None:
    builder = jobs.new(replicas=pods).condition("Succeeded").all("ended", 0)
    builder.add_to(fake)
    for index in range(pods):
        text = "".join(f"[rank {index}] line {number} {'x' * 80}\n" for number in range(lines))
        fake.written[f"gpt-worker-{index}"] = text


@pytest.mark.promise("Causes: No line of a log is lost")
@pytest.mark.parametrize("options", [(), ("--no-follow",)])
def test_two_hundred_lines_from_each_of_a_hundred_pods(
    fake: FakeApiServer, kubeconfig: Path, options: tuple[str, ...]
) -> None:
    add_job(fake, 100, 200)
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, "logs", "gpt", *options], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[int]] = defaultdict(list)
    for line in run.stdout.splitlines():
        tag, _, rest = line.partition("] ")
        found[tag].append(int(rest.split()[-2]))
    assert len(found) == 100
    assert all(numbers == list(range(200)) for numbers in found.values())
    assert int(run.stderr.split()[-1]) < 200


def test_a_reader_that_ends_early(fake: FakeApiServer, kubeconfig: Path) -> None:
    """As `flk logs gpt | head -n 1` does."""
    add_job(fake, 50, 200)
    command = [sys.executable, "-m", "flk", "logs", "gpt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"[rank ")
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(60) == 141


INJECTION: list[Any] = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x1b]52;c;ZXZpbA==\x07",
    "\r$ rm -rf /",
    "\u202egnp.exe",
    "a\x00b\x08c",
    "`id` $(id) ; id | id",
    "%s %n {0} {{x}}",
    "[rank 1] [pod 0] flk-record {}",
    "!!python/object/apply:os.system [id]",
]


@pytest.mark.promise("Clusters: Text of others harms no terminal")
@pytest.mark.parametrize("text", INJECTION)
@pytest.mark.parametrize("options", [(), ("-o", "json")])
def test_lines_that_attack_the_terminal(
    fake: FakeApiServer,
    kubeconfig: Path,
    text: str,
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flk.__main__ import main

    add_job(fake, 1, 0)
    fake.written["gpt-worker-0"] = f"[rank 0] before {text} after\n{text}\n[rank 0] last\n"
    assert main(["logs", "gpt", "--no-follow", *options]) == 0
    printed = capsys.readouterr()
    whole = printed.out + printed.err
    allowed = {"\n", "\t"}
    assert not [c for c in whole if c not in allowed and (c < " " or "\x7f" <= c <= "\x9f" or c in "\u202e\u2066")]
    assert all(word in whole for word in ("before", "after", "last"))
