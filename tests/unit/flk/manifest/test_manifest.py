"""Manifests as YAML: what is written reads the same, also for parsers of other versions of YAML."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flk.manifest import text as manifest

# Everything that any version of YAML, or a lenient parser, has ever read as a number, a truth value or nothing.
SPECIAL = re.compile(r"[-+.]?[0-9].*|[-+]?\.?(inf|nan)(inity)?|y|n|yes|no|on|off|true|false|null|~|", re.IGNORECASE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),  # noqa: E501
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=5))
def test_what_is_written_reads_the_same(data: dict[str, Any]) -> None:
    assert list(yaml.safe_load_all(manifest.to_yaml([data, data]))) == [data, data]
    assert json.loads(manifest.to_json([data]))["items"] == [data]


@pytest.mark.parametrize(
    "text",
    ["1e3", "1_000", "0o17", "0x1F", "12:30:45", "y", "Off", "null", "~", ".5", "+1", "NaN", ".inf", "2026-01-01"],
)
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert f'value: "{text}"' in manifest.to_yaml([{"value": text}])


@given(st.from_regex(r"\A[-+.~A-Za-z0-9_/:]{0,12}\Z"))
def test_what_is_not_quoted_looks_like_nothing_else(text: str) -> None:
    line = manifest.to_yaml([{"value": text}]).splitlines()[-1]
    if line == f"value: {text}":
        assert not SPECIAL.fullmatch(text)


def test_what_is_plain_stays_plain() -> None:
    text = manifest.to_yaml([{"image": "flktrain/flk:0.1.0-cpu", "path": "/flk/ship", "key": "nvidia.com/gpu"}])
    assert '"' not in text
