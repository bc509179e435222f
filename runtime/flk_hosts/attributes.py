"""What a Trainer of another class, and callbacks, hold beside the model: modules that follow it, buffers, counters.

An attribute is kept from the first save on at which it is no longer what the script has made. What it was at the start,
each attempt makes again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sized
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from flk_hosts.generators import is_generator, made_of, set_state, state_of
from flk_hosts.sums import set_sums, sums_of
from flk_runtime.checkpoint.adapters.wrappers import is_sharded
from flk_runtime.checkpoint.values import encode
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import MismatchError
from flk_runtime.system.bits import bit_sum

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_KIND: Final = "flk.kind"  # a key of the dictionaries that stand for what a checkpoint cannot have
_DEEPEST, _MOST = 20, 10_000  # levels and entries of a value that is looked at in each save
_EXACT: Final = frozenset({"_last_loaded_step"})  # TRL's: which weights the engine has that generates, a new one now


class _CannotBeKeptError(Exception):
    """The message is the kind of thing that it is."""


class Attributes:
    """The attributes of a trainer that its package does not keep, and those of callbacks, on this rank.

    Their names are those of the attributes, for callbacks after the name of the class and a point.
    """

    def __init__(self, trainer: Any, callbacks: Iterable[Any], known: frozenset[str], kept: Iterable[Any]) -> None:
        """``known``: names of attributes that the package keeps, or makes anew. ``kept``: objects that flk keeps."""
        self._known = known | _EXACT
        self._owners: dict[str, Any] = {"": trainer}
        for each in callbacks:
            name = f"{type(each).__name__}."
            while name in self._owners:
                name = f"{name[:-1]}'."
            self._owners[name] = each
        self._kept = {id(each): each for each in kept}
        for each in [each for each in self._kept.values() if isinstance(each, nn.Module)]:
            self._kept |= {id(part): part for part in (*each.modules(), *each.parameters(), *each.buffers())}
        self._began = self._digests()
        self._values: dict[str, Any] = {}  # that have changed
        self._modules: dict[str, dict[str, Any]] = {}  # the states of `by_rank`
        self.found: dict[str, int] = {}
        """What tells the values that have changed apart, by name."""
        self.alike: set[str] = set()
        """The names of values that all ranks hold alike."""
        self.by_rank: set[str] = set()
        """The modules that ranks hold differently."""
        self.unkept: dict[str, str] = {}
        """What has changed and cannot be saved, by name: its kind."""

    def modules(self) -> dict[str, nn.Module]:
        """The modules that are no part of the model, by name."""
        found: dict[str, nn.Module] = {}
        for name, value in self._attributes():
            parts = {"": value}
            if isinstance(value, (list, tuple)):
                parts = {f".{number}": each for number, each in enumerate(value)}
            elif isinstance(value, Mapping):
                parts = {f".{key}": each for key, each in value.items()}
            for suffix, each in parts.items():
                if isinstance(each, nn.Module) and id(each) not in self._kept and each not in found.values():
                    found[name + suffix] = each
        return found

    def shared(self, module: nn.Module) -> frozenset[str]:
        """The entries of a module that are the model's."""
        own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        return frozenset(name for name, value in own.items() if id(value) in self._kept)

    def changed_modules(self) -> dict[str, int]:
        """The modules that have changed, with what tells their values apart; 0 if they are sharded over the ranks."""
        modules = self.modules()
        found = {name: self._digest_of(each) for name, each in modules.items()}
        changed = {name: each for name, each in found.items() if self._began.get(name) != each}
        return {
            name: 0 if any(map(is_sharded, modules[name].state_dict().values())) else each
            for name, each in changed.items()
        }

    def trains_more(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters that are not the model's."""
        return any(id(each) not in self._kept for each in parameters_in(optimizer))

    def look(self) -> None:
        """Look at the values that have changed, and at the modules that the ranks hold differently: they are saved."""
        self.unkept, self.found = {}, {}
        values, resources = dict[str, Any](), set[str]()
        for name, value in self._attributes():
            if isinstance(value, nn.Module):
                continue
            digest = _digest(self._encoded(value, True))
            if digest == self._began.get(name):
                continue
            try:
                values[name], self.found[name] = self._encoded(value), digest
            except _CannotBeKeptError as error:
                self.unkept[name] = str(error)
                resources |= {name.partition(".")[0]} if "." in name else set()
        # A callback that says that it has begun, and has opened a file, opens none if only the first is restored.
        self._values = {
            name: each for name, each in values.items() if "." not in name or name.split(".")[0] not in resources
        }
        modules = {name: each for name, each in self.modules().items() if name in self.by_rank}
        self._modules = {name: self._entries(each) for name, each in modules.items()}

    @property
    def names(self) -> list[str]:
        """What `look` has found and can be saved, and is not alike on all ranks."""
        return sorted([*self._values.keys() - self.alike, *self._modules])

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds for itself."""
        values = {name: each for name, each in self._values.items() if name not in self.alike}
        return {"values": values, "modules": self._modules}

    def alike_state_dict(self) -> dict[str, Any]:
        """What all ranks hold alike."""
        return {"values": {name: each for name, each in self._values.items() if name in self.alike}, "modules": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the attributes these values, in place where that is possible."""
        for name, saved in state["values"].items():
            owner, _, attribute = name.rpartition(".")
            thing = self._owners.get(f"{owner}." if owner else "")
            if thing is None:
                raise MismatchError(f"the checkpoint has {name!r}, and there is no such callback now: add it again")
            setattr(thing, attribute, self._restored(getattr(thing, attribute, None), saved))
        modules = self.modules()
        for name, saved in state["modules"].items():
            if name not in modules:
                raise MismatchError(f"the checkpoint has the module {name!r}, which the trainer does not hold now")
            _load_entries(modules[name], saved)
            self.by_rank.add(name)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for prefix, owner in self._owners.items():
            for name, value in list(vars(owner).items()):
                if (prefix or name not in self._known) and id(value) not in self._kept:
                    yield prefix + name, value

    def _digests(self) -> dict[str, int]:
        values = {name: each for name, each in self._attributes() if not isinstance(each, nn.Module)}
        found = {name: _digest(self._encoded(each, True)) for name, each in values.items()}
        return found | {name: self._digest_of(each) for name, each in self.modules().items()}

    def _digest_of(self, module: nn.Module) -> int:
        entries = self._entries(module)
        own = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in entries.items()}
        return _digest(self._encoded(own, True))

    def _entries(self, module: nn.Module) -> dict[str, Any]:
        """The state of a module without what is the model's, with the sums of metrics."""
        shared = self.shared(module)
        entries = {**module.state_dict(), **sums_of(module)}
        return {name: each for name, each in entries.items() if name not in shared}

    def _encoded(self, value: Any, blindly: bool = False, depth: int = 0) -> Any:
        """``value`` as a checkpoint takes it. Raises _CannotBeKeptError, unless ``blindly``: for a digest."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._kept or isinstance(value, nn.Module):
            return {_KIND: "same"}
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_sharded(value):
            held = value.detach()
            return held if held.device.type == "cpu" else {_KIND: "device", "of": str(held.device), "is": held}
        if is_generator(value):
            return {_KIND: "generator", "is": state_of(value)}
        if depth > _DEEPEST or (isinstance(value, Sized) and len(value) > _MOST):  # data, or what holds itself
            if blindly:
                return id(value)
            raise _CannotBeKeptError(f"large {type(value).__name__}")
        if type(value) in (list, tuple):
            return type(value)([self._encoded(each, blindly, depth + 1) for each in value])
        if isinstance(value, MutableMapping) and all(type(key) in _PLAIN for key in value):
            return {key: self._encoded(each, blindly, depth + 1) for key, each in value.items()}
        if hasattr(value, "load_state_dict") and hasattr(value, "state_dict") and not isinstance(value, DataLoader):
            return {_KIND: "state", "is": self._encoded(value.state_dict(), blindly, depth + 1)}
        if not dataclasses.is_dataclass(value):  # others may hold it too, and a restored one would be another
            with contextlib.suppress(MismatchError):
                encoded = encode(value, (), lambda tensor, _: tensor)
                return encoded if blindly else value
        if blindly:
            return id(value)
        raise _CannotBeKeptError(type(value).__name__)

    def _restored(self, now: Any, saved: Any) -> Any:
        """What ``saved`` stands for: ``now`` with other contents, or another thing."""
        if isinstance(saved, torch.Tensor):
            if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (saved.shape, saved.dtype):
                return saved
            with torch.no_grad():
                return now.copy_(saved)
        if type(saved) is list:
            new = [self._restored(_at(now, number), each) for number, each in enumerate(saved)]
            if not isinstance(now, list):
                return new
            now[:] = new
            return now
        if type(saved) is tuple:
            return tuple(self._restored(_at(now, number), each) for number, each in enumerate(saved))
        if not isinstance(saved, Mapping):
            return saved
        if _KIND in saved:
            return self._of_kind(now, saved)
        target: Any = now if isinstance(now, MutableMapping) else {}
        for key in [key for key in target if key not in saved]:
            del target[key]
        for key, each in saved.items():
            is_made = key in target or isinstance(target, collections.defaultdict)
            target[key] = self._restored(target[key] if is_made else None, each)
        return target

    def _of_kind(self, now: Any, saved: Mapping[str, Any]) -> Any:
        kind = saved[_KIND]
        if kind == "same":
            return now
        if kind == "device":
            return self._restored(now, saved["is"].to(_device(saved["of"])))
        if kind == "generator" and is_generator(now):
            set_state(now, saved["is"])
            return now
        if kind == "generator":
            return made_of(saved["is"])
        if not hasattr(now, "load_state_dict"):
            raise MismatchError(f"the checkpoint has a state, and the attribute is a {type(now).__name__} now")
        now.load_state_dict(self._restored(None, saved["is"]))
        return now


def stored_by(kind: type) -> frozenset[str]:
    """The names of the attributes that methods of a class, and of those that it is derived from, set."""
    found: set[str] = set()
    waiting: list[Any] = [each for base in kind.__mro__[:-1] for each in vars(base).values()]
    while waiting:
        each = waiting.pop()
        if isinstance(each, CodeType):
            found.update(str(step.argval) for step in dis.get_instructions(each) if step.opname == "STORE_ATTR")
            waiting += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
            continue
        for name in ("__code__", "__wrapped__", "__func__", "fget"):
            if (inner := getattr(each, name, None)) is not None:
                waiting.append(inner)
    return frozenset(found)


def _load_entries(module: nn.Module, saved: Mapping[str, Any]) -> None:
    sums = sums_of(module)
    own = module.state_dict().keys() & saved.keys()
    module.load_state_dict({name: saved[name] for name in own}, strict=False)
    set_sums(module, {name: each for name, each in saved.items() if name in sums})


def _digest(encoded: Any) -> int:
    def described(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return str(each.dtype), tuple(each.shape), int(bit_sum(each.detach()))
        if isinstance(each, Mapping):
            return {key: described(inner) for key, inner in each.items()}
        return [described(inner) for inner in each] if isinstance(each, (list, tuple)) else each

    text = repr(described(encoded)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") | 1  # not 0


def _device(name: str) -> str:
    """The device of this rank for a tensor that was on the device ``name`` of that kind."""
    kind = name.partition(":")[0]
    return f"{kind}:{torch.cuda.current_device()}" if kind == "cuda" else name


def _at(sequence: Any, number: int) -> Any:
    is_there = isinstance(sequence, (list, tuple)) and number < len(sequence)
    return sequence[number] if is_there else None
