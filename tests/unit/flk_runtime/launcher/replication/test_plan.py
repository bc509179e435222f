"""Which checkpoint in memory an attempt restores."""

from __future__ import annotations

from flk_runtime.launcher.replication.plan import (
    CheckpointId,
    Inventory,
    JobPlan,
    MemoryPlan,
    Restore,
    ShardId,
    copied_to_partner,
    make_plan,
    newest_whole,
    readers,
)


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
    inventories = {0: held(saved(5, 1), ranks=(0,)), 1: held(saved(5, 1, "second"), ranks=(1,))}
    assert newest_whole(inventories) is None
    _, line = make_plan("third", inventories, {0: "node-a", 1: "node-b"})
    assert line == "the checkpoint in memory after step 5 is incomplete: the shard of rank 0 is lost"


def test_each_rank_reads_its_own_shard() -> None:
    """Also the rank of a pod that has replaced another and holds nothing."""
    restore = Restore(saved(5, 1), {0: [1], 1: [1, 0]})
    assert readers(restore, {0: range(1), 1: range(1, 2)}) == [0, 1]


def test_other_numbers_of_ranks_share_the_shards_that_their_pods_hold() -> None:
    restore = Restore(CheckpointId("first", 5, 4, 1), {0: [0, 1], 1: [1, 9], 2: [9], 3: [0, 1]})
    assert readers(restore, {0: range(1), 1: range(1, 2)}) == [0, 1, 0, 1]
    assert readers(restore, {1: range(8)}) == [0, 1, 2, 3]


def copies(restore: Restore, pods: int, partners: dict[int, int]) -> dict[int, list[int]]:
    """The shards that each pod, of one rank, sends to its partner at first."""
    plan = JobPlan("second", {pod: ("10.0.0.1", pod) for pod in range(3)}, partners, restore)
    ranks = {pod: range(pod, pod + 1) for pod in range(pods)}
    slices = dict(plan.slices(ranks, plan.readers(ranks)))
    return {pod: [shard.rank for shard in copied_to_partner(each, pod, pods)] for pod, each in slices.items()}


def test_two_pods_hold_each_shard_again_before_anything_is_saved() -> None:
    # Pod 0 is new, and now a partner of 2.
    restore = Restore(CheckpointId("first", 5, 3, 1), {0: [1], 1: [1, 2], 2: [0, 2]})
    assert copies(restore, 3, {0: 1, 1: 2, 2: 0}) == {0: [], 1: [], 2: []}
    assert copies(restore, 3, {0: 2, 1: 0, 2: 1}) == {0: [0], 1: [1], 2: [2]}
    assert copies(restore, 2, {0: 1, 1: 0}) == {0: [], 1: [0]}


def test_each_pod_gets_the_part_of_the_plan_that_it_needs() -> None:
    old, new = CheckpointId("first", 5, 4, 1), CheckpointId("first", 10, 4, 2)
    inventories: dict[int, Inventory | None] = {pod: held(old, new, ranks=(pod, (pod - 1) % 4)) for pod in (0, 2, 3)}
    inventories[1] = held(ranks=())  # it is new
    plan, _ = make_plan("second", inventories, {pod: f"node-{pod}" for pod in range(4)})
    assert plan
    ranks = {pod: range(pod, pod + 1) for pod in range(4)}
    slices = dict(plan.slices(ranks, plan.readers(ranks)))
    address = ("10.0.0.1", 5000)
    assert slices[1] == MemoryPlan("second", 2, 0, {2: address}, Restore(new, {1: [2]}), [old])
    assert slices[0] == MemoryPlan("second", 1, 3, {1: address}, Restore(new, {0: [0]}), [old])


def test_with_other_ranks_than_saved_each_pod_reads_what_it_holds() -> None:
    checkpoint = CheckpointId("first", 5, 4, 1)
    inventories: dict[int, Inventory | None] = {0: held(checkpoint, ranks=(0, 3)), 1: held(checkpoint, ranks=(1, 2))}
    plan, _ = make_plan("second", inventories, {0: "node-a", 1: "node-b"})
    assert plan
    ranks = {0: range(1), 1: range(1, 2)}
    assert plan.readers(ranks) == [0, 1, 1, 0]
    slices = dict(plan.slices(ranks, plan.readers(ranks)))
    assert [each.restore and list(each.restore.holders) for each in slices.values()] == [[0, 3], [1, 2]]


def test_what_could_not_be_read_is_restored_from_other_copies_or_else_an_older_checkpoint() -> None:
    old, new = saved(5, 1), saved(10, 2)
    inventories = {0: held(old, new), 1: held(old, new, ranks=(1,))}
    nodes = {0: "node-a", 1: "node-b"}
    plan, line = make_plan("second", inventories, nodes, {(0, ShardId(new, 1))})
    assert plan
    assert plan.restore == Restore(new, {0: [0], 1: [1]})
    assert (plan.others, line) == ([old], "")
    unreadable = {(pod, ShardId(new, 1)) for pod in inventories}
    plan, line = make_plan("third", inventories, nodes, unreadable)
    assert plan
    assert plan.restore == Restore(old, {0: [0], 1: [0, 1]})
    assert (plan.others, line) == (
        [new],
        "the checkpoint in memory after step 10 could not be read: step 5 is restored",
    )


def test_the_only_whole_checkpoint_is_tried_again_and_called_doubtful() -> None:
    only = saved(5, 1)
    inventories = {0: held(only), 1: held(only)}
    restore = newest_whole(inventories, {(0, ShardId(only, 0)), (1, ShardId(only, 0))})
    assert restore == Restore(only, {0: [0, 1], 1: [0, 1]}, doubtful=True)
