"""Values: a nested state as builtin values and tensors, from which it is made again as it was, without running code.

Numbers, texts, lists, tuples and dictionaries stand for themselves. A tensor is a dictionary with the key `REFERENCE`.
A value of another class is one with the key `VALUE`: its kind, the name of its class, and its content. NumPy's values,
enumerations, dataclasses, classes that are derived from builtin ones (named tuples too), and a few classes of the
standard library are such. A class of the script is found by its name in a module that it has imported, and neither its
constructor nor its __setstate__ is called.
"""

from __future__ import annotations

import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from flk_runtime.errors import MismatchError

Path = tuple[str | int, ...]  # where a value is in a nested state: keys of dictionaries, indices of lists
TakeTensor = Callable[[torch.Tensor, Path], Any]

REFERENCE: Final = "flk.tensor"  # the key of the dictionary that stands for a tensor; its value is the name
VALUE: Final = "flk.value"  # the key of the dictionary that stands for a value of another class

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size})
_MAPPINGS: Final = (OrderedDict, defaultdict, dict)
_SEQUENCES: Final = (list, deque, set, bytearray)  # are filled after they are made
_FIXED: Final = (tuple, frozenset, int, float, str, bytes)  # are made of their content
_BASES: Final = {each.__name__: each for each in (*_MAPPINGS, *_SEQUENCES, *_FIXED)}
_CALLED: Final[dict[str, Any]] = {  # classes whose objects are made of the arguments that pickle would take
    # The names are those in checkpoints: __module__ differs between releases of Python.
    "builtins:range": range,
    "builtins:slice": slice,
    "decimal:Decimal": decimal.Decimal,
    "fractions:Fraction": fractions.Fraction,
    "uuid:UUID": uuid.UUID,
    "datetime:date": datetime.date,
    "datetime:datetime": datetime.datetime,
    "datetime:time": datetime.time,
    "datetime:timedelta": datetime.timedelta,
    "datetime:timezone": datetime.timezone,
    "pathlib:PosixPath": pathlib.PosixPath,
    "pathlib:PurePosixPath": pathlib.PurePosixPath,
    "pathlib:PureWindowsPath": pathlib.PureWindowsPath,
}
_CALL_NAMES: Final = {kind: name for name, kind in _CALLED.items()}
_FACTORIES: Final = {each.__name__: each for each in (*_BASES.values(), bool, complex, Counter)}  # of a defaultdict
_LARGE: Final = 1 << 14  # bytes of an array that are saved as a tensor, of which each rank reads what it needs

_BEYOND: Final = 1 << 2039  # pickle has another code for integers of more than 255 bytes, which torch.load refuses

_known: set[type] = set()  # classes of which an object has been made again


def name_of(path: Path) -> str:
    """The name of a path, as torch.distributed.checkpoint makes it."""
    return ".".join(map(str, path))


