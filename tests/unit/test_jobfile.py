"""Reading flk.yaml: what YAML would silently change or drop is an error that names the place."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.spec import file as jobfile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: 1\nreplicas: 2\n", "f.yaml:2:1: the key 'replicas' is here twice"),
        ("env:\n  A: x\n  A: y\n", "f.yaml:3:3: the key 'A' is here twice"),
        ("a: [1\n", "f.yaml:2:1: expected ',' or ']', but got '<stream end>'"),
        ("\ta: 1", "f.yaml:1:1: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: holds more than one document"),
        ("- a\n", "f.yaml: must be a mapping of keys to values"),
        ("just text", "f.yaml: must be a mapping of keys to values"),
        ("env: {on: x}", "f.yaml: env.True: a key must be text (is True)"),
        ("1: x", "f.yaml: 1: a key must be text (is 1)"),
        ("[a]: x", "f.yaml:1:1: a key must be text"),
        ("name: 2026-01-01", "f.yaml: name: is a date to YAML"),
        ("name: !!binary aGk=", "f.yaml: name: is of the kind bytes to YAML"),
        ("a: !!python/object:os.system x", "f.yaml:1:4: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"),  # noqa: E501
        ("a: &a [*a]", "f.yaml: a[0] contains itself"),
        ("a: *b", "f.yaml:1:4: found undefined alias 'b'"),
        ("a: " + "[" * 3000, "f.yaml: is nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "f.yaml: is nested too deeply"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        jobfile.mapping(text, "f.yaml")
    assert str(caught.value) == message


def test_aliases_that_explode_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(UsageError, match="holds more than"):
        jobfile.mapping("\n".join(lines), "f.yaml")


def test_aliases_and_merges_work() -> None:
    text = "base: &base {a: '1', b: '2'}\nenv: {<<: *base, b: '3'}\n"
    assert jobfile.mapping(text, "f.yaml")["env"] == {"a": "1", "b": "3"}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_holds_nothing(text: str) -> None:
    assert jobfile.mapping(text, "f.yaml") == {}


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_bytes(b"\xef\xbb\xbfcommand: train.py\n")
    assert jobfile.read(str(good)) == {"command": "train.py"}
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: \xe4\n")
    with pytest.raises(UsageError, match="is not UTF-8"):
        jobfile.read(str(latin))
    with pytest.raises(UsageError, match=r"cannot read .*: no such file or directory"):
        jobfile.read(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match=r"cannot read .*: is a directory"):
        jobfile.read(str(tmp_path))
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (jobfile.SIZE_LIMIT + 1))
    with pytest.raises(UsageError, match="is longer than"):
        jobfile.read(str(large))


@given(st.text())
def test_any_text_is_a_mapping_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(jobfile.mapping(text, "f.yaml"), dict)
