"""Run the commands that the documentation shows, and write their real output into the pages.

    python -m scripts.documentation.outputs [--check] [--where local|cluster] [PAGE ...]

Each page runs in a folder of its own, from top to bottom, as a new user would type it. `--check` changes no page: it
compares the lines of each command, rank and launcher after names of nodes, times, ages, numbers with a fraction and
hashes have been replaced, and ends with 1 where a page shows something else. Commands for a cluster need the kind
cluster `flk` with the training operator and flk's CPU image (`make image`); they run in the namespace `team`,
which this program creates and deletes.
"""

from __future__ import annotations

import argparse
import difflib
import getpass
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flk_runtime.contract import VERSION
from scripts import chart
from scripts.documentation.pages import ROOT, Block, Command, all_pages, blocks, commands

CONTEXT: Final = "kind-flk"
NAMESPACE: Final = "team"
LIMIT: Final = 420  # seconds that one command may take
_CHANGING: Final = (
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.\d]*Z?", "TIME"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b", "HASH"),
    (r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS"),
    (r"\b(\d+(\.\d+)?(ms|s|m|h|d))+\b", "DURATION"),
    (r"\b\d+(\.\d+)? s\b", "DURATION"),
    (r"\bflk-(worker\d*|control-plane)\b", "NODE"),
    (r"'-?\d+(\.\d+)?(e[-+]\d+)?'", "NUMBER"),  # as Transformers prints them, in four digits
    (r"-?\b\d+\.\d+(e[-+]\d+)?\b", "NUMBER"),
    (r"\b[\d,]+ (kB|MiB)\b", "SIZE"),
    (r"^LAST DEPLOYED: .*", ""),
    (r"(pid |process )\d+", r"\1PID"),
    (r"/tmp/[\w./-]+", "PATH"),
    (r"\s+", " "),
    (r"^(\S+-worker-\d+ [\d,-]+) .*", r"\1"),  # how far a pod has come when `flk status` reads it
    (r"(ErrImagePull|ImagePullBackOff).*", "IMAGE"),
    (r"^flk: job \S+ is (pending|starting|running|restarting).*", ""),  # said only if it is seen
    (r"^flk: waiting for \d+ pods? of \S+ to (save and )?end.*", ""),  # said only if it takes long
    (r"^goodput \d+% of .*", ""),  # the launchers tell it anew from time to time
    (r"^\s*PyTorchJob \S+: status\.conditions\[Failed\].*", ""),  # the operator writes it after the launchers' record
    (r'^\s*job "\S+" is failing because .*', ""),
)
# The user and the host that the pages show as ada@lab and lab.
_HOST: Final = re.escape(socket.gethostname())
_OWNER: Final = rf"\b{re.escape(getpass.getuser())}@{_HOST}\b"


def normalized(output: str) -> list[str]:
    """The lines of ``output`` with placeholders for all that may differ between runs.

    Ranks and launchers print at the same time. So the lines stand by what has printed them: those of commands first,
    then those of each launcher, whose threads have no order, and those of each rank.
    """
    lines = []
    for line in output.splitlines():
        for pattern, name in _CHANGING:
            line = re.sub(pattern, name, line)
        if line := line.strip():
            lines.append(line)
    return sorted(lines, key=_place)


def _place(line: str) -> tuple[str, str]:
    source = re.match(r"\[(?:rank|pod) \d+\]|", line)
    assert source
    return source[0], line if source[0].startswith("[pod") else ""


