"""OptimizerState: saves and restores the state of an optimizer, by the names of its parameters.

``state.NAME.KEY`` is a tensor, and so is a number or None, since rank 0 need not have the state of each parameter. All
else is plain: ``param_groups``, ``values`` by name and key, ``numbers``, the keys whose values are numbers or None, and
``shards``, the keys whose values are plain tensors of each rank's shard.
The names and the tensors are the same as in torch.distributed.checkpoint.state_dict. A parameter without state, because
it had no gradient yet, has no state in the checkpoint and none after it is restored. Rank 0 saves the state that
belongs to no parameter: ``shared``, the other keys of the optimizer's state, and ``extra``, the entries of its
state_dict() that torch's optimizers do not have.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.wrappers import Parts, is_sharded, parameters_of
from flk_runtime.checkpoint.state import (
    Chunk,
    ChunkCache,
    Path,
    SplitState,
    chunks_of,
    has_tensors,
    name_of,
    split_tensors,
)
from flk_runtime.checkpoint.stateful import DistributedStateful, Modules
from flk_runtime.distributed import parameters_in, process_group
from flk_runtime.errors import MismatchError
from flk_runtime.system.bits import bit_sum
from flk_runtime.system.pytree import map_leaves

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

# Values that are saved as tensors of shape (), by the dtype of which they are read.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, type(None): torch.uint8}
_READ: dict[torch.dtype, Callable[[Any], Any]] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float64: float,
    torch.uint8: lambda _: None,
}


def trained_modules(optimizer: Optimizer, modules: Modules) -> tuple[Modules, int]:
    """The modules whose parameters ``optimizer`` has, one if it has all; and how many parameters are in no module."""
    wanted = set(map(id, parameters_in(optimizer)))
    own: dict[str, set[int]] = {}
    for key, module in modules.items():
        own[key] = {id(parameter) for parameter in parameters_of(module).values()}
        if wanted <= own[key]:
            return {key: module}, 0
    trained = {key: modules[key] for key, found in own.items() if wanted & found}
    return trained, len(wanted.difference(*own.values()))


class OptimizerState(DistributedStateful):
    """The state of an optimizer, as it is, for the parameters of modules that are plain, or wrapped in DDP or FSDP2.

    Of several modules, a parameter's name begins with the name under which its module is saved. Of `Parts` each rank
    saves and loads the state of its own parameters, whose groups have the same hyperparameters on all ranks.
    """

    def __init__(self, optimizer: Optimizer, modules: Modules) -> None:
        self._optimizer, self._modules = optimizer, modules
        self._count = len(parameters_in(optimizer))
        self._of_parts = any(isinstance(module, Parts) for module in modules.values())
        self._equal = self._of_parts or all(isinstance(module, DistributedDataParallel) for module in modules.values())
        self._cache = ChunkCache()
        self._first: set[tuple[str, str]] | None = None  # the state that this rank offers; None: rank 0 offers all
        self._names: dict[nn.Parameter, str] = {}  # of the parameters that the optimizer had when they were made

    def is_of(self, thing: Any, modules: Modules) -> bool:
        same = thing is self._optimizer and all(modules.get(key) is each for key, each in self._modules.items())
        return same and len(parameters_in(thing)) == self._count  # else it has got parameters, maybe of another module

    def save_state(self, name: str) -> SplitState:
        names = self.names()
        parameters = {own: parameter for parameter, own in names.items()}
        content = _read(self._optimizer)
        tensors, plain = split_values((own, content.state.get(each, {})) for own, each in parameters.items())
        if self._of_parts:
            if plain["values"]:
                raise MismatchError("the optimizer of a part of a model has a state that is no tensor or number")
            plain["parts"] = True
        is_own = not type(self._optimizer).__module__.startswith("torch.")
        if is_own and not self._equal:
            self._note_holders([path for path in tensors if not is_sharded(parameters[path[0]])])
        if is_own and any(map(is_sharded, names)):
            plain_ones = [
                ((own, key), value, _is_shard(value, each))
                for own, each in parameters.items()
                for key, value in content.state.get(each, {}).items()
                if is_sharded(each) and isinstance(value, torch.Tensor) and value.numel() > 1 and not is_sharded(value)
            ]
            self._refuse_own([(path, value) for path, value, is_shard in plain_ones if not is_shard])
            plain["shards"] = sorted({key for (_, key), _, is_shard in plain_ones if is_shard})
        plain["param_groups"] = [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in content.groups
        ]
        chunks = self._cache.chunks(
            {(name, "state", *path): value for path, value in tensors.items()},
            lambda path, value: self._chunks_of(path, parameters[str(path[2])], value),
        )
        shared = {key: value for key, value in content.state.items() if not isinstance(key, torch.Tensor)}
        if (shared or content.extra) and process_group.rank() == 0:
            beside = split_tensors({"shared": shared, "extra": content.extra}, (name,))
            return SplitState([*chunks, *beside.chunks], plain | beside.plain)
        return SplitState(chunks, plain)

    def load_state(self, saved: SavedObject) -> None:
        checkpoint, plain = saved.checkpoint, saved.state_dict()
        parameters = {own: parameter for parameter, own in self.names().items()}
        if "state" in plain:
            self._load_whole(plain)
            return
        entries: dict[str, dict[str, Any]] = {}
        chunks: list[Chunk] = []
        for full, path in checkpoint.names((saved.name, "state")):
            own, key = str(path[2]), str(path[3])
            if self._of_parts and own not in parameters:
                continue  # it is of another rank's part
            parameter = _get(parameters, own)
            if checkpoint.shape(full) and checkpoint.shape(full) == tuple(parameter.shape):  # split as the parameter is
                value = torch.empty_like(parameter, dtype=checkpoint.dtype(full), requires_grad=False)
            else:
                value = checkpoint.empty(full)
            entries.setdefault(own, {})[key] = value
            chunks += chunks_of(path, value)
        checkpoint.read(chunks)
        for entry, key in itertools.product(entries.values(), plain.get("shards", ())):
            if key in entry and is_sharded(entry[key]):
                entry[key] = entry[key].to_local()
        join_values(entries, plain)
        indices = {own: index for index, own in enumerate(parameters)}
        state = {
            **plain.get("extra", {}),
            "state": {
                **_on_device_of(parameters.values(), plain.get("shared", {})),
                **{_get(indices, own): values for own, values in entries.items()},
            },
            "param_groups": self._saved_groups(plain, indices),
        }
        saved_as = _parameter_dtypes(saved)
        changed = {
            indices[own] for own, each in parameters.items() if each.dtype not in saved_as.get(own, {each.dtype})
        }
        with checking_groups(self._optimizer):
            load_as_saved(self._optimizer, state, list(parameters.values()), cast=changed)

    def _saved_groups(self, plain: dict[str, Any], indices: Mapping[str, int]) -> list[dict[str, Any]]:
        """The saved groups with the numbers of parameters. Those of parts name only the parameters of rank 0's."""
        groups = plain["param_groups"]
        if not (self._of_parts or plain.get("parts")):
            return [{**group, "params": [_get(indices, own) for own in group["params"]]} for group in groups]
        own_groups = self._optimizer.param_groups
        if len(groups) != len(own_groups):
            raise ValueError(f"it has {len(groups)} groups of parameters, and the optimizer {len(own_groups)}")
        names = self.names()
        return [
            {**group, "params": [indices[names[each]] for each in own["params"]]}
            for group, own in zip(groups, own_groups, strict=True)
        ]

    def _load_whole(self, state: dict[str, Any]) -> None:
        """Load torch's state_dict, as which earlier versions saved an optimizer that was registered."""
        if any(is_sharded(each) for each in self.names()):
            raise ValueError(
                "an earlier version of flk has saved it as whole tensors: resume and save once under a strategy that "
                "does not shard"
            )
        with checking_groups(self._optimizer):
            self._optimizer.load_state_dict(state)

    def reload_hyperparameters(self, saved: SavedObject) -> None:
        for group, values in zip(self._optimizer.param_groups, saved.plain["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def names(self) -> dict[nn.Parameter, str]:
        """The parameters in the optimizer's order, with the names of the user's model, or numbers if it has none."""
        parameters = parameters_in(self._optimizer)
        if list(map(id, parameters)) != list(map(id, self._names)):
            names: dict[int, str] = {}
            for key, module in self._modules.items():
                prefix = f"{key}." if len(self._modules) > 1 else ""
                for name, parameter in parameters_of(module).items():
                    names.setdefault(id(parameter), prefix + name)
            self._names = {each: names.get(id(each), f"parameter-{index}") for index, each in enumerate(parameters)}
        return self._names

    def _note_holders(self, paths: Sequence[tuple[str, str]]) -> None:
        """Note which state this rank offers, if not all ranks have the same: that which no rank before it has.

        An optimizer may keep on each rank the state of the parameters whose step that rank makes. Collective.
        """
        first = None
        if _differ(sorted(paths)):
            everywhere = process_group.all_gather(list(paths))
            first = set(paths).difference(*everywhere[: process_group.rank()])
        if first != self._first:
            self._first, self._cache = first, ChunkCache()

    def _refuse_own(self, beside: Sequence[tuple[tuple[str, str], torch.Tensor]]) -> None:
        """Raise MismatchError if ranks hold other values than others ``beside`` their shards, by path. Collective.

        A checkpoint has one of each, and nothing says how to divide them among another number of ranks.
        """
        described = [(path, tuple(value.shape), int(bit_sum(value.detach()))) for path, value in beside]
        if not _differ(described):
            return
        (own, name), *_ = next(each[0] for each in process_group.all_gather(described) if each)
        kind = type(self._optimizer).__name__
        raise MismatchError(
            f"{kind} keeps {name!r} of {own!r} for the shard of each rank, in another shape than the shard's, so a "
            "checkpoint could not be restored: give it that shape, make it a DTensor, or save each rank's own with "
            "run.register('optimizer', flk.per_rank(optimizer)) after parallelize without the optimizer"
        )

    def _chunks_of(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Chunk]:
        """The chunks that this rank offers of ``value``, which belongs to ``parameter``."""
        if _is_shard(value, parameter):
            return [each._replace(path=path, tensor=value.detach()) for each in chunks_of(path, parameter)]
        is_first = process_group.rank() == 0 if self._first is None else path[2:] in self._first
        offers = self._equal or is_sharded(parameter) or is_sharded(value) or is_first
        return chunks_of(path, value) if offers else []


def _differ(value: Any) -> bool:
    """Whether ``value`` is another one on another rank, by its text. Collective."""
    key = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
    least, most = process_group.maximum(-key, key)
    return -least != most


def _is_shard(value: Any, parameter: Any) -> bool:
    """Whether ``value``, which an optimizer keeps for a sharded parameter, is a plain tensor of this rank's shard."""
    if not isinstance(value, torch.Tensor) or is_sharded(value) or not hasattr(parameter, "to_local"):
        return False
    return value.dim() > 0 and value.shape == parameter.to_local().shape


class _Content(NamedTuple):
    """The content of an optimizer that is saved."""

    groups: list[dict[str, Any]]
    state: Mapping[Any, Any]  # by parameters, and by other keys of the optimizer's own
    extra: Mapping[str, Any]  # the other entries of its state_dict()


def _read(optimizer: Optimizer) -> _Content:
    """The content of ``optimizer``, or of its state_dict() if it has another state_dict() than torch's.

    The state_dict() of a wrapper has the state of the optimizer inside. Raises CheckpointError if it has another form
    than torch's.
    """
    if not _has_own_state_dict(optimizer):
        return _Content(optimizer.param_groups, optimizer.state, {})
    try:
        extra = dict(optimizer.state_dict())
        groups, state = extra.pop("param_groups"), extra.pop("state")
        own = [group["params"] for group in optimizer.param_groups]
        parameters = {
            number: parameter
            for group, each in zip(groups, own, strict=True)
            for number, parameter in zip(group["params"], each, strict=True)
        }
        return _Content(
            [{**group, "params": each} for group, each in zip(groups, own, strict=True)],
            {parameters.get(key, key): value for key, value in state.items()},
            extra,
        )
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise MismatchError(
            f"cannot save the optimizer {type(optimizer).__name__}, whose state_dict() is not like torch's "
            f"({type(error).__name__}: {error}): return state and param_groups as torch.optim.Optimizer does, and "
            "anything else beside them"
        ) from error


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether state_dict() may return more than torch's, which takes long to ask at every save."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return type(optimizer).state_dict is not Optimizer.state_dict or any(getattr(optimizer, each, ()) for each in hooks)


def _on_device_of(parameters: Iterable[nn.Parameter], values: Any) -> Any:
    """``values`` with the tensors on the device of the first parameter, where torch puts those below a parameter."""
    device = next((each.device for each in parameters), None)
    return map_leaves(values, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)


def _parameter_dtypes(saved: SavedObject) -> dict[str, set[torch.dtype]]:
    """The dtypes in which the checkpoint of an optimizer has parameters of each name. Several models may have it."""
    checkpoint = saved.checkpoint
    found: dict[str, set[torch.dtype]] = {}
    for full, path in checkpoint.names():
        if path[0] != saved.name and checkpoint.shape(full) is not None:
            for name in (full, name_of(path[1:])):  # one of several models' begins with the name of its model
                found.setdefault(name, set()).add(checkpoint.dtype(full))
    return found


def load_as_saved(
    optimizer: Optimizer, state: dict[str, Any], parameters: Sequence[nn.Parameter], *, cast: Container[int] = ()
) -> None:
    """Call ``optimizer.load_state_dict(state)``, and put back the values that torch's method changes.

    The method casts the tensors of a parameter to its dtype, which is right only for the parameters with numbers in
    ``cast``, and makes a text the text of a generator. ``parameters`` are in the order of their numbers in ``state``.
    """
    entries = state["state"]
    optimizer.load_state_dict(state)
    casts = type(optimizer).load_state_dict is Optimizer.load_state_dict
    for number, parameter in enumerate(parameters):
        loaded = optimizer.state.get(parameter, {})  # the state of a wrapper may be empty
        for key in entries.get(number, {}).keys() & loaded.keys():
            value, found = entries[number][key], loaded[key]
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
                if casts and number not in cast and found.dtype != value.dtype:
                    loaded[key] = value.to(found.device)
            elif type(value) not in _DTYPES and not has_tensors(value):
                loaded[key] = value


def split_values(
    states: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, Any]]:
    """The tensors of parameters' states by name and key, and the plain state that goes with them.

    ``states`` are pairs of a parameter's name and its state.
    """
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    numbers: dict[str, str] = {}
    for own, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[own, key] = value
            elif type(value) in _DTYPES:
                numbers[key] = type(value).__name__
                tensors[own, key] = torch.tensor(0 if value is None else value, dtype=_DTYPES[type(value)])
            else:
                values.setdefault(own, {})[key] = value
    return tensors, {"values": values, "numbers": numbers}


def join_values(entries: dict[str, dict[str, Any]], plain: Mapping[str, Any]) -> None:
    """Add to the tensors of each parameter the values that `split_values` has taken out of its state."""
    for key in plain.get("numbers", {}):
        for entry in entries.values():
            value = entry.get(key)  # of other parameters it may be a tensor of the optimizer's
            if value is not None and value.dim() == 0 and value.dtype in _READ:
                entry[key] = _READ[value.dtype](value.item())
    for own, values in plain.get("values", {}).items():
        entries.setdefault(own, {}).update(values)


@contextlib.contextmanager
def checking_groups(optimizer: Optimizer) -> Iterator[None]:
    """Raise ValueError if the state that is loaded meanwhile is of an optimizer of another class.

    It lacks hyperparameters then without which the optimizer cannot do a step.
    """
    needed = [optimizer.defaults.keys() & group.keys() for group in optimizer.param_groups]
    yield
    for keys, group in zip(needed, optimizer.param_groups, strict=True):
        if missing := sorted(keys - group.keys()):
            kind = type(optimizer).__name__
            raise ValueError(f"it is the state of another optimizer than {kind}: its groups have no {missing[0]!r}")


def _get(found: Mapping[str, Any], name: str) -> Any:
    if name not in found:
        raise ValueError(
            f"unexpected state of {name!r}: the optimizer has no such parameter; if the script adds it later, give it "
            "to the optimizer before parallelize, frozen until then"
        )
    return found[name]
