"""Rows of environment variables: names, defaults, and what wrong text is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.variable import Setting, Variable, VariableError, is_count

ROWS = [row for module in (pod_env, user_env) for row in vars(module).values() if isinstance(row, Variable)]


def test_a_row_is_the_name_of_its_variable_and_a_copy_is_that_name_alone() -> None:
    assert user_env.KEEP == "FLK_KEEP"
    assert type(copy.deepcopy(user_env.KEEP)) is str
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_an_unset_or_empty_variable_has_its_default(row: Variable[Any]) -> None:
    assert row.read({}) == row.read({row: ""}) == row.default


@pytest.mark.parametrize(
    ("row", "text", "value"),
    [
        (user_env.LEASE, "0.5", 0.5),
        (user_env.SAVE_EVERY, "10", 10),
        (user_env.MEMORY_LIMIT, "1.5Ki", 1536),
        (user_env.MEMORY_LIMIT, "0", 0),
        *((row, str(row.default), row.default) for row in ROWS if isinstance(row.default, int | float)),
    ],
)
def test_text_is_converted_and_a_default_is_a_value_that_its_variable_may_have(
    row: Variable[Any], text: str, value: Any
) -> None:
    assert row.read({row: text}) == value


@pytest.mark.parametrize(
    ("row", "text", "problem"),
    [
        (user_env.LEASE, "0.4", "expected a number of seconds, 0.5 or more"),
        (user_env.LEASE, "nan", "expected a number of seconds, 0.5 or more"),
        (user_env.PREFLIGHT_TIMEOUT, "inf", "expected a number of seconds, 0 or more"),
        (user_env.SLOW_WINDOW, "x", "expected a number of seconds"),
        (user_env.SEED, str(1 << 63), "expected an integer, 0 or more"),
        (user_env.SAVE_EVERY, "1e3", "expected a number of steps from 0 to 2147483647"),
        (pod_env.PODS, "0", "expected an integer, 1 or more"),
        (pod_env.BATCH, "halve", "expected keep or scale"),
        (user_env.MEMORY_LIMIT, "8GB", "expected a number of bytes such as 8Gi or 500Mi"),
    ],
)
def test_wrong_text_is_named_with_what_was_expected(row: Variable[Any], text: str, problem: str) -> None:
    with pytest.raises(VariableError) as caught:
        row.read({row: text})
    assert str(caught.value) == f"{row}={text}: {problem}"


def test_users_may_set_the_settings_only() -> None:
    assert {row for row in ROWS if isinstance(row, Setting)} == user_env.SETTABLE
    assert not user_env.is_reserved("FLK_KEEP")
    assert user_env.is_reserved("FLK_PODS")


@pytest.mark.parametrize(
    ("value", "found"), [(2, True), (1, True), (0, False), (True, False), (1.0, False), ("1", False)]
)
def test_a_count_is_an_integer_from_the_least_on(value: object, found: bool) -> None:
    assert is_count(value, 1) is found