def encode(value: Any, path: Path, take: TakeTensor) -> Any:
    """``value``, which stands at ``path``, as builtin values; ``take`` returns what stands for a tensor.

    Raises CheckpointError with the path and the class of what cannot be made again.
    """
    try:
        return _encode(value, path, take)
    except RecursionError:
        raise MismatchError(f"cannot save {name_of(path)!r}: it is too deep, or holds itself") from None


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which `encode` has made ``value``; ``tensors`` are by the names of references.

    Raises CheckpointError if it needs a class that the script has not imported, lacks a tensor, or is damaged.
    """
    kind = type(value)
    if isinstance(value, Mapping):
        if value.keys() == {REFERENCE}:
            if value[REFERENCE] not in tensors:
                raise MismatchError(f"it refers to the tensor {value[REFERENCE]!r}, which the checkpoint lacks")
            return tensors[value[REFERENCE]]
        if value.keys() == {VALUE}:
            try:
                return _decode(value[VALUE], tensors)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise MismatchError(f"a value in it is damaged: {error}") from error
        return {key: decode(each, tensors) for key, each in value.items()}
    if kind in (list, tuple) and not _PLAIN.issuperset(map(type, value)):
        return kind([decode(each, tensors) for each in value])
    return value


def references(value: Any) -> Iterator[str]:
    """The names of the tensors that an encoded value refers to."""
    if isinstance(value, Mapping):
        if value.keys() == {REFERENCE}:
            yield value[REFERENCE]
            return
        value = value.values()
    elif type(value) not in (list, tuple) or _PLAIN.issuperset(map(type, value)):
        return
    for each in value:
        yield from references(each)


def _encode(value: Any, path: Path, take: TakeTensor) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        _check_numbers([value], path)
        return value
    if isinstance(value, torch.Tensor):
        taken = take(value, path)
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not (is_parameter or value.requires_grad):
            return taken
        return {VALUE: ("parameter" if is_parameter else "leaf", value.requires_grad, taken)}
    if kind in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):
            _check_numbers(value, path)
            return value
        return kind([_encode(each, (*path, index), take) for index, each in enumerate(value)])
    if kind is dict and _PLAIN.issuperset(map(type, value)) and not value.keys() & {REFERENCE, VALUE}:
        _check_numbers(value, path)
        return {key: _encode(each, (*path, str(key)), take) for key, each in value.items()}
    encoded = _encode_object(value, path, take)
    if encoded[0] == "object" and kind not in _known:
        _check(value, path)
    return {VALUE: encoded}


def _check_numbers(values: Collection[Any], path: Path) -> None:
    """Raise CheckpointError if there is an integer among plain values that torch.load cannot read."""
    integers = [each for each in values if type(each) is int]
    if integers and not -_BEYOND <= min(integers) <= max(integers) < _BEYOND:
        raise MismatchError(
            f"cannot save {name_of(path)!r}: it has an integer of more than 255 bytes, which torch.load cannot read: "
            "save it as a text, as hex() makes it"
        )


def _encode_object(value: Any, path: Path, take: TakeTensor) -> tuple[Any, ...]:
    kind = type(value)
    if kind is bytes:  # of which torch.load takes not all
        return "bytes", "", _text(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if numpy := sys.modules.get("numpy"):
        if kind is numpy.ndarray and not value.dtype.hasobject:
            return "array", _dtype(value.dtype, path), (value.shape, _bytes(value, path, take))
        if isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return "number", _dtype(value.dtype, path), _text(value.tobytes())
    if isinstance(value, enum.Flag) and _find(name) is kind:
        return "flag", name, value.value  # combined ones have no name
    if isinstance(value, enum.Enum):
        if _find(name) is not kind or kind.__members__.get(value.name) is not value:
            raise _refusal(value, path)
        return "member", name, value.name
    if kind in _CALL_NAMES:
        return "call", _CALL_NAMES[kind], _encode(_arguments(value), path, take)
    base = next((each for each in _BASES.values() if isinstance(value, each)), None)
    if base is None and not dataclasses.is_dataclass(value):
        raise _refusal(value, path)
    if base is None:
        return "object", name, ("object", None, None, _encode(_attributes(value), path, take))
    content, more = _content(value, base, path, take)
    # An attribute may have the name of an entry, and both hold a tensor. None: the entries are the attributes.
    is_mirror = getattr(value, "__dict__", None) is value
    attributes = None if is_mirror else _encode(_attributes(value), (*path, "__dict__"), take)
    return "object", name, (base.__name__, content, more, attributes)


def _content(value: Any, base: Any, path: Path, take: TakeTensor) -> tuple[Any, Any]:
    """The entries of an object of a class derived from ``base``, and what its base is made with beside them."""
    if base in _MAPPINGS:
        pairs = [(_encode(key, path, take), _encode(each, (*path, str(key)), take)) for key, each in base.items(value)]
        factory = value.default_factory if base is defaultdict else None
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise MismatchError(
                f"cannot save {name_of(path)!r}: it is a defaultdict of {getattr(factory, '__name__', factory)}, which "
                "a checkpoint cannot hold: use a builtin class, such as int or list"
            )
        return pairs, factory and factory.__name__
    if base is bytearray:
        return {VALUE: ("bytes", "", _text(value))}, None
    if base in (tuple, frozenset, *_SEQUENCES):
        items = [_encode(each, (*path, index), take) for index, each in enumerate(base.__iter__(value))]
        return items, value.maxlen if base is deque else None
    return _encode(base.__getnewargs__(value)[0], path, take), None


def _text(value: bytes | bytearray) -> str:
    return value.decode("latin-1")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object: those in its __dict__, and those in slots."""
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {**{each: getattr(value, each) for each in slots if hasattr(value, each)}, **getattr(value, "__dict__", {})}