class Session:
    """A user's shell for one page: a folder, an environment, and the exit code of the command before."""

    def __init__(self, folder: Path, kubeconfig: Path | None, namespace: str) -> None:
        self.folder = folder
        self.namespace = namespace
        self.code = 0
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLK_", "KUBE", "PYTHON"))}
        programs = Path(sys.executable).parent  # where pip has put flk
        self.environment = kept | {"PATH": f"{programs}:{kept['PATH']}", "HOME": str(folder.parent), "NO_COLOR": "1"}
        self.environment |= {"COLUMNS": "100", "KUBECONFIG": str(kubeconfig or folder / "no-kubeconfig")}
        self.environment["FLK_IMAGE"] = f"flktrain/flk:{VERSION}-cpu"  # as the first job's page sets it

    def run(self, command: str) -> str:
        """Run a command and return what it prints on stdout and stderr, with the namespace shown as ``team``."""
        if self.namespace:
            command = re.sub(rf"(?<![\w./-]){NAMESPACE}(?![\w./-])", self.namespace, command)
        done = subprocess.run(
            ["bash", "-c", f"(exit {self.code})\n{command}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        self.code = done.returncode
        output = done.stdout.replace(self.namespace, NAMESPACE) if self.namespace else done.stdout
        output = output.replace(str(self.folder.parent), "~").replace(str(ROOT), "~/flk")
        output = re.sub(_OWNER, lambda owner: "ada@lab".ljust(len(owner[0])), output)  # columns stay aligned
        output = re.sub(rf'(?<="){_HOST}(?=")|(?<=on ){_HOST}\b|(?<=node ){_HOST}\b', "lab", output)
        return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def run_page(page: Path, where: Sequence[str], *, check: bool, cluster: tuple[Path, str] | None = None) -> int:
    """Run the commands of one page, and return the number of blocks whose text differs from the printed output.

    ``cluster`` is a kubeconfig file and the namespace that its context points to. Without it, a page with commands for
    a cluster gets a namespace of its own.
    """
    chosen = [block for block in blocks(page) if block.key == "file" or (block.key == "run" and block.value in where)]
    if not any(block.key == "run" for block in chosen):
        return 0
    text, wrong = page.read_text(), 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        clustered = any(block.value == "cluster" for block in chosen)
        kubeconfig, namespace = cluster or ((make_namespace(home), NAMESPACE) if clustered else (None, ""))
        session = Session(home / "work", kubeconfig, namespace)
        session.folder.mkdir()
        for name in ("charts", "examples", "k8s"):  # for pages whose commands run in a checkout
            if any(f"{name}/" in block.text for block in chosen):
                (session.folder / name).symlink_to(ROOT / name)
                if name == "charts":
                    chart.prepare()
        for block in chosen:
            if block.key == "file":
                (session.folder / block.value).parent.mkdir(parents=True, exist_ok=True)
                (session.folder / block.value).write_text(block.text)
                continue
            shown = commands(block)
            printed = [Command(command.text, session.run(command.text)) for command in shown]
            wrong += report(block, shown, printed)
            now = "".join(f"$ {one.text}\n{one.output}" for one in printed)
            text = text.replace(f"\n{block.text}```", f"\n{now}```", 1)
        if clustered and cluster is None:
            kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    if not check:
        page.write_text(text)
    return wrong


def report(block: Block, shown: Sequence[Command], printed: Sequence[Command]) -> int:
    """Print how the output differs from the page. Returns 1 if it differs, else 0."""
    wrong = 0
    for before, now in zip(shown, printed, strict=True):
        old, new = normalized(before.output), normalized(now.output)
        if old != new:
            wrong = 1
            print(f"{block.page.relative_to(ROOT)}:{block.line}: $ {now.text}")
            sys.stdout.writelines(f"  {line}\n" for line in difflib.unified_diff(old, new, "page", "run", n=0))
    return wrong


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(["kubectl", "--context", CONTEXT, *arguments], input=stdin, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def make_namespace(folder: Path) -> Path:
    """A new namespace that enforces Pod Security `restricted`, and a kubeconfig file whose context points to it."""
    kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    kubectl("create", "namespace", NAMESPACE)
    kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    kubectl("-n", NAMESPACE, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
    path = folder / "kubeconfig"
    path.write_text(kubectl("config", "view", "--minify", "--flatten"))
    path.chmod(0o600)
    subprocess.run(
        ["kubectl", "--kubeconfig", path, "config", "set-context", "--current", "--namespace", NAMESPACE],
        check=True,
        capture_output=True,
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the commands that the documentation shows.")
    parser.add_argument("--check", action="store_true", help="change no page, and end with 1 where one is out of date")
    parser.add_argument("--where", choices=("local", "cluster"), help="only the pages' commands for this")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    options = parser.parse_args()
    if missing := [str(page) for page in options.pages if not page.is_file()]:
        parser.error(f"there is no page {missing[0]}")
    where = [options.where] if options.where else ["local", "cluster"]
    pages = [page.resolve() for page in options.pages] or all_pages()
    wrong = sum(run_page(page, where, check=options.check) for page in pages)
    print(f"{wrong} blocks differ from what was printed" if wrong else "every block shows what was printed")
    sys.exit(1 if wrong and options.check else 0)


if __name__ == "__main__":
    main()
