"""OptimizerState: saves and restores the state of an optimizer, by the names of its parameters.

``state.NAME.KEY`` is a tensor. A number or None is one too, ``state.NAME.KEY.TYPE``, since rank 0 need not have the
state of each parameter; so is ``state.NAME.KEY.shard``, whose parts are plain tensors of the ranks' shards. All else is
plain: ``param_groups``, ``values`` by name and key, and ``kind``, the optimizer's class and the names of its
hyperparameters. All ranks that have a parameter have to hold its state alike.
The names and the tensors are the same as in torch.distributed.checkpoint.state_dict. A parameter without state, because
it had no gradient yet, has no state in the checkpoint and none after it is restored. Rank 0 saves the state that
belongs to no parameter: ``shared``, the other keys of the optimizer's state, and ``extra``, the entries of its
state_dict() that torch's optimizers do not have.

A group may list its parameters in another order than the saved one. The groups themselves have to be the same, in the
same order, since schedulers know them by their numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.wrappers import Parts, is_sharded, names_by_id, parameters_of
from flk_runtime.checkpoint.state import (
    Chunk,
    ChunkCache,
    SplitState,
    chunks_of,
    has_tensors,
    split_tensors,
)
from flk_runtime.checkpoint.stateful import DistributedStateful, Modules, beside
from flk_runtime.checkpoint.values import Path, name_of
from flk_runtime.distributed import parameters_in, process_group
from flk_runtime.errors import MismatchError
from flk_runtime.system.pytree import map_leaves

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

# Values that are saved as tensors of shape (), by their types.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, type(None): torch.uint8}
# What is made of a tensor whose path ends with this name.
_MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda value: bool(value.item()),
    "int": lambda value: int(value.item()),
    "float": lambda value: float(value.item()),
    "NoneType": lambda _: None,
    "shard": lambda value: cast("Any", value).to_local() if is_sharded(value) else value,
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
        self.optimizer, self._modules = optimizer, modules
        self._count = len(parameters_in(optimizer))
        self._of_parts = any(isinstance(module, Parts) for module in modules.values())
        self._equal = self._of_parts or all(isinstance(module, DistributedDataParallel) for module in modules.values())
        self._cache = ChunkCache()
        self._names: dict[nn.Parameter, str] = {}  # of the parameters that the optimizer had when they were made
        self._tables: list[tuple[dict[str, Any], list[str]]] = []  # of the modules, with the names in each then

    def is_of(self, thing: Any, modules: Modules) -> bool:
        same = thing is self.optimizer and all(modules.get(key) is each for key, each in self._modules.items())
        return same and len(parameters_in(thing)) == self._count  # else it has got parameters, maybe of another module

    def save_state(self, name: str) -> SplitState:
        names = self.names()
        parameters = {own: parameter for parameter, own in names.items()}
        content = _read(self.optimizer)
        states = {own: content.state.get(parameter) or {} for own, parameter in parameters.items()}
        tensors, values = split_values(states.items())
        plain: dict[str, Any] = {"values": values, "kind": kind_of(self.optimizer)}
        if self._of_parts:
            if values:
                raise MismatchError("the optimizer of a part of a model has a state that is no tensor or number")
            plain["parts"] = True
        # A function, such as one that chooses what decays, is code: the script gives it to the optimizer again.
        plain["param_groups"] = [
            {key: value for key, value in group.items() if not callable(value)}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in content.groups
        ]
        shards = _shards(self.optimizer, parameters, states)
        paths = {(*path, "shard") if path in shards else path: value for path, value in tensors.items()}
        chunks = self._cache.chunks(
            {(name, "state", *path): value for path, value in paths.items()},
            lambda path, value: self._chunks_of(path, parameters[str(path[2])], value),
        )
        if (content.shared or content.extra) and process_group.rank() == 0:
            plain |= {"shared": content.shared, "extra": content.extra}
        return SplitState(chunks, plain)

    def load_state(self, saved: SavedObject) -> None:
        checkpoint, plain = saved.checkpoint, saved.state_dict()
        parameters = {own: parameter for parameter, own in self.names().items()}
        check_kind(self.optimizer, plain)
        found: dict[Path, torch.Tensor] = {}
        for full, path in checkpoint.names((saved.name, "state")):
            own = str(path[2])
            if self._of_parts and own not in parameters:
                continue  # it is of another rank's part
            parameter = _get(parameters, own)
            if checkpoint.shape(full) and checkpoint.shape(full) == tuple(parameter.shape):  # split as the parameter is
                value = torch.empty_like(parameter, dtype=checkpoint.dtype(full), requires_grad=False)
            else:
                value = checkpoint.empty(full)
            found[path] = value
        checkpoint.read([chunk for path, value in found.items() for chunk in chunks_of(path, value)])
        entries = join_values(found, plain["values"])
        indices = {own: index for index, own in enumerate(parameters)}
        first = next(iter(parameters.values()), None)  # torch puts the tensors below a parameter where that is
        state = {
            **plain.get("extra", {}),
            "state": {
                **map_leaves(plain.get("shared", {}), functools.partial(beside, first)),
                **{_get(indices, own): values for own, values in entries.items()},
            },
            "param_groups": self._saved_groups(plain),
        }
        saved_as = _parameter_dtypes(saved)
        changed = {
            indices[own] for own, each in parameters.items() if each.dtype not in saved_as.get(own, {each.dtype})
        }
        load_as_saved(self.optimizer, state, list(parameters.values()), cast=changed)

    def _saved_groups(self, plain: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved groups with the numbers of parameters, in the order of the optimizer's own."""
        names, groups = self.names(), self.optimizer.param_groups
        own = [[names[each] for each in group["params"]] for group in groups]
        same = check_groups(own, plain["param_groups"], of_parts=self._of_parts or "parts" in plain)
        is_whole = "shared" in plain or "extra" in plain or isinstance(self.optimizer, torch.optim.LBFGS)
        if not same and is_whole:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps state that belongs to no single parameter, and it has its "
                "parameters in another order than the checkpoint: give them to it in the same order"
            )
        numbers = itertools.count()
        return [
            {key: beside(group.get(key), value) for key, value in saved.items() if key != "param_names"}
            | {key: value for key, value in group.items() if key == "param_names" or callable(value)}
            | {"params": list(itertools.islice(numbers, len(group["params"])))}
            for saved, group in zip(plain["param_groups"], groups, strict=True)
        ]

    def held_alike(self) -> dict[str, torch.Tensor]:
        if self._of_parts:
            return {}
        parameters = {own: each for each, own in self.names().items() if each.requires_grad}
        # Sorted, since the optimizers of other ranks may have the parameters in another order.
        found = {f"the parameter {own!r}": each.detach() for own, each in sorted(parameters.items())}
        content = _read(self.optimizer)
        states = {own: content.state.get(each) or {} for own, each in parameters.items()}
        tensors, values = split_values(states.items())
        values["all parameters"] = {**content.shared, **content.extra}
        held = tensors | {chunk.path: chunk.tensor for chunk in split_tensors(values, ()).chunks}
        shards = _shards(self.optimizer, parameters, states)
        for path in sorted(held.keys() - shards, key=name_of):
            found[f"{name_of(path[1:])!r} of {path[0]!r}"] = held[path]
        return {
            key: value.resolve_conj().resolve_neg()  # the values in memory are compared
            for key, value in found.items()
            if not is_sharded(value) and value.layout is torch.strided
            if value.is_floating_point() or value.is_complex()
        }

    def names(self) -> dict[nn.Parameter, str]:
        """The parameters in the optimizer's order, with the names of the user's model, or numbers if it has none."""
        parameters = parameters_in(self.optimizer)
        # Pruning and parametrizations give a parameter another name.
        is_renamed = any([*table.keys()] != before for table, before in self._tables)
        if is_renamed or list(map(id, parameters)) != list(map(id, self._names)):
            names: dict[int, str] = {}
            for key, module in self._modules.items():
                prefix = f"{key}." if len(self._modules) > 1 else ""
                names = {each: prefix + name for each, name in names_by_id(module).items()} | names
            # A scripted module has tables that can be iterated over by keys() only.
            children = (child for module in self._modules.values() for child in module.modules())
            self._tables = [(child._parameters, [*child._parameters.keys()]) for child in children]
            self._names = {each: names.get(id(each), f"parameter-{index}") for index, each in enumerate(parameters)}
        return self._names

    def _chunks_of(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Chunk]:
        """The chunks that this rank offers of ``value``, which belongs to ``parameter``."""
        if path[4:] == ("shard",):
            return [each._replace(path=path, tensor=value.detach()) for each in chunks_of(path, parameter)]
        found = chunks_of(path, value)  # on all ranks, which refuse alike what cannot be saved
        offers = self._equal or is_sharded(parameter) or is_sharded(value) or process_group.rank() == 0
        return found if offers else []