def _arguments(value: Any) -> tuple[Any, ...]:
    """What the class of a value of the standard library is called with to make it again."""
    if isinstance(value, uuid.UUID):
        return (value.hex,)
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    made, arguments = value.__reduce_ex__(4)[:2]  # an earlier protocol has no fold of a time
    return tuple(arguments[1:] if made is copyreg.__newobj__ else arguments)  # type: ignore[attr-defined]


def _dtype(dtype: Any, path: Path) -> Any:
    """A dtype of NumPy as builtin values."""
    numpy = sys.modules["numpy"]
    found = dtype.str if dtype.names is None else dtype.descr
    if numpy.dtype(found) != dtype:
        raise MismatchError(f"cannot save {name_of(path)!r}: it has the dtype {dtype}, which NumPy cannot make again")
    return found


def _bytes(array: Any, path: Path, take: TakeTensor) -> Any:
    """The bytes of an array; of a large one what stands for the tensor of them."""
    if array.nbytes < _LARGE:
        return _text(array.tobytes())
    return take(torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8), path)


def _check(value: Any, path: Path) -> None:
    """Raise CheckpointError if no object of the class of ``value`` can be made again; once for each class."""
    kind = type(value)
    try:
        made = _decode(_encode_object(value, path, lambda tensor, _: tensor), {})
    except (MismatchError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refusal(value, path) from error
    if type(made) is not kind:
        raise _refusal(value, path)
    _known.add(kind)


def _refusal(value: Any, path: Path) -> MismatchError:
    kind = type(value)
    return MismatchError(
        f"cannot save {name_of(path)!r}: it is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
        "hold; a state may hold tensors, NumPy's arrays, numbers, texts, dates, paths, lists, dictionaries, and "
        "dataclasses, named tuples and enumerations whose class stands at the top of a module"
    )


def _find(name: str) -> type | None:
    """The class of a name, in a module that is imported. A module's own __getattr__ is not asked."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return found if isinstance(found, type) else None


def _decode(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `_encode_object` has encoded."""
    kind, name, content = encoded
    if kind in ("parameter", "leaf"):
        tensor = decode(content, tensors)
        return torch.nn.Parameter(tensor, name) if kind == "parameter" else tensor.requires_grad_(name)
    if kind == "bytes":
        return content.encode("latin-1")
    if kind in ("array", "number"):
        return _decode_array(name, content, tensors)
    if kind == "call":
        return _CALLED[name](*decode(content, tensors))
    if (found := _find(name)) is None:
        raise MismatchError(f"no imported module has the class {name.replace(':', '.')}")
    if kind == "flag" and issubclass(found, enum.Flag):
        return found(content)
    if kind == "member" and issubclass(found, enum.Enum):
        return found.__members__[content]
    if kind == "object":
        return _decode_object(found, content, tensors)
    raise MismatchError(f"{name} is no {kind}")


def _decode_array(dtype: Any, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if isinstance(content, str):
        # The dtype of an empty text has no bytes.
        return numpy.frombuffer(content.encode("latin-1"), kind)[0] if kind.itemsize else numpy.zeros((), kind)[()]
    shape, data = content[0], decode(content[1], tensors)
    if 0 in shape or not kind.itemsize:
        return numpy.zeros(shape, kind)
    flat = data.numpy() if isinstance(data, torch.Tensor) else bytearray(data, "latin-1")
    return numpy.frombuffer(flat, kind).reshape(shape)


def _decode_object(found: type, encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    base, content, more, attributes = encoded
    kind: Any = _BASES.get(base, object)
    if not (issubclass(found, kind) if base in _BASES else dataclasses.is_dataclass(found)):
        raise MismatchError(f"{found.__qualname__} is no {base}")
    made: Any
    if kind in _MAPPINGS:
        made = kind.__new__(found)
        if kind is defaultdict and more is not None:
            object.__setattr__(made, "default_factory", _FACTORIES[more])
        for key, value in content:
            kind.__setitem__(made, decode(key, tensors), decode(value, tensors))
    elif kind in _SEQUENCES:
        made = kind.__new__(found)
        kind.__init__(made, decode(content, tensors), *([more] if kind is deque else []))
    else:
        made = object.__new__(found) if kind is object else kind.__new__(found, decode(content, tensors))
    if attributes is None:
        made.__dict__ = made
        return made
    slots = set(copyreg._slotnames(found))  # type: ignore[attr-defined]
    for name, value in decode(attributes, tensors).items():
        if name in slots:
            object.__setattr__(made, name, value)
        else:
            made.__dict__[name] = value
    return made
