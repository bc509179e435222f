"""Which checkpoint in memory an attempt restores."""

from __future__ import annotations

from flk_runtime.launcher.replication.plan import (
    CheckpointId,
    Inventory,
    JobPlan,
    MemoryPlan,
    MemoryPlans,
    Restore,
    ShardId,
    new_readers,
    newest_whole,
)

NODES = {0: "node-a", 1: "node-b"}


def held(*checkpoints: CheckpointId, ranks: tuple[int, ...] = (0, 1)) -> Inventory:
    """What a pod holds: the shards of these ranks."""
    return Inventory.of("10.0.0.1", 5000, [ShardId(checkpoint, rank) for checkpoint in checkpoints for rank in ranks])


def saved(step: int, number: int, attempt: str = "first") -> CheckpointId:
    return CheckpointId(attempt, step, 2, number)


def test_the_newest_whole_checkpoint_is_restored() -> None:
    old, new, cut = saved(5, 1), saved(10, 2), saved(15, 3)
    inventories = {0: held(old, new, cut, ranks=(0,)), 1: held(old, new, ranks=(1,))}
    assert newest_whole(inventories) == Restore(new, {0: [0], 1: [1]})


def test_of_two_saves_after_the_same_step_the_later_one_is_restored() -> None:
    """More copies of the earlier one do not matter, and shards of both make no checkpoint."""
    first, second = saved(5, 1), saved(5, 2)
    assert newest_whole({0: held(first, second), 1: held(first)}) == Restore(second, {0: [0], 1: [0]})
    assert newest_whole({0: held(second, ranks=(0,)), 1: held(first, ranks=(1,))}) is None


def test_a_script_may_count_its_steps_anew() -> None:
    assert newest_whole({0: held(saved(100, 1), saved(3, 2))}) == Restore(saved(3, 2), {0: [0], 1: [0]})


def test_after_the_same_step_of_two_attempts_the_one_with_more_copies_is_restored() -> None:
    first, second = saved(5, 4), saved(5, 1, "second")
    assert newest_whole({0: held(first, second), 1: held(second)}) == Restore(second, {0: [0, 1], 1: [0, 1]})
    assert newest_whole({0: held(first, second), 1: held(first)}) == Restore(first, {0: [0, 1], 1: [0, 1]})


def test_shards_of_two_attempts_make_no_checkpoint() -> None:
    lines: list[str] = []
    inventories = {0: held(saved(5, 1), ranks=(0,)), 1: held(saved(5, 1, "second"), ranks=(1,))}
    plan = MemoryPlans(1, lines.append).make(NODES, inventories)
    assert plan
    assert plan.restore is None
    assert lines == ["the checkpoint in memory after step 5 is incomplete: 1 of its 2 shards are lost"]


def test_each_rank_reads_its_own_shard() -> None:
    """Also the rank of a pod that has replaced another and holds nothing."""
    assert new_readers(Restore(saved(5, 1), {0: [1], 1: [1, 0]}), [0, 1], 1) == []


def test_other_numbers_of_ranks_share_the_shards_that_their_pods_hold() -> None:
    restore = Restore(CheckpointId("first", 5, 4, 1), {0: [0, 1], 1: [1, 9], 2: [9], 3: [0, 1]})
    assert new_readers(restore, [0, 1], 1) == [0, 1, 0, 1]
    assert new_readers(restore, [1], 8) == [0, 1, 2, 3]


def copies(holders: list[list[int]], pods: int, partners: dict[int, int]) -> dict[int, list[int]]:
    """The shards that each pod, of one rank, sends to its partner at first."""
    restore = Restore(CheckpointId("first", 5, 3, 1), dict(enumerate(holders)))
    addresses = dict.fromkeys(range(3), ("10.0.0.1", 5000))
    plan = JobPlan("second", addresses, partners, new_readers(restore, range(pods), 1), restore)
    slices = plan.slices(range(pods), 1)
    return {pod: [shard.rank for shard in memory.copied_at_first(pod, pods)] for pod, memory in slices}


def test_two_pods_hold_each_shard_again_before_anything_is_saved() -> None:
    holders = [[1], [1, 2], [0, 2]]  # pod 0 is new, and now a partner of 2
    assert copies(holders, 3, {0: 1, 1: 2, 2: 0}) == {0: [], 1: [], 2: []}
    assert copies(holders, 3, {0: 2, 1: 0, 2: 1}) == {0: [0], 1: [1], 2: [2]}
    assert copies(holders, 2, {0: 1, 1: 0}) == {0: [], 1: [0]}


def test_a_pod_gets_its_own_part_of_the_plan() -> None:
    """So what it gets does not grow with the job: its shards, their holders, and the addresses that it connects to."""
    restore = Restore(CheckpointId("first", 5, 3, 1), {0: [0, 1], 1: [2], 2: [2, 0]})
    addresses = {pod: (f"10.0.0.{pod}", 5000) for pod in range(4)}
    slices = dict(JobPlan("second", addresses, {0: 1, 1: 2, 2: 0}, [], restore).slices(range(3), 1))
    assert slices[1] == MemoryPlan("second", 2, 0, {2: ("10.0.0.2", 5000)}, Restore(restore.checkpoint, {1: [2]}))
    slices = dict(JobPlan("second", addresses, {0: 1, 1: 0}, [0, 1, 0], restore).slices([0, 1], 1))
    assert [list(part.restore.holders) for part in slices.values() if part.restore] == [[0, 2], [1]]
    assert list(slices[0].addresses) == [1, 2]


def test_no_plan_without_the_memory_of_all_pods() -> None:
    lines: list[str] = []
    assert MemoryPlans(1, lines.append).make(NODES, {0: held(), 1: None}) is None
    assert lines == ["no checkpoints are kept in memory, because pod 1 keeps none"]


def test_what_could_not_be_read_gives_way_to_an_older_checkpoint() -> None:
    old, new = saved(5, 1), saved(10, 2)
    lines: list[str] = []
    plans, inventories = MemoryPlans(1, lines.append), {0: held(old, new), 1: held(old, new, ranks=(1,))}
    plan = plans.make(NODES, inventories)
    assert plan
    assert plan.restore == Restore(new, {0: [0], 1: [0, 1]})
    assert (plan.others, plan.partners, lines) == ([old], {0: 1, 1: 0}, [])
    plans.exclude(new)
    plan = plans.make(NODES, inventories)
    assert plan
    assert plan.restore == Restore(old, {0: [0], 1: [0, 1]})
    assert plan.others == [new]
    assert lines == ["the checkpoint in memory after step 10 could not be read: step 5 is restored"]


def test_the_only_whole_checkpoint_is_tried_again_and_called_doubtful() -> None:
    only = saved(5, 1)
    restore = newest_whole({0: held(only), 1: held(only)}, {only})
    assert restore == Restore(only, {0: [0, 1], 1: [0, 1]}, doubtful=True)
