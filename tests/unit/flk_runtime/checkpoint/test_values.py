"""Values of states come back as they were, and what cannot is refused with its key and its class."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import random
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flk_runtime.checkpoint.state import encode_whole, split_tensors
from flk_runtime.checkpoint.values import decode, references
from flk_runtime.errors import MismatchError
from tests.support.saved import read_back

Point = namedtuple("Point", "x y")


class Phase(enum.Enum):
    WARM = bytearray(b"not hashable")
    FULL = 2


class Count(enum.IntEnum):
    ONE = 1


class Pairs(enum.Flag):
    A = 1
    B = 2


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Text(str, enum.Enum):
    A = "a"


class Numbers(list[int]):
    pass


@dataclasses.dataclass
class Best:
    step: int
    weights: Any = None

    def __post_init__(self) -> None:
        assert self.step > 0

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("it is called")


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("value",)
    value: Any


VALUES = [
    1, 10**40, 0.1, float("inf"), 1 + 2j, True, None, "ü\0", torch.float16,
    b"\0\xff", b"", {b"": b"a"}, bytearray(b"ab"),
    (1, (2,)), [1, [2.5, None]], {1, 2}, frozenset({"a"}), range(1, 9, 3), slice(1, None, 2),
    {1: "a", (1, 2): "b", Phase.FULL: "c", None: "d"}, {"flk.tensor": "x"}, {"flk.value": 3, "a": 1},
    deque([1, [2]], maxlen=3), defaultdict(list, a=[1]), defaultdict(None, a=1), Counter("abca"),
    OrderedDict(b=1, a=2), Point(1, torch.ones(2)), Best(3, [torch.zeros(2)]), Slotted([1]),
    Phase.WARM, Phase.FULL, Count.ONE, Text.A, Pairs.A, Pairs.A | Pairs.B, Pairs(0), Bits.A | Bits.B,
    pathlib.PosixPath("/x/y"),
    datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.timedelta(1, 2),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")), datetime.time(1, 2),
    datetime.datetime(2026, 1, 2, fold=1), datetime.time(1, 2, fold=1), pathlib.PureWindowsPath("c:/x"),
    np.float64(0.5), np.float32(0.1), np.int64(5), np.bool_(True), np.str_("x"), np.datetime64("2026-01-02"),
    np.str_(""), np.bytes_(b""), np.zeros(2, "V0"), np.zeros((), "V0")[()],
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 3), np.int8),
    np.array(["a", "bc"]), np.array(3.0, dtype=">f8"), np.arange(20_000, dtype=np.int32).reshape(100, 200),
    np.random.RandomState(0).get_state(),
    np.random.default_rng(0).bit_generator.state, random.Random(1).getstate(),
    [torch.ones(2), {"a": (torch.zeros(1), 2)}], {1: torch.ones(2)}, {(1, 2): torch.ones(1)},
    deque([torch.ones(2)]), defaultdict(int, a=torch.ones(1)), OrderedDict(z=torch.ones(1), a=[torch.zeros(1)]),
    nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, requires_grad=True),
    nn.Linear(2, 2).state_dict(), torch.Size([1, 2]), torch.device("cpu"),
]  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, and of the same classes throughout."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.requires_grad == second.requires_grad
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, dict):
        pairs = list(first.items()), list(second.items())
        factories = getattr(first, "default_factory", None) is getattr(second, "default_factory", None)
        return same(*pairs) and factories and getattr(first, "_metadata", 0) == getattr(second, "_metadata", 0)
    if isinstance(first, deque):
        return first.maxlen == second.maxlen and same(list(first), list(second))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Best):
        return same(vars(first), vars(second))
    return bool(first == second) and getattr(first, "fold", 0) == getattr(second, "fold", 0)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    split = split_tensors({"v": value}, ("extra",))
    tensors = {chunk.name: chunk.tensor.clone() for chunk in split.chunks}
    plain = read_back(split.plain)
    assert set(references(plain)) == tensors.keys()
    assert same(decode(plain, tensors), {"v": value})
    assert same(decode(read_back(encode_whole({"v": value}, ("extra",))), {}), {"v": value})


@dataclasses.dataclass
class Loop:
    itself: Any = None


def make_loop() -> Any:
    made = Loop()
    made.itself = made
    return made


class Foreign:
    """A class of no kind that is known."""


def local_class() -> Any:
    @dataclasses.dataclass
    class Inner:
        x: int = 1

    return Inner()


def local_flag() -> Any:
    class Inner(enum.Flag):
        A = 1

    return Inner.A


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Foreign(), "'extra.best.0': it is a tests.unit.flk_runtime.checkpoint.test_values.Foreign"),
        (lambda: 1, "'extra.best.0': it is a builtins.function"),
        (Foreign, "'extra.best.0': it is a builtins.type"),
        (np.array([{}]), "'extra.best.0': it is a numpy.ndarray"),
        (torch.Generator(), "'extra.best.0': it is a torch._C.Generator"),
        (local_class(), "'extra.best.0': it is a .*<locals>.Inner"),
        (local_flag(), "'extra.best.0': it is a .*<locals>.Inner"),
        (Best(1, Foreign()), "'extra.best.0.weights': it is a .*Foreign"),
        (defaultdict(lambda: 1), "'extra.best.0': it is a defaultdict of <lambda>, .*: use a builtin class"),
        (Numbers(), "'extra.best.0': it is a .*Numbers"),
        (uuid.UUID(int=7), "'extra.best.0': it is a uuid.UUID, .* have state_dict return these, such as str"),
        (np.zeros(1, dtype=[("a", "i4")]), "'extra.best.0': it is a numpy.ndarray"),
        ({Foreign(): 1}, "'extra.best.0': it is a .*Foreign"),
        ({"n": 1 << 2040}, "'extra.best.0.n': it is an integer of more than 255 bytes"),
        (make_loop(), "'extra': it is too deep, or holds itself"),
        (torch.ones(2, device="meta"), "'extra.best.0': it is on the meta device"),
        (torch.eye(2).to_sparse(), "'extra.best.0': it has the layout torch.sparse_coo"),
        (torch.return_types.max((torch.ones(1), torch.ones(1))), "'extra.best.0': it is a torch.return_types.max"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_come_back_is_refused_with_its_key_and_class(value: Any, words: str) -> None:
    with pytest.raises(MismatchError, match=f"cannot save {words}"):
        split_tensors({"best": [value]}, ("extra",))
    with pytest.raises(MismatchError, match=f"cannot save {words}"):
        encode_whole({"best": [value]}, ("extra",))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (("object", "subprocess:Popen", (None, {})), "Popen is no dataclass and no named tuple"),
        (("object", "builtins:tuple", ([], {})), "tuple is no dataclass"),
        (("member", "builtins:int", "real"), "builtins:int is no member"),
        (
            ("object", "no.such.module:Class", (None, {})),
            "no imported module has the class no.such.module.C",
        ),
        (("object", "os:system", (None, {})), "no imported module has the class os.system"),
        (("call", "os:system", (("true",), {}, [], [])), "a value in it is damaged"),
        (("object", "collections:Counter"), "a value in it is damaged"),
        ("three", "a value in it is damaged"),
    ],
)
def test_a_file_makes_objects_of_known_kinds_only(encoded: Any, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        decode({"flk.value": encoded}, {})


class Marked(torch.Tensor):
    """A class of tensors that torch.load does not know."""


def test_a_tensor_of_another_class_is_refused_in_the_state_of_a_rank() -> None:
    words = "cannot save 'extra.a': it is a tests.unit.flk_runtime.checkpoint.test_values.Marked"
    with pytest.raises(MismatchError, match=words):
        encode_whole({"a": torch.ones(2).as_subclass(Marked)}, ("extra",))


def test_a_tensor_in_the_state_of_a_rank_may_have_attributes() -> None:
    tensor = torch.ones(2)
    tensor.note = Foreign()  # type: ignore[attr-defined]
    assert same(decode(read_back(encode_whole([tensor], ("extra",))), {}), [torch.ones(2)])


def test_a_reference_to_a_tensor_that_is_missing_is_told() -> None:
    with pytest.raises(MismatchError, match=r"it refers to the tensor 'extra\.a', which the checkpoint lacks"):
        decode({"a": {"flk.tensor": "extra.a"}}, {})
