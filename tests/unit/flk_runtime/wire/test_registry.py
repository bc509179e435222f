"""Sets of messages: what is read is checked, and what a newer flk adds is ignored."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_diloco.messages import MESSAGES as diloco
from flk_runtime.launcher.replication.exchange import MESSAGES as replication
from flk_runtime.launcher.transport.messages import MESSAGES as rendezvous
from flk_runtime.shared.memory_messages import MESSAGES as memory
from flk_runtime.wire import MessageError, Registry
from tests.support.messages import VALUES, check_types


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


def test_what_is_as_by_default_does_not_travel() -> None:
    assert MESSAGES.encode(Report(1, 2.0, slow=False)) == b'["Report",{"number":1,"share":2.0}]'


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
        b'["Report",{"number":1,"share":1' + b"0" * 400 + b"}]",
        b'["Report",{"number":1' + b"0" * 400 + b',"share":1}]',
        b'["Report",{"number":1,"share":1,"pods":{"1' + b"0" * 400 + b'":["a",1]}}]',
        b"[" * 3000,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="not a message"):
        MESSAGES.decode(data)


JSON = st.recursive(
    st.sampled_from(VALUES) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "registry", [rendezvous, replication, memory, diloco], ids=["rendezvous", "replication", "memory", "diloco"]
)
@given(data=st.data())
def test_any_json_in_the_place_of_a_message_is_refused_or_has_the_right_types(
    registry: Registry[Any], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(registry._classes.values(), key=lambda each: each.__name__)))
    fields = {field.name: data.draw(JSON) for field in dataclasses.fields(kind)}
    try:
        found = registry.decode(json.dumps([kind.__name__, fields]).encode())
    except MessageError:
        return
    check_types(found, kind)
