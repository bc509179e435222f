"""Reading flk.yaml: what YAML would silently change or drop is an error that names the place."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.spec import file as jobfile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: 1\nreplicas: 2\n", "f.yaml:2:1: the key 'replicas' is repeated"),
        ("env:\n  A: x\n  A: y\n", "f.yaml:3:3: the key 'A' is repeated"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: contains more than one document"),
        ("- a\n", "f.yaml: must be a mapping of keys to values"),
        ("just text", "f.yaml: must be a mapping of keys to values"),
        ("1: x", "f.yaml: 1: a key must be text (is 1)"),
        ("[a]: x", "f.yaml:1:1: a key must be text"),
        ("name: !!timestamp 2026-01-01", "f.yaml: name: is of the type date"),
        ("name: !!binary aGk=", "f.yaml: name: is of the type bytes"),
        ("a: !!python/object:os.system x", "f.yaml:1:4: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"),  # noqa: E501
        ("a: &a [*a]", "f.yaml: a[0] contains itself"),
        ("a: " + "[" * 3000, "f.yaml: is nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "f.yaml: is nested too deeply"),
        ("a: " + "[" * 499_000, "f.yaml: is nested too deeply"),  # libyaml's constructor would overflow the stack
        ("- " * 200_000, "f.yaml: is nested too deeply"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_a_mistake_names_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        jobfile.mapping(text, "f.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),  # the end of the message is that of libyaml, or that of PyYAML where there is no libyaml
    [
        ("a: [1\n", r"f\.yaml:2:1: (did not find )?expected ',' or '\]'"),
        ("\ta: 1", r"f\.yaml:1:1: found character .*that cannot start any token"),
        ("a: *b", r"f\.yaml:1:4: found undefined alias"),
        # Values that their types cannot have.
        *((f"a: {value}", r"f\.yaml") for value in ("!!bool maybe", "!!timestamp x", "!!int x", "!!float x")),
        *((f"a: {value}", r"f\.yaml") for value in (f"0x{'f' * 5000}", "9" * 5000)),
    ],
    ids=lambda value: value[:40],
)
def test_a_mistake_in_the_syntax_or_in_a_value_names_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        jobfile.mapping(text, "f.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-3", -3), ("+1", 1), ("0", 0), ("0o17", 15), ("0x1F", 31),
        ("0.5", 0.5), (".5", 0.5), ("1.", 1.0), ("1e3", 1000.0), ("-1.5E-2", -0.015), (".inf", math.inf),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        # Text to YAML 1.2, but numbers, booleans or dates to YAML 1.1.
        *((text, text) for text in ("yes", "No", "on", "OFF", "y", "1:30", "1_000", "0b1", "2026-01-01", "12:30:45")),
        # Octal to YAML 1.1, decimal to YAML 1.2.
        *((text, text) for text in ("010", "00", "08", "-01")),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = jobfile.mapping(f"a: {text}", "f.yaml")["a"]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env: {on: x, no: y}", {"env": {"on": "x", "no": "y"}}),  # keys are booleans to YAML 1.1
        ("a: &a {x: '1', y: '2'}\nb: {<<: *a, y: '3'}", {"a": {"x": "1", "y": "2"}, "b": {"x": "1", "y": "3"}}),
        *((text, {}) for text in ("", "# only a comment\n", "---\n")),
    ],
)
def test_keys_are_text_aliases_and_merges_work_and_an_empty_file_holds_nothing(text: str, expected: object) -> None:
    assert jobfile.mapping(text, "f.yaml") == expected


@given(st.from_regex(r"\A[-+.~A-Za-z0-9_:<=]{0,12}\Z"))
def test_no_scalar_changes_silently(text: str) -> None:
    try:
        value = jobfile.mapping(f"a: {text}", "f.yaml").get("a")
    except UsageError:
        return
    assert not isinstance(value, str) or value == text
    if isinstance(value, int) and not isinstance(value, bool):
        assert value == int(text, 0)
    if isinstance(value, float) and value == value:
        assert value == float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))


def test_aliases_that_explode_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(UsageError, match="contains more than"):
        jobfile.mapping("\n".join(lines), "f.yaml")


def test_what_is_merged_may_itself_have_merged_keys_of_its_own_names() -> None:
    text = "patch: {a: {base: &base {x: '1', y: '1'}, own: &own {<<: *base, x: '2'}}, b: {<<: *own, y: '3'}}\n"
    patch = {"a": {"base": {"x": "1", "y": "1"}, "own": {"x": "2", "y": "1"}}, "b": {"x": "2", "y": "3"}}
    assert jobfile.mapping(text, "f.yaml") == {"patch": patch}
    with pytest.raises(UsageError, match="the key 'x' is repeated"):
        jobfile.mapping(text.replace("x: '2'", "x: '2', x: '4'"), "f.yaml")


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


def test_a_manifest_is_no_job_file_and_the_hint_says_how_it_becomes_one(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: old}\n")
    with pytest.raises(UsageError, match=r"old\.yaml: is a manifest of a PyTorchJob, not a job file") as caught:
        jobfile.job_fields(str(tmp_path / "old.yaml"))
    assert "flk convert" in caught.value.hint
