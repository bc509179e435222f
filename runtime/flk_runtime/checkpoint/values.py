"""Values: a nested state as builtin values and tensors, from which it is made again as it was, without running code.

Numbers, texts, lists, tuples and dictionaries stand for themselves. A tensor is a dictionary with the key `REFERENCE`.
A value of another class is one with the key `VALUE`: its kind, the name of its class, and its content. NumPy's values,
enumerations, dataclasses, named tuples, and some classes of the standard library are such. A class of the script is
found by its name in a module that it has imported, and neither its constructor nor its __setstate__ is called.
"""

from __future__ import annotations

import copyreg
import dataclasses
import datetime
import enum
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch

from flk_runtime.errors import MismatchError

Path = tuple[str | int, ...]  # where a value is in a nested state: keys of dictionaries, indices of lists
TakeTensor = Callable[[torch.Tensor, Path], Any]

REFERENCE: Final = "flk.tensor"  # the key of the dictionary that stands for a tensor; its value is the name
VALUE: Final = "flk.value"  # the key of the dictionary that stands for a value of another class

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size})
# Classes whose objects are made as pickle makes them. Their modules differ between releases of Python.
_CLASSES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        *(dict, set, frozenset, bytearray, range, slice, OrderedDict, defaultdict, Counter, deque),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(list, tuple, int, float, bool, str, bytes),  # as what a defaultdict makes
    )
}
_BITS: Final = 255 * 8 - 1  # of an integer that torch.load takes
_LARGE: Final = 1 << 14  # bytes of an array that are saved as a tensor, of which each rank reads what it needs


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
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind in (list, tuple) and not _PLAIN.issuperset(map(type, value)):
        return kind([decode(item, tensors) for item in value])
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
    for item in value:
        yield from references(item)


def _encode(value: Any, path: Path, take: TakeTensor) -> Any:
    kind = type(value)
    if kind is int and value.bit_length() > _BITS:
        raise MismatchError(f"cannot save {name_of(path)!r}: it is an integer of more than 255 bytes: make it a text")
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        taken = take(value, path)
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not (is_parameter or value.requires_grad):
            return taken
        return {VALUE: ("parameter" if is_parameter else "leaf", value.requires_grad, taken)}
    if kind in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):
            return value
        return kind([_encode(item, (*path, index), take) for index, item in enumerate(value)])
    if kind is dict and _PLAIN.issuperset(map(type, value)) and not value.keys() & {REFERENCE, VALUE}:
        return {key: _encode(item, (*path, str(key)), take) for key, item in value.items()}
    return {VALUE: _encode_object(value, path, take)}


def _encode_object(value: Any, path: Path, take: TakeTensor) -> tuple[Any, ...]:
    kind = type(value)
    if kind is bytes:  # of which torch.load takes not all
        return "bytes", "", value.decode("latin-1")
    if _CLASSES.get(kind.__name__) is kind:
        return "call", kind.__name__, _reduced(value, path, take)
    if isinstance(value, type) and value in _CLASSES.values():
        return "class", value.__name__, None
    if (numpy := sys.modules.get("numpy")) and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        content = _encode_array(numpy.asarray(value), value, path, take)
        return "array" if kind is numpy.ndarray else "number", *content
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise _refusal(value, path)
    if isinstance(value, enum.Enum):  # combined flags have no name
        return "member", name, value.value if isinstance(value, enum.Flag) else value.name
    items = list(value) if isinstance(value, tuple) and hasattr(kind, "_fields") else None
    try:
        _new(kind, items)
    except (MismatchError, TypeError) as error:
        raise _refusal(value, path) from error
    return "object", name, (_encode(items, path, take), _encode(_attributes(value), path, take))


def _reduced(value: Any, path: Path, take: TakeTensor) -> tuple[Any, ...]:
    """The parts of which pickle makes an object: the arguments of its class, attributes, items and pairs."""
    factory = getattr(value, "default_factory", None)
    if factory is not None and factory not in _CLASSES.values():
        raise MismatchError(
            f"cannot save {name_of(path)!r}: it is a defaultdict of {getattr(factory, '__name__', factory)}, which a "
            "checkpoint cannot hold: use a builtin class, such as int or list"
        )
    made, arguments, *rest = value.__reduce_ex__(4)
    state, items, pairs = (*rest, None, None, None)[:3]
    arguments = tuple(arguments[1:] if made is copyreg.__newobj__ else arguments)  # type: ignore[attr-defined]
    return (
        _encode(arguments, path, take),
        _encode(state or {}, (*path, "__dict__"), take),  # a key may have the name of an attribute
        [_encode(item, (*path, index), take) for index, item in enumerate(items or ())],
        [(_encode(key, path, take), _encode(item, (*path, str(key)), take)) for key, item in pairs or ()],
    )


def _encode_array(array: Any, value: Any, path: Path, take: TakeTensor) -> tuple[Any, ...]:
    """dtype, shape and bytes of an array; of a large one what stands for the tensor of its bytes."""
    dtype = array.dtype.str
    if array.dtype.hasobject or sys.modules["numpy"].dtype(dtype) != array.dtype:
        raise _refusal(value, path)
    if array.nbytes < _LARGE:
        return dtype, (array.shape, array.tobytes().decode("latin-1"))
    return dtype, (array.shape, take(torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8), path))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object: those in its __dict__, and those in slots."""
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {**{slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}, **getattr(value, "__dict__", {})}


def _refusal(value: Any, path: Path) -> MismatchError:
    kind = type(value)
    return MismatchError(
        f"cannot save {name_of(path)!r}: it is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
        "hold; a state may hold tensors, NumPy's arrays and numbers, texts, dates, paths, lists, dictionaries, and "
        "dataclasses, named tuples and enumerations whose class stands at the top of a module: have state_dict return "
        "these, such as str(value), and make the object of them in load_state_dict"
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
        shape, data = content
        array = _decode_array(name, shape, data, tensors)
        return array if kind == "array" else array[()]
    if kind == "class":
        return _CLASSES[name]
    if kind == "call":
        return _call(_CLASSES[name], content, tensors)
    if (found := _find(name)) is None:
        raise MismatchError(f"no imported module has the class {name.replace(':', '.')}")
    if kind == "member" and issubclass(found, enum.Enum):
        return found(content) if issubclass(found, enum.Flag) else found.__members__[content]
    if kind == "object":
        items, attributes = content
        made = _new(found, decode(items, tensors))
        for key, value in decode(attributes, tensors).items():
            object.__setattr__(made, key, value)
        return made
    raise MismatchError(f"{name} is no {kind}")


def _decode_array(dtype: str, shape: Any, data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    memory = bytearray(data, "latin-1") if isinstance(data, str) else decode(data, tensors).numpy()
    return numpy.ndarray(shape, numpy.dtype(dtype), memory)


def _call(kind: Any, parts: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The object of which `_reduced` has given the parts."""
    arguments, state, items, pairs = parts
    made = kind(*decode(arguments, tensors))
    if state:
        vars(made).update(decode(state, tensors))
    for item in items:
        made.append(decode(item, tensors))
    for key, value in pairs:
        made[decode(key, tensors)] = decode(value, tensors)
    return made


def _new(kind: Any, items: Any) -> Any:
    """An empty object of a dataclass, or a named tuple of these items. No code of the class runs."""
    if items is not None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(kind, items)
    if not dataclasses.is_dataclass(kind):
        raise MismatchError(f"{kind.__qualname__} is no dataclass and no named tuple")
    return object.__new__(kind)  # type: ignore[arg-type]
