"""Patches: cases, which tests/unit/chart/test_parity.py gives to the chart too, and properties of generated patches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.manifest.patch import patched

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("patches.yaml").read_text())
NULL = st.none()
SCALARS = st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", "y"])
KEYS = st.sampled_from(["a", "b", "name", "mountPath", "env"])
BASES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
PATCHES = st.recursive(
    SCALARS | NULL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
MAPPINGS = st.dictionaries(KEYS, BASES, max_size=4)
PATCH_MAPPINGS = st.dictionaries(KEYS, PATCHES, max_size=4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_cases(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(UsageError) as caught:
            patched(case["base"], case["patch"])
        assert str(caught.value).startswith("patch" + case["error"])
    else:
        assert patched(case["base"], case["patch"]) == case["result"]


def merged(base: Any, patch: Any) -> Any:
    """The result of a patch; generated patches that are refused do not count as examples."""
    try:
        return patched(base, patch)
    except UsageError:
        assume(False)


def has_twins(value: Any) -> bool:
    """Whether two items of a list have one name or one mountPath, at any depth."""
    if isinstance(value, dict):
        return any(map(has_twins, value.values()))
    if not isinstance(value, list):
        return False
    known = [item for item in value if isinstance(item, dict)]
    given = [[item[key] for item in known if isinstance(item.get(key), str)] for key in ("name", "mountPath")]
    return any(len(set(each)) < len(each) for each in given) or any(map(has_twins, value))


def nulls(value: Any) -> int:
    """The number of keys that are null, at any depth."""
    if isinstance(value, dict):
        return sum((item is None) + nulls(item) for item in value.values())
    return sum(map(nulls, value)) if isinstance(value, list) else 0


@given(MAPPINGS, PATCH_MAPPINGS)
def test_arguments_are_not_changed(base: dict[str, Any], patch: dict[str, Any]) -> None:
    before = copy.deepcopy((base, patch))
    merged(base, patch)
    assert (base, patch) == before


@given(MAPPINGS, PATCH_MAPPINGS)
def test_no_key_of_the_result_is_null(base: dict[str, Any], patch: dict[str, Any]) -> None:
    assert nulls(merged(base, patch)) == 0


@given(MAPPINGS)
def test_an_empty_patch_changes_nothing(base: dict[str, Any]) -> None:
    assert patched(base, {}) == base


@given(MAPPINGS, PATCH_MAPPINGS)
def test_keys_are_those_of_both_without_the_removed_ones(base: dict[str, Any], patch: dict[str, Any]) -> None:
    removed = {key for key, value in patch.items() if value is None}
    assert merged(base, patch).keys() == (base.keys() | patch.keys()) - removed


@given(MAPPINGS, PATCH_MAPPINGS)
def test_a_patch_that_is_applied_twice_is_applied_once(base: dict[str, Any], patch: dict[str, Any]) -> None:
    assume(not has_twins(patch))  # with a base the last one wins, and without one Kubernetes refuses both
    once = merged(base, patch)
    assert merged(once, patch) == once


@given(MAPPINGS, PATCH_MAPPINGS)
def test_values_of_the_patch_that_are_not_collections_win(base: dict[str, Any], patch: dict[str, Any]) -> None:
    result = merged(base, patch)
    for key, value in patch.items():
        if not isinstance(value, dict | list | None):
            assert result[key] == value
