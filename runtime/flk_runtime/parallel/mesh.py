"""Mesh: the ranks of a run as a DeviceMesh, on which the script's own parallelism has dimensions beside the data's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import Parts, parameters_of, user_name
from flk_runtime.contract.variable import is_count
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CONTEXT: Final = "cp"  # the dimension whose ranks have parts of the same sequences: parameters are sharded over it too
PIPELINE: Final = "pp"  # the dimension whose ranks hold other parts of the model
_RESERVED: Final = ("replicate", "shard", "shard_cp")


@dataclass(frozen=True)
class Mesh:
    """The DeviceMesh of a run, and this rank's place in it."""

    own: DeviceMesh  # the script's dimensions
    sharding: DeviceMesh  # over which FSDP2 shards and replicates
    part: int  # this rank's number among the parts of the data; the ranks of one part get the same batches
    parts: int
    seed: int  # a number for random generators, which ranks have in common that must draw the same values


def check_sizes(mesh: Mapping[str, int], world_size: int) -> int:
    """The product of the sizes of the script's dimensions. Raises SetupError if they cannot be used."""
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise SetupError(
                f"the mesh has a dimension {name!r}: expected an identifier such as tp, and none of "
                f"{', '.join(_RESERVED)}"
            )
        if not is_count(size, 1):
            raise SetupError(f"the mesh has the size {size!r} for {name}: expected a number of ranks from 1 on")
    ranks = prod(mesh.values())
    if world_size % ranks:
        sizes = " × ".join(f"{name} {size}" for name, size in mesh.items())
        raise SetupError(f"the mesh ({sizes}) does not divide the world size, {world_size}: choose sizes that do")
    return ranks


def check_pipeline(
    mesh: Mapping[str, int], model: nn.Module, optimizers: Sequence[Optimizer], save_frozen: bool
) -> None:
    """Raise SetupError for what flk cannot do with the stages of a pipeline."""
    if PIPELINE not in mesh:
        return
    what = f"the mesh has a dimension {PIPELINE}, and "
    tensors = (*model.named_parameters(), *model.named_buffers())
    if name := next((name for name, each in tensors if each.is_meta), None):
        raise SetupError(f"{what}{name!r} is on the meta device: make the model on a real one")
    if not save_frozen:
        raise SetupError(f"{what}save_frozen=False needs the whole model on each rank: leave it out")
    if any(each.state for each in optimizers):
        raise SetupError(f"{what}an optimizer has a state already: call parallelize before its first step")


def make_mesh(sizes: Mapping[str, int], device: torch.device, world_size: int, shard_size: int) -> Mesh:
    """The mesh with the script's dimensions inside of the data's, as its last ones vary fastest. Collective.

    ``shard_size``: number of ranks with different data in a shard group.
    """
    from torch.distributed.device_mesh import init_device_mesh

    ranks = prod(sizes.values())
    names = sorted(sizes, key=lambda name: name != CONTEXT)  # beside the dimension shard, which it is joined with
    shape = (world_size // ranks // shard_size, shard_size, *(sizes[name] for name in names))
    whole = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", *names))
    place = dict(zip(whole.mesh_dim_names or (), whole.get_coordinate() or (), strict=True))
    sharding = whole["replicate", "shard"] if shape[0] > 1 else whole["shard"]
    if sizes.get(CONTEXT, 1) > 1:
        sharding = whole["shard", CONTEXT]._flatten("shard_cp")
    part = place["replicate"] * shard_size + place["shard"]
    return Mesh(
        whole[tuple(names)],
        sharding,
        part,
        world_size // ranks,
        part * sizes.get(CONTEXT, 1) + place.get(CONTEXT, 0),
    )


def split(
    model: nn.Module, parallelize: Callable[[nn.Module, DeviceMesh], object], mesh: Mesh, device: torch.device
) -> nn.Module:
    """Have the script's function split ``model`` in place, with rank 0's values. Collective.

    Returns the model, or `Parts` with the stages of a pipeline that the function has returned as a list. Raises
    SetupError if it returns another module, or renames, reshapes or unties parameters, or if none of the ranks of a
    pipeline has kept one of them.
    """
    if not any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        model.to(device)
        for each in dict.fromkeys((*model.parameters(), *model.buffers())):
            dist.broadcast(each.data, src=0)
    pipeline = PIPELINE in (mesh.own.mesh_dim_names or ())
    before = _described(model)
    result = parallelize(model, mesh.own)
    kept_model = model
    if pipeline and isinstance(result, list) and result and all(isinstance(each, nn.Module) for each in result):
        kept_model = Parts(result)
    elif result not in (None, model):
        raise SetupError(
            f"parallelize= returned a {type(result).__name__} that is not the model: change the model in place, return "
            f"a list of stages with a dimension {PIPELINE}, or keep a loop of the script's own with flk.adopt"
        )
    after = _described(kept_model)
    kept = after
    if pipeline:  # each stage has removed what others keep
        kept = {name: each for stage in process_group.all_gather(after) for name, each in stage.items()}
    for name, was in before.items():
        now = after.get(name)
        if name not in kept:
            raise SetupError(f"parallelize= has removed the parameter {name!r} of the model: keep parameters and names")
        if now is None:
            continue
        if now[0] != was[0]:
            raise SetupError(
                f"parallelize= has changed the shape of {name!r} from {was[0]} to {now[0]}: use DTensors, which keep "
                "the shape of the whole parameter, as torch's parallelize_module does"
            )
        if now[1] != was[1]:
            raise SetupError(
                f"parallelize= has untied {name!r} from {was[1]!r}, which would be trained apart: leave both out of "
                "the plan, or do not tie them"
            )
    return kept_model


def places_of(model: nn.Module, modules: Sequence[nn.Module]) -> dict[str, type[nn.Module]]:
    """The paths of ``modules`` in ``model``, in their order, and their classes, to find them after `split`."""
    paths = {each: user_name(model, path) for path, each in model.named_modules()}
    return {paths[each]: type(each) for each in modules}


def modules_at(model: nn.Module, places: Mapping[str, type[nn.Module]]) -> list[nn.Module]:
    """The modules at these places, in their order. A stage of a pipeline has not all of them, or others there."""
    found = {
        path: each for name, each in model.named_modules() if places.get(path := user_name(model, name)) is type(each)
    }
    return [found[path] for path in places if path in found]


def _described(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape of each parameter, and the name of the first one that it is tied to, which may be its own."""
    first: dict[int, str] = {}
    return {name: (tuple(each.shape), first.setdefault(id(each), name)) for name, each in parameters_of(model).items()}