def _shards(
    optimizer: Optimizer, parameters: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]
) -> set[tuple[str, str]]:
    """The names and keys of the values that are plain tensors of this rank's shard of their parameter.

    A value may have the shape of one shard by chance, such as a number of shape (1,). Then others of its key have not.
    Raises MismatchError for plain tensors of other shapes, which nothing divides among another number of ranks.
    """
    fits = {
        (own, key): value.dim() > 0 and value.shape == parameters[own].to_local().shape
        for own, state in states.items()
        if hasattr(parameters[own], "to_local")
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not is_sharded(value)
    }
    others = {key for (_, key), fit in fits.items() if not fit}
    for own, key in fits:
        if key in others and states[own][key].numel() > 1:
            raise MismatchError(
                f"{type(optimizer).__name__} keeps {key!r} of {own!r} in another shape than this rank's shard of it: "
                "keep it in that shape, or pass flk.per_rank(optimizer), to save each rank's, to flk.adopt, or to "
                "run.register after parallelize without the optimizer"
            )
    return {path for path in fits if path[1] not in others}


class _Content(NamedTuple):
    """The content of an optimizer that is saved."""

    groups: list[dict[str, Any]]
    state: Mapping[Any, Any]  # by parameters, and by other keys of the optimizer's own
    extra: Mapping[str, Any]  # the other entries of its state_dict()

    @property
    def shared(self) -> dict[Any, Any]:
        """The state that belongs to no parameter."""
        return {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}


