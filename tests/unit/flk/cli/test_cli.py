"""The command line as people and scripts see it: whole outputs, exit codes, and what is not imported."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import flk
from flk import cli, manifest
from flk.__main__ import PIPE_CLOSED, main
from flk.errors import FlkError, JobFailedError
from flk.spec import overlay
from flk.spec.job import Job
from flk.spec.names import DEFAULT_IMAGE
from flk.spec.options import GROUPS, rows
from flk_runtime.contract import VERSION, ExitCode
from tests.support.commands import Run
from tests.support.processes import checked
from tests.unit.flk.cli.outputs import jobs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in an empty folder: its code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FLK_IMAGE", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(str(tmp_path), "HERE")

    return run


def test_a_key_without_values_in_the_job_file_is_as_if_it_were_not_there(run: Run) -> None:
    Path("train.py").touch()
    Path("flk.yaml").write_text("command: train.py\nenv:\n  # A: x\nresources:\nname:\n")
    assert run("render", "--env", "A=1", "--cpu", "1")[0] == 0


def test_the_runtime_that_the_chart_brings_is_left_out(run: Run) -> None:
    Path("train.py").write_text("print(1)\n")
    words = ("render", "train.py", "--name", "gpt", "-o", "json")
    whole, rest = (json.loads(run(*words, *more)[1])["items"] for more in ((), ("--no-runtime",)))
    assert [manifest["metadata"]["name"] for manifest in whole] == ["gpt", "gpt-runtime-0", "gpt-code-0"]
    assert rest == [whole[0], whole[2]]


@pytest.mark.parametrize("words", [["--version"], ["-V"]])
def test_version(run: Run, words: list[str]) -> None:
    assert run(*words) == (0, f"flk {VERSION}\n", "")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(run: Run, words: list[str]) -> None:
    code, stdout, stderr = run(*words)
    assert (code, stderr) == (0, "")
    for name, (_, line, section) in cli.COMMANDS.items():
        assert f"{section}:\n" in stdout
        assert re.search(rf"\n  {name} +{re.escape(line)}\n", stdout)


@pytest.mark.parametrize("command", ["submit", "run", "render", "plan", "bench"])
def test_the_help_of_a_command_on_a_job_is_short_and_help_all_has_each_option_once(run: Run, command: str) -> None:
    short, full = run(command, "--help")[1], run(command, "--help-all")[1]
    shown, every = (re.findall(r"^  (-[^ ]+(?:, -[^ ]+)*)", text, re.MULTILINE) for text in (short, full))
    assert len(shown) <= 20
    assert len(every) == len(set(every)) >= len(shown)
    assert set(shown) <= set(every)


def test_each_flag_of_a_job_belongs_to_one_topic_of_the_help() -> None:
    flags = [row.name for row in rows(Job) if row.option.metavar]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted([*flags, "module", "file", "no_ship"])


# The commands that create or change something in a cluster, and why one has no --dry-run.
CHANGES = {
    "submit": "",
    "delete": "",
    "restart": "`flk list -l` shows the jobs, and the API server checks the new job before the old one is deleted",
    "suspend": "`flk list -l` shows the jobs, and resume undoes it",
    "resume": "`flk list -l` shows the jobs, and suspend undoes it",
    "scale": "it is about one job, and a second scale undoes it",
    "cp": "it writes only the path that it is given",
    "exec": "what happens is up to the command",
    "bench": "its jobs are its own, and it deletes them",
    "doctor": "it creates nothing",
    "profile": "it leaves nothing in the pod",
}


@pytest.mark.parametrize("command", CHANGES)
def test_commands_that_change_something_have_a_dry_run_or_a_reason_for_none(run: Run, command: str) -> None:
    assert ("--dry-run" in run(command, "--help")[1]) is (not CHANGES[command])


def test_help_and_mistakes_import_neither_kubernetes_nor_torch_nor_yaml() -> None:
    lines = [["--help"], ["--version"], ["nope"], *([name, "--help"] for name in cli.COMMANDS)]
    code = (
        "import sys\nfrom flk.__main__ import main\n"
        f"for words in {lines!r}:\n"
        "    main(words)\n"
        "    assert not {m.partition('.')[0] for m in sys.modules} & {'kubernetes', 'torch', 'yaml'}, words\n"
        "print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "end"


def test_the_version_imports_no_dataclasses() -> None:
    code = (
        "import sys\nfrom flk.__main__ import main\nassert main(['--version']) == 0\n"
        "print({'dataclasses', 'inspect', 'json', 'typer'} & {*sys.modules})"
    )
    # Without site, whose packages may import what they like; so the folders of this process are named.
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"flk {VERSION}", "set()"]


def test_commands_on_jobs_import_no_more_than_they_need(fake: Any, kubeconfig: Path) -> None:
    # Not zipfile: the interpreter's importlib.metadata, which urllib3 imports, imports it.
    fake.add("pytorchjobs", {"metadata": {"name": "gpt", "uid": "job"}})
    commands = {"status gpt": 0, "list": 0, "logs gpt --no-follow": 0, "wait gpt --timeout 0": 101, "delete gpt": 0}
    code = (
        "import sys\nfrom flk.__main__ import main\n"
        "heavy = {'pydantic', 'kubernetes', 'requests', 'tarfile', 'torch', 'flk.manifest.bundle', 'flk.spec.job'}\n"
        f"for command, code in {commands}.items():\n"
        "    assert main(command.split()) == code, command\n"
        "    assert not heavy & {*sys.modules}, command\n"
    )
    checked([sys.executable, "-c", code])


def test_a_list_of_jobs_that_have_succeeded_imports_no_causes(fake: Any, kubeconfig: Path) -> None:
    jobs.add(fake, "succeeded")
    code = (
        "import sys\nfrom flk.__main__ import main\nassert main(['list']) == 0\nassert 'flk.health' not in sys.modules"
    )
    checked([sys.executable, "-c", code])


def test_the_start_of_a_command_prepares_nothing_that_it_may_not_need(
    fake: Any, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A pattern is compiled when it is first used, and a model built. Making a class of values compiles one method.
    fake.add("pytorchjobs", {"metadata": {"name": "gpt", "uid": "job"}})
    Path("train.py").touch()
    code = """
