"""Ranks read a checkpoint in memory: each its own shard, and only what it lacks from other ranks."""

from __future__ import annotations

from tests.support.ranks import Ranks
from tests.support.small_model import told

SCRIPT = """
import json, mmap, os, pathlib, torch, torch.distributed as dist
from flk_runtime.checkpoint import gather
from flk_runtime.checkpoint.gather import PodReader
from flk_runtime.checkpoint.load import SavedCheckpoint
from flk_runtime.checkpoint.save.plan import describe, make_plan
from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.errors import StorageError
from flk_runtime.shared import shard_file
from flk_runtime.shared.memory_messages import SaveKey

gather.PIECE = 1 << 6  # many pieces, of few rows
os.chdir(os.path.dirname(__file__))  # the files of this test alone
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
SHAPES = {"a": (33, 5), "b": (40,), "c": (), "d": (3, 7, 2), "e": (1, 4)}
FULL = {
    name: torch.arange(torch.Size(shape).numel(), dtype=(torch.bfloat16 if name == "b" else torch.float32)).view(shape)
    for name, shape in SHAPES.items()
}

def chunks(strategy, empty=False):
    # The number of rows, and which rows this rank holds; a scalar is on all ranks.
    whole = world_size, rank
    parts, part = {"ddp": (1, 0), "full": whole, "hybrid": (2, rank % 2), "columns": whole}[strategy]
    found = []
    for name, full in FULL.items():
        axis = 1 if strategy == "columns" and full.dim() > 1 else 0
        rows = torch.arange(full.shape[axis]).chunk(parts) if full.dim() else []
        if full.dim() and part >= len(rows):
            continue
        begin = [0] * full.dim()
        begin[axis:axis + 1] = [int(rows[part][0])] if full.dim() else []
        tensor = full.index_select(axis, rows[part]) if full.dim() else full.clone()
        tensor = torch.full_like(tensor, -1) if empty else tensor
        found.append(Chunk((name,), tensor, SHAPES[name], tuple(begin)))
    return found

def save(strategy):
    held = [chunk for chunk in chunks(strategy) if chunk.shape or rank == 0 or strategy == "ddp"]
    shard = StagedShard(pathlib.Path(f"{strategy}.{rank}"), make_plan(describe(held)), {})
    shard.copy(held, f"values of {rank}".encode(), SaveKey(3, 1), rank, world_size)
    shard.close()
    with open(f"{strategy}.{rank}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:128] = shard_file.sealed_preamble(memory, "attempt").to_bytes()

def elements(found):
    return sum(chunk.tensor.numel() * chunk.tensor.element_size() for chunk in found)

def read(saved, wanted, readers, processes=1, copies=(), lost=()):
    opened = []
    def open_shard(shard):
        opened.append(shard)
        if shard in lost:
            raise StorageError("not held")
        return pathlib.Path(f"{saved}.{shard}")
    reader = PodReader(readers, open_shard, processes, copies)
    assert opened == [shard for shard, each in enumerate(readers) if each == rank]
    checkpoint = SavedCheckpoint("memory", reader)
    assert {name for name, _ in checkpoint.names()} >= FULL.keys()
    assert reader._values[shard_file.value_name(0)] == b"values of 0"
    into = chunks(wanted, empty=True)
    checkpoint.read(into)
    for got, right in zip(into, chunks(wanted), strict=True):
        assert torch.equal(got.tensor, right.tensor), (saved, wanted, got.name)
    own = sum(entry.length for shard, entry in reader._entries.values() if entry.dtype and readers[shard] == rank)
    return reader, elements(into), own
"""
SAME = """
for saved in ("ddp", "full", "hybrid"):
    save(saved)
dist.barrier()
for saved in ("ddp", "full", "hybrid"):
    for wanted in ("ddp", "full", "hybrid", "columns"):  # as of a mesh with tensor parallelism
        reader, needed, own = read(saved, wanted, range(world_size))
        shards = {shard for shard, entry in reader._entries.values() if entry.dtype}
        print("=", json.dumps([f"{saved} {wanted}", [reader.received, needed, own, len(shards)]]))
"""
COPIES = """
save("ddp")
dist.barrier()
copies = [2, 3] if rank < 2 else [1]  # the copy of rank 0's shard is not in the list of the second pod
for lost in ((), (3,)):
    reader, needed, own = read("ddp", "ddp", range(world_size), 2, copies, lost if rank < 2 else ())
    print("=", json.dumps([str(lost), [reader.received, own]]))
"""
OTHER = """
torch.cuda.is_initialized = lambda: True  # gloo sends no memory of a GPU
reader, _, _ = read("full", "full", [0, 1, 1, 0])
for wanted in ("ddp", "full", "hybrid"):
    reader, needed, own = read("hybrid", wanted, [1, 0, 1, 0])
    assert len(reader._values) == 4
    assert needed - own <= reader.received <= needed
"""


def test_a_rank_gets_what_it_lacks_and_nothing_else(ranks: Ranks) -> None:
    ended = [told(rank) for rank in ranks(SCRIPT + SAME, 4)]
    assert len(ended[0]) == 12
    received = [rank["full full"][0] for rank in ended]
    assert received == [0, 4, 4, 4], "only the scalar travels"
    assert [rank["full full"][3] for rank in ended] == [1, 2, 2, 2], "headers: its own, and that of rank 0"
    for rank in ended:
        for saved in ("ddp", "full", "hybrid"):
            received, needed, own, _ = rank[f"{saved} {saved}"]
            assert received == needed - own, "all that it holds is of its own shard"
        for received, needed, own, _ in rank.values():
            assert needed - own <= received <= needed
    ranks(SCRIPT + OTHER, 2)


def test_copies_in_the_pod_are_read_in_place_of_what_other_pods_have(ranks: Ranks) -> None:
    ended = [told(rank) for rank in ranks(SCRIPT + COPIES, 4)]
    own = [rank["()"][1] for rank in ended]
    assert min(own) > 0
    assert [rank["()"][0] for rank in ended] == [0, 0, own[0], own[0]]
    assert [rank["(3,)"][0] for rank in ended] == [own[3], own[3], own[0], own[0]], "a copy that is gone is received"
