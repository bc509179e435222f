"""Names: what passes is what Kubernetes takes, and nothing else does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.spec import names
from flk_runtime.contract import user_env

LABEL = re.compile(r"\A[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")


@given(st.text(max_size=70), st.integers(1, 100_000))
def test_an_accepted_job_name_makes_service_names(name: str, replicas: int) -> None:
    try:
        names.job_name(name, replicas)
    except ValueError:
        return
    assert LABEL.match(names.longest(name, replicas))


@given(st.from_regex(r"\A[a-z]([-a-z0-9]*[a-z0-9])?\Z"), st.integers(1, 100_000))
def test_a_service_name_that_fits_is_accepted(name: str, replicas: int) -> None:
    fits = len(names.longest(name, replicas)) <= 63
    if fits:
        assert names.job_name(name, replicas) == name
    else:
        with pytest.raises(ValueError, match="too long"):
            names.job_name(name, replicas)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=2), st.integers(1, 100_000))
def test_a_default_name_is_a_name(command: list[str], replicas: int) -> None:
    name = names.default_name(command, replicas)
    assert names.job_name(name, replicas) == name


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (["train.py"], "train"),
        (["src/My_Train.py", "--lr"], "my-train"),
        (["-m", "package.train"], "train"),
        (["3d.py"], "d"),
        (["___.py"], "job"),
    ],
)
def test_a_default_name_says_what_runs(command: list[str], stem: str) -> None:
    assert re.fullmatch(rf"{stem}-[a-z0-9]{{5}}", names.default_name(command, 4))


@pytest.mark.parametrize("name", [*sorted(user_env.RESERVED_NAMES), "PET_NNODES", "TORCHELASTIC_RUN_ID", "FLK_JOB"])
def test_a_reserved_variable_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is reserved: ."):
        names.variable(name)


def test_settings_of_the_runtime_are_the_users() -> None:
    for name in user_env.SETTABLE:
        assert names.variable(name) == name


ACCEPTED: list[tuple[Callable[[str], str], list[str]]] = [
    (names.object_name, ["a", "my-claim", "a.b-c.d", "0"]),
    (names.data_key, ["key", ".dockerconfigjson", "A_b-c.d"]),
    (names.label_key, ["pool", "example.com/pool", "nvidia.com/gpu.product"]),
    (names.label_value, ["", "a", "A.b_c-1", "x" * 63]),
    (names.queue, ["team-a", "a.b"]),
    (names.namespace, ["default", "a-1"]),
    (names.image, ["a", "team/train:1.2", "registry:5000/a/b@sha256:" + "a" * 64, "r.example.com/a__b:T", "a:5000/b"]),
    (names.module, ["train", "a.b_c.d1", "__main__"]),
    (names.variable, ["A", "_x", "a1", "TOKENIZERS_PARALLELISM"]),
]
REFUSED: list[tuple[Callable[[str], str], list[str]]] = [
    (names.object_name, ["", "A", "-a", "a-", "a..b", "a\n", "ä", "a" * 254]),
    (names.data_key, ["", ".", "..", "..a", "a/b", "a\n", "ä"]),
    (names.label_key, ["", "/a", "a/", "A.com/a", "a/b/c", "x" * 64, "-a", "a\n"]),
    (names.label_value, ["-a", "a-", "a b", "x" * 64, "ä", "a\n"]),
    (names.queue, ["", "A", "x" * 64]),
    (names.namespace, ["", "a.b", "A", "x" * 64, "a\n"]),
    (names.image, ["", "a/B", "a b", "a:", "a\n", "a@sha256:1", ":a", "http://a"]),
    (names.module, ["", "1a", "a.", "a-b", "a/b.py", "a\n"]),
    (names.variable, ["", "1A", "A=B", "A B", "A\n", "ä", "nccl.debug", "a-b"]),
]


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, values in ACCEPTED for value in values])
def test_accepted(check: Callable[[str], str], value: str) -> None:
    assert check(value) == value


# What a refusal says: the rule, or the reason.
RULES = {
    names.object_name: r"must be lower-case letters, digits, '-' and '\.'",
    names.data_key: r"must be letters, digits, '-', '_' and '\.'",
    names.label_key: r"must be at most 63 letters, digits|its prefix must be a domain",
    names.label_value: r"must be at most 63 letters, digits",
    names.queue: r"must be lower-case letters, digits, '-' and '\.'|must be at most 63 letters",
    names.namespace: r"must be at most 63 lower-case letters, digits and '-'",
    names.image: r"must be an image like team/train:1\.2",
    names.module: r"must be the name of a module",
    names.variable: r"must be letters, digits and '_'",
}


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, values in REFUSED for value in values])
def test_refused(check: Callable[[str], str], value: str) -> None:
    with pytest.raises(ValueError, match=f"^(?:{RULES[check]})") as caught:
        check(value)
    if len(value) < 64:
        assert f"(is {value!r})" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "must be an absolute path"),
        ("a", "must be an absolute path"),
        ("/", "must not be the root folder"),
        ("//", "must not be the root folder"),
        ("/a:b", "must not contain ':'"),
        ("/a/../b", "must not contain '..'"),
        ("/flk", "must not be below /flk"),
        ("/flk/x", "must not be below /flk"),
        ("/dev/shm", "must not be below /dev"),
        ("/proc", "must not be below /proc"),
        ("/sys/fs", "must not be below /sys"),
        ("/a\nb", "must not contain control characters"),
        ("/a\0", "must not contain a NUL character"),
        ("/" + "a" * 1024, "must have at most 1,024 characters"),
    ],
)
def test_mount_paths_that_hide_something_are_refused(path: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        names.mount_path(path)