import inspect, re, sys
from flk.__main__ import main
assert main(["status", "gpt"]) == main(["render", "train.py", "--name", "gpt"]) == 0
own = [module for name, module in sys.modules.items() if name.split(".")[0] in ("flk", "flk_runtime")]
health = [module for module in own if module.__name__.startswith(("flk.health", "flk.kube"))]
assert len(health) > 20
found = [(module.__name__, name) for module in health for name, value in vars(module).items()
         if isinstance(value, re.Pattern)]
assert not found, found
made = {value for module in own for value in vars(module).values() if inspect.isclass(value)
        and "__dataclass_params__" in vars(value) and value.__module__.startswith("flk")}
slow = [value for value in made if value.__dataclass_params__.frozen]
assert len(made) > 50 and not slow, slow
from flk.spec import parts, table
built = [model for model in (table.JobOptions, parts.Resources, parts.PodSettings) if model.__pydantic_complete__]
assert not built, built
import fnmatch
tried = fnmatch._compile_pattern.cache_info().currsize  # of the names of files that hold secrets
assert tried < 10, tried
"""
    checked([sys.executable, "-c", code])


def test_the_end_of_a_command_looks_for_no_garbage() -> None:
    code = (
        "import atexit, gc, sys\nfrom flk.__main__ import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"  # after what the command registers
        "sys.argv = ['flk', '--version']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"flk {VERSION}", "True"]


def manifests(stdout: str) -> list[dict[str, object]]:
    return list(yaml.safe_load_all(stdout))


def command(stdout: str) -> list[str]:
    template = next(yaml.safe_load_all(stdout))["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    words = list(template["spec"]["containers"][0]["command"])
    return words[words.index("--") + 1 :]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--", "--lr", "3"], ["train.py", "--lr", "3"]),
        (["--", "train.py", "--lr", "3"], ["train.py", "--lr", "3"]),
        (["train.py", "data", "--replicas", "2", "more"], ["train.py", "data", "more"]),
        (["train.py", "--", "a", "--", "--replicas", "b"], ["train.py", "a", "--", "--replicas", "b"]),
        (["train.py", "--", "--help"], ["train.py", "--help"]),
        (["-f", "job.yaml", "--", "config.py", "x"], ["train.py", "config.py", "x"]),
        (["-m", "train", "x", "--", "-m", "y"], ["-m", "train", "x", "-m", "y"]),
        (["train.py", "--", "$(HOME)", "a b", ""], ["train.py", "$$(HOME)", "a b", ""]),
    ],
)
def test_what_follows_the_script_goes_to_it_as_it_stands(run: Run, words: list[str], expected: list[str]) -> None:
    Path("train.py").touch()
    Path("job.yaml").write_text("command: train.py\n")
    code, stdout, stderr = run("render", "--no-runtime", *words)
    assert (code, stderr) == (0, "")
    assert command(stdout) == expected


def test_flags_win_over_the_job_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    Path("train.py").touch()
    Path("job.yaml").write_text(
        "command: train.py --lr 1\nname: file\nreplicas: 2\nresources: {cpu: 1, memory: 1Gi}\n"
        "env: {A: file, B: file}\nvolumes: [a:/a]\nnodes: {selector: {x: file}, tolerations: [t]}\n"
    )
    code, stdout, _ = run(
        *["render", "-f", "job.yaml", "--name", "flag", "--cpu", "2", "--env", "A=flag=1", "--env", "FROM_HERE"],
        *["--volume", "b:/b", "--node-selector", "example.com/y=flag", "--toleration", "u", "--", "--lr", "2"],
    )
    assert code == 0
    job = yaml.safe_load(next(yaml.safe_load_all(stdout))["metadata"]["annotations"]["flk.dev/spec"])
    assert job["command"] == ["train.py", "--lr", "1", "--lr", "2"]
    assert (job["name"], job["replicas"]) == ("flag", 2)
    assert (job["resources"]["cpu"], job["resources"]["memory"]) == ("2", "1Gi")
    assert job["env"] == {"A": "flag=1", "B": "file", "FROM_HERE": "here"}
    assert job["volumes"] == ["a:/a", "b:/b"]
    assert job["nodes"]["selector"] == {"x": "file", "example.com/y": "flag"}
    assert [t["key"] for t in job["nodes"]["tolerations"]] == ["t", "u"]


def test_the_image_comes_from_flag_then_file_then_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def image(*words: str) -> str:
        template = next(yaml.safe_load_all(run("render", "train.py", *words)[1]))["spec"]["pytorchReplicaSpecs"]
        return str(template["Worker"]["template"]["spec"]["containers"][0]["image"])

    Path("train.py").touch()
    assert image() == DEFAULT_IMAGE
    monkeypatch.setenv("FLK_IMAGE", "environment")
    assert image() == "environment"
    Path("flk.yaml").write_text("image: file\n")
    assert image() == "file"
    assert image("--image", "flag") == "flag"


def test_without_script_and_job_file_the_example_trains(
    run: Run, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = tmp_path_factory.mktemp("example")
    (example / "train.py").touch()
    monkeypatch.setattr(overlay, "EXAMPLE", example)
    code, stdout, stderr = run("render", "--replicas", "4", "--", "--steps", "3")
    assert code == 0
    assert command(stdout) == ["train.py", "--steps", "3"]
    assert stderr.startswith("flk: this folder has neither a script nor flk.yaml, so the bundled example trains: ")


def test_without_a_name_the_only_script_of_the_folder_trains_and_of_several_none(run: Run) -> None:
    for name in ("setup.py", "conftest.py", "__init__.py", "test_fit.py", "fit.py"):
        Path(name).touch()
    code, stdout, stderr = run("render", "--replicas", "4", "--", "--steps", "3")
    assert code == 0
    assert command(stdout) == ["fit.py", "--steps", "3"]
    assert stderr.startswith("flk: using fit.py, the only script in this folder\n")
    Path("train.py").touch()
    code, stdout, stderr = run("render", "--replicas", "4")
    assert (code, stdout) == (2, "")
    assert stderr == "error: no script is named, and this folder has 2: fit.py, train.py\nhint: name one of them\n"


def test_a_script_with_an_error_of_syntax_is_said_before_it_is_submitted(
    run: Run, fake: Any, kubeconfig: Path, recwarn: pytest.WarningsRecorder
) -> None:
    Path("bad.py").write_text("print(")
    said = " here cannot read bad.py: '(' was never closed in line 1; the ranks fail at once unless theirs can\n"
    assert said in run("render", "bad.py")[2]
    assert said in run("submit", "bad.py", "--dry-run")[2]
    flk.submit(flk.Job(command=["bad.py"]))
    assert [said.strip() in str(warning.message) for warning in recwarn] == [True]


def test_init_writes_a_file_that_renders_and_overwrites_none(run: Run) -> None:
    Path("main.py").touch()
    assert run("init", "--replicas", "3") == (0, "", "flk: wrote flk.yaml\n")
    assert "\ncommand: main.py\n" in Path("flk.yaml").read_text()
    code, stdout, stderr = run("render", "--no-runtime")
    assert (code, stderr) == (0, "flk: using flk.yaml\n")
    assert manifests(stdout)[0]["kind"] == "PyTorchJob"
    assert run("init") == (2, "", "error: flk.yaml exists already\nhint: --force overwrites it\n")
    missing = "flk: flk.yaml names other.py, which does not exist yet\n"
    assert run("init", "--force", "other.py") == (0, "", f"flk: wrote flk.yaml\n{missing}")


def test_init_leaves_no_file_behind_on_a_full_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(path: Path, text: str, **how: Any) -> int:
        write_text(path, text[:10], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert run("init") == (2, "", "error: cannot write flk.yaml: no space left on device\n")
    assert list(Path().iterdir()) == []
    assert run("init")[0] == 0


@pytest.mark.parametrize("script", ["my train.py", 'it\'s #1: "x".py'])
def test_init_writes_a_file_that_runs_a_script_with_an_unusual_name(run: Run, script: str) -> None:
    Path(script).touch()
    assert run("init", script)[0] == 0
    code, stdout, _ = run("render", "--name", "x")
    assert (code, command(stdout)) == (0, [script])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--file", ""], "the name of a file is empty"),
        (["--patch", ""], "the name of a file is empty"),
        (["--env", ""], "--env: must be K=V or K (is '')"),
    ],
)
def test_an_empty_value_is_not_passed_over(run: Run, words: list[str], message: str) -> None:
    """As of a variable of the shell that is not set."""
    Path("train.py").touch()
    code, _, stderr = run("render", "train.py", *words)
    assert (code, stderr.splitlines()[0]) == (2, f"error: {message}")


@pytest.mark.parametrize("words", [["render", "train.py"], ["submit"], ["run", "/train.py"]])
def test_a_folder_that_is_deleted_is_told_in_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    said = "error: this folder is deleted\nhint: change to the folder of the code\n"
    assert run(*words) == (2, "", said)


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (FlkError("it broke\nbadly", hint="mend it"), 1, "error: it broke badly\nhint: mend it\n"),
        (JobFailedError("rank 2 raised", code=104), 104, "error: rank 2 raised\n"),  # type: ignore[arg-type]
        (KeyboardInterrupt(), 130, ""),
        (KeyboardInterrupt("the job gpt exists"), 130, "flk: interrupted: the job gpt exists\n"),
    ],
)
def test_errors_end_with_their_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, stderr: str
) -> None:
    Path("train.py").touch()
    monkeypatch.setattr(manifest, "to_yaml", failing(error))
    assert run("render", "train.py", "--no-runtime") == (code, "", stderr)


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "flk", "render", "train.py", "--no-runtime"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), stderr) == (PIPE_CLOSED, b"")


def shell(line: str, folder: Path, *, unbuffered: str = "") -> tuple[int, str]:
    """The exit code of `flk` and what it has written to stderr, for a command line with redirections."""
    folder = folder / "work"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").touch()
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "FLK": f"{sys.executable} -m flk", "NO_COLOR": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


FULL = "error: cannot write to stdout: no space left on device\n"


RENDER = "render --no-runtime"  # with the runtime, a line says how kubectl takes the manifests


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--version", ""), ("--help", ""), ("render --help", ""), (f"{RENDER} train.py", ""), (f"{RENDER} train.py", "1")],
)
def test_output_that_cannot_be_written_is_told_in_a_line(tmp_path: Path, words: str, unbuffered: str) -> None:
    assert shell(f"$FLK {words} >/dev/full", tmp_path, unbuffered=unbuffered) == (1, FULL)


def test_a_completion_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    # Or Typer looks which shell has started the command.
    named = "HOME=/dev/null _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1"
    code, stderr = shell(f"{named} $FLK --install-completion bash", tmp_path)
    assert code == 2, stderr
    assert re.fullmatch(
        r"error: the completion cannot be written to /dev/null\S*: .+\n"
        "hint: --show-completion prints what your shell has to read\n",
        stderr,
    ), stderr


def test_ctrl_c_while_an_interrupted_command_ends_leaves_no_traceback(tmp_path: Path) -> None:
    assert shell(
        f"""{sys.executable} -c '