def _read(optimizer: Optimizer) -> _Content:
    """The content of ``optimizer``, or of its state_dict() if it has another state_dict() than torch's.

    The state_dict() of a wrapper has the state of the optimizer inside. Raises CheckpointError if it has another form
    than torch's.
    """
    if not has_own_state_dict(optimizer):
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
            f"({type(error).__name__}: {' '.join(str(error).split())}): return state and param_groups as "
            "torch.optim.Optimizer does, and anything else beside them; instead of an optimizer that shards its state, "
            "use a strategy that does, such as shard_grad_op"
        ) from error


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether state_dict() may return more than torch's, which takes long to ask at every save."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return type(optimizer).state_dict is not Optimizer.state_dict or any(getattr(optimizer, each, ()) for each in hooks)


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

    The method casts the tensors of a parameter to its dtype, also those in lists, which is right only for those with
    numbers in ``cast``, and makes a text that of a generator. It makes new groups, too, but the script, or an optimizer
    around or inside of this one, may hold the old ones. ``parameters`` are in the order of their numbers.
    """
    entries = state["state"]
    held = [(each, each.param_groups) for each in (optimizer, *vars(optimizer).values()) if isinstance(each, Optimizer)]
    optimizer.load_state_dict(state)
    for each, groups in held:
        for number, (own, restored) in enumerate(zip(groups, each.param_groups, strict=False)):
            own.update(restored)
            each.param_groups[number] = own
    casts = type(optimizer).load_state_dict is Optimizer.load_state_dict
    for number, parameter in enumerate(parameters):
        loaded = optimizer.state.get(parameter, {})  # the state of a wrapper may be empty
        for key in entries.get(number, {}).keys() & loaded.keys():
            value, found = entries[number][key], loaded[key]
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
                if casts and number not in cast and found.dtype != value.dtype:
                    loaded[key] = value.to(found.device)
            elif type(value) not in _DTYPES and (not has_tensors(value) or (casts and number not in cast)):
                loaded[key] = map_leaves(value, functools.partial(beside, parameter))


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the hyperparameters of each group: a scheduler changes a rate that is a tensor in place."""
    return [
        _copied({key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[dict[str, Any]], *, only_scheduled: bool) -> None:
    """Restore the result of `hyperparameters_of`; ``only_scheduled``: in groups that a scheduler has.

    In the others a script may have set a rate to resume with.
    """
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        if "initial_lr" in group or not only_scheduled:
            group.update(_copied(values))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return map_leaves(values, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def split_values(
    states: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[dict[Path, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of parameters' states by name and key, and the other values. A number is a tensor with its type.

    ``states`` are pairs of a parameter's name and its state.
    """
    tensors: dict[Path, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for own, state in states:
        for key, value in state.items():
            kind = type(value)
            if isinstance(value, torch.Tensor):
                tensors[own, key] = value
            elif kind in _DTYPES:
                tensors[own, key, kind.__name__] = torch.tensor(0 if value is None else value, dtype=_DTYPES[kind])
            else:
                values.setdefault(own, {})[key] = value
    return tensors, values


def join_values(tensors: Mapping[Path, torch.Tensor], values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of each parameter, of what `split_values` has made of it; the tensors are by their paths."""
    entries: dict[str, dict[Any, Any]] = {}
    for (_, _, own, key, *kind), value in tensors.items():
        entries.setdefault(str(own), {})[key] = _MADE[str(kind[0])](value) if kind else value
    for own, more in values.items():
        entries.setdefault(own, {}).update(more)
    return entries


def kind_of(optimizer: Optimizer) -> list[Any]:
    """The name of the class of ``optimizer``, and the names of its hyperparameters."""
    return [type(optimizer).__name__, sorted(getattr(optimizer, "defaults", ()))]  # a wrapper may have none


def check_kind(optimizer: Optimizer, plain: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved state is of an optimizer of another class with other hyperparameters.

    It may lack those without which the optimizer cannot do a step.
    """
    kind, names = kind_of(optimizer)
    if "param_groups" not in plain or "state" in plain:
        raise ValueError("flk.replicated or flk.per_rank has saved it: pass the optimizer through the same call")
    saved, saved_names = plain.get("kind", (kind, names))
    if saved != kind and saved_names != names:
        raise ValueError(f"it is the state of another optimizer than {kind}: of {saved}")


def check_groups(own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], *, of_parts: bool = False) -> bool:
    """Whether the groups of an optimizer, which are lists of names, have the same order as the saved groups.

    Raises ValueError if their parameters are not the same. Groups ``of_parts`` name only the parameters of rank 0's.
    """
    if len(own) != len(saved):
        raise ValueError(f"it has {len(saved)} groups of parameters, and the optimizer {len(own)}")
    places = {name: f"group {number}" for number, group in enumerate(saved) for name in group["params"]}
    here = {name: f"group {number}" for number, names in enumerate(own) for name in names}
    names = [name for name in here if name in places] if of_parts else {**here, **places}
    for name in names:
        if places.get(name) != _get(here, name):
            raise ValueError(
                f"the optimizer has {name!r} in {here[name]}, and the checkpoint in {places.get(name, 'no group')}: "
                "keep the groups and their parameters"
            )
    return of_parts or list(places) == list(here)


def _get(found: Mapping[str, Any], name: str) -> Any:
    if name not in found:
        raise ValueError(
            f"unexpected state of {name!r}: the optimizer has no such parameter; if the script adds it later, give it "
            "to the optimizer before parallelize, frozen until then"
        )
    return found[name]
