"""Hostile text in names, arguments, variables and errors: nothing is executed, lost, or sent to the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.user.terminal import one_line, printable
from tests.support.api_server import TOKEN
from tests.support.commands import Run
from tests.support.jobs import JobBuilder

TEXTS = {
    "shell": "$(touch owned); `touch owned` | & > owned # ' \" \\",
    "expansion of Kubernetes": "$(HOME) $$(HOME) $${HOME}",
    "Helm": '{{ .Values.job }} {{- include "x" . }}',
    "YAML": "!!python/object/apply:os.system [touch owned]",
    "alias": "&a [*a, *a]",
    "document": "a\n---\nb: 1\n...\n",
    "like a number": "0123",
    "like a truth": "on",
    "like a float": "1e3",
    "like nothing": "null",
    "ANSI": "\x1b[2J\x1b]0;title\x07\x1b[31mred",
    "carriage return": "good\rbad\b\b\b",
    "right to left": "a\u202eb\u2066c\u200bd",
    "wide": "é漢字🙂",
    "long": "x" * 60_000,
    "empty": "",
    "blanks": "  a\t ",
}


def rendered(run: Run, *words: str) -> tuple[Any, Any]:
    """The PyTorchJob as JSON and as YAML say it."""
    Path("train.py").write_text("")
    documents = []
    for output in ("json", "yaml"):
        code, stdout, stderr = run("render", "--name", "gpt", "-o", output, *words)
        assert code == 0, stderr
        documents.append(json.loads(stdout)["items"][0] if output == "json" else next(yaml.safe_load_all(stdout)))
    return documents[0], documents[1]


def container(job: Any) -> Any:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


@pytest.mark.promise("Clusters: Text of others harms no terminal")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_reaches_the_container_unchanged(run: Run, text: str) -> None:
    words = ["train.py", "--env", f"X={text}", "--annotation", f"a={text}", "--", "first", text, "last"]
    for job in rendered(run, *words):
        # Kubernetes expands $(NAME), and makes $$ a dollar: what arrives is the text itself.
        arguments = [word.replace("$$", "$") for word in container(job)["command"]]
        assert arguments[-3:] == ["first", text, "last"]
        (value,) = [v["value"] for v in container(job)["env"] if v["name"] == "X"]
        assert value.replace("$$", "$") == text
        assert job["metadata"]["annotations"]["a"] == text
    assert not Path("owned").exists()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_where_it_does_not_belong_is_refused_in_one_clean_line(run: Run, text: str) -> None:
    Path("train.py").write_text("")
    for flag in ("--name", "--image", "--label", "--queue", "--checkpoint", "--cpu"):
        value = f"team={text}!" if flag == "--label" else f"{text}!"
        code, stdout, stderr = run("render", "train.py", flag, value)
        assert (code, stdout) == (2, "")
        assert_harmless(stderr)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "text", [t for t in TEXTS.values() if t.strip()], ids=[n for n, t in TEXTS.items() if t.strip()]
)
def test_text_from_the_cluster_does_not_reach_the_terminal(fake: Any, run: Run, text: str) -> None:
    builder = JobBuilder()
    builder.job["metadata"]["annotations"] = {"flk.dev/owner": text}
    builder.pod(0, "Pending", {"waiting": {"reason": "ErrImagePull", "message": text}})
    builder.event("FailedCreatePod", text).add_to(fake)
    for words in (["status", "gpt"], ["list"], ["why", "gpt"]):
        _, stdout, stderr = run(*words)
        assert_harmless(stdout + stderr)
    fake.fail(403, fake.status(403, text))
    assert_harmless(run("suspend", "gpt")[2])


def assert_harmless(output: str) -> None:
    """No control character but the line end and the tab, and no mark that changes the direction of writing."""
    bad = {c for c in output if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202e\u2066"}
    assert not bad, output[:300]


COMMANDS = [
    ["list"],
    ["status", "gpt"],
    ["status", "gpt", "-o", "json"],
    ["why", "gpt"],
    ["wait", "gpt", "--timeout", "0"],
    ["logs", "gpt", "--no-follow"],
    ["doctor"],
    ["suspend", "gpt", "--no-wait"],
    ["resume", "gpt"],
    ["delete", "gpt", "--no-wait"],
    ["submit", "train.py", "--dry-run", "-o", "yaml"],
]


@pytest.mark.promise("Clusters: No secret is printed, logged or kept")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("fault", [None, 401, 200])
def test_credentials_are_never_printed(
    fake: Any, run: Run, words: list[str], fault: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text("")
    JobBuilder().add_to(fake)
    if fault is not None:
        body = f"<html>{TOKEN}</html>".encode()
        fake.fail(fault, body, times=3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    _, stdout, stderr = run(*words, "--request-timeout", "2s")
    assert stdout + stderr
    assert TOKEN not in stdout + stderr


def test_credentials_are_not_in_the_traceback_of_a_bug(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import traceback

    def bug(*_: object, **__: object) -> None:
        raise KeyError("a bug of flk")

    monkeypatch.setattr("flk.kube.client.ApiClient._json", bug)
    with pytest.raises(KeyError):
        run("list")
    assert TOKEN not in "".join(traceback.format_exception(*sys.exc_info()))


@pytest.mark.parametrize(
    "mark", ["\u061c", "\u200b", "\u200e", "\u2028", "\u2029", "\u202e", "\u2066", "\ufeff", "\ud800"]
)
def test_marks_that_are_not_seen_are_not_printed(mark: str) -> None:
    assert printable(f"a{mark}b") == "ab"
    assert printable(f"a{mark}b", colour=True) == "ab"
    assert one_line(f"\u00e9{mark}\u6f22") == f"\u00e9{' ' * mark.isspace()}\u6f22"