import atexit, os, signal, sys
import flk.cli
from flk.__main__ import main

flk.cli.call = lambda words: 130
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.exit(main())
'; exit $?""",
        tmp_path,
    ) == (130, "")


def test_an_encoding_lacks_characters(tmp_path: Path) -> None:
    assert shell(
        f"export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0; echo 'env: {{A: ü}}' | $FLK {RENDER} train.py -f -",
        tmp_path,
    ) == (0, "")


def test_closed_streams_are_dev_null(tmp_path: Path, fake: Any, kubeconfig: Path) -> None:
    jobs.succeeded().add_to(fake)
    assert shell(f"$FLK {RENDER} train.py >&-", tmp_path) == (0, "")
    assert shell("$FLK logs gpt --no-follow >&-", tmp_path)[0] == 0
    assert shell("$FLK status gpt <&- >&- 2>&-", tmp_path) == (0, "")
    code, stderr = shell("$FLK submit train.py --name new >&-", tmp_path)
    assert (code, stderr.startswith("flk: created PyTorchJob new in namespace team")) == (0, True)


def test_a_job_that_was_created_is_told_of_although_its_name_cannot_be_written(
    tmp_path: Path, fake: Any, kubeconfig: Path
) -> None:
    code, stderr = shell("$FLK submit train.py --name new >/dev/full", tmp_path)
    assert (code, stderr.startswith("flk: created PyTorchJob new in namespace team")) == (1, True)
    assert stderr.endswith(FULL)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>&1 >/dev/null | true"])
def test_the_exit_code_does_not_depend_on_whether_stderr_is_read(
    tmp_path: Path, fake: Any, kubeconfig: Path, redirection: str
) -> None:
    jobs.failed(jobs.RAISED).add_to(fake)
    line = "{ sleep 0.2; $FLK wait gpt; echo $? >code; } " + redirection
    assert shell(line, tmp_path)[1] == ""
    assert (tmp_path / "work" / "code").read_text() == "100\n"


@pytest.mark.parametrize(
    ("words", "formats"),
    [
        ("bench train.py", "text or json"),
        ("doctor", "text or json"),
        ("logs gpt", "text or json"),
        ("plan train.py", "text or json"),
        ("render train.py", "yaml or json"),
        ("stacks gpt", "text or json"),
        ("why gpt", "text or json"),
    ],
)
def test_a_format_that_a_command_does_not_have_is_refused(run: Run, words: str, formats: str) -> None:
    code, _, stderr = run(*words.split(), "--output", "other")
    assert (code, stderr) == (ExitCode.USAGE, f"error: --output: must be {formats} (is 'other')\n")
