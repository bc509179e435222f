"""Sets of messages: what is read is checked, and what a newer flk adds is ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from flk_runtime.wire import MessageError, Registry


class Place(NamedTuple):
    file: str
    line: int = 0


@dataclass(frozen=True)
class Inner:
    places: tuple[Place, ...] = ()
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class Report:
    number: int
    share: float
    name: str = ""
    slow: bool = False
    inner: Inner | None = None
    pods: dict[int, tuple[str, int]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Empty:
    pass


MESSAGES: Registry[Report | Empty] = Registry([Report, Empty])
FULL = Report(
    3, 0.5, "a\nb", True, Inner((Place("train.py", 7),), (2, 3)), {4: ("10.0.0.1", 80)}, {"x": [1]}, [Place("a")]
)


@pytest.mark.parametrize("message", [Report(1, 2.0), FULL, Empty()])
def test_a_message_decodes_to_itself(message: Report | Empty) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


def test_unknown_fields_and_further_values_are_ignored() -> None:
    data = b'["Report",{"number":1,"share":2,"later":3,"inner":{"places":[["a.py",7,"later"]],"later":1}}]'
    assert MESSAGES.decode(data) == Report(1, 2.0, inner=Inner((Place("a.py", 7),)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'["Later",{}]',
        b'["Report"]',
        b'["Report",[]]',
        b'["Report",{"number":1}]',
        b'["Report",{"number":"1","share":1}]',
        b'["Report",{"number":true,"share":1}]',
        b'["Report",{"number":1,"share":"much"}]',
        b'["Report",{"number":1,"share":1,"places":[[]]}]',
        b'["Report",{"number":1,"share":1,"places":7}]',
        b'["Report",{"number":1,"share":1,"pods":{"x":["a",1]}}]',
        b"[" * 3000,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="not a message"):
        MESSAGES.decode(data)
