"""Launchers on hosts of their own: the network between them fails, and the job goes on when it can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support.collection import often
from tests.support.hosts import Hosts
from tests.support.network import network
from tests.support.processes import alive

pytestmark = pytest.mark.root("makes network namespaces")


@pytest.fixture
def hosts(tmp_path: Path, fork_server: ForkServerContext) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []
    with network(3) as net:

        def make(**variables: str) -> Hosts:
            made.append(Hosts(tmp_path, net, fork_server=fork_server, **variables))
            return made[-1]

        yield make
        for job in made:
            job.kill()


@pytest.mark.promise("Recovery: Cuts, slow links and lost nodes end at most the attempt")
def test_a_cut_that_is_shorter_than_the_lease_costs_nothing(hosts: Callable[..., Hosts]) -> None:
    job = hosts(FLK_LEASE="5")
    ranks = job.run()
    job.net.hosts[1].cut()
    time.sleep(1)  # TCP tries again after pauses that double: the silence may last for twice as long, and some more
    job.net.hosts[1].heal()
    time.sleep(5)  # a connection that did not recover would have been given up by now
    assert all(alive(rank) for rank in ranks), job.logs_of_all()
    job.finish(attempts=1)


@pytest.mark.promise("Recovery: Cuts, slow links and lost nodes end at most the attempt")
@pytest.mark.parametrize(
    ("receives", "sends"),
    [
        pytest.param(True, True, id="both ways"),
        pytest.param(True, False, id="receives", marks=pytest.mark.soak),
        pytest.param(False, True, id="sends", marks=pytest.mark.soak),
    ],
)
def test_a_member_that_is_cut_off_ends_the_attempt_and_joins_the_next(
    hosts: Callable[..., Hosts], receives: bool, sends: bool
) -> None:
    """The ranks on both sides of the cut end within the lease, without any packet between them."""
    job = hosts()
    ranks = job.run()
    job.net.hosts[2].cut(receives=receives, sends=sends)
    job.until(lambda: not any(alive(rank) for rank in ranks), "all ranks end")
    assert job.running[2].poll() is None
    job.net.hosts[2].heal()
    job.ranks(1)
    job.finish(attempts=2)
    assert job.lost_pod(0) == 2
    assert "lost the connection to pod 0" in job.record().attempts[0].failure.summary  # type: ignore[union-attr]


def test_a_leader_that_is_cut_off_from_all_keeps_the_job(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    ranks = job.run()
    job.net.hosts[0].cut()
    job.until(lambda: not any(alive(rank) for rank in ranks), "all ranks end")
    job.net.hosts[0].heal()
    job.ranks(1)
    job.finish(attempts=2)
    assert job.lost_pod(0) == 0


@pytest.mark.parametrize("pod", often((1,), [2, 0]), ids=["a member", "the leader"])
def test_a_node_that_vanishes_is_replaced(hosts: Callable[..., Hosts], pod: int) -> None:
    """Nobody hears of the end of its processes. The operator starts the pod again on another node."""
    job = hosts()
    ranks = job.run()
    job.net.hosts[pod].cut()
    job.running[pod].kill()
    job.running[pod].wait()
    spare = len(job.net.hosts)
    job.net.add()
    job.place(pod, spare)
    job.net.name_leader(job.net.hosts[spare if pod == 0 else 0].address)
    job.start("train.py", only=pod)
    job.ranks(1)
    assert not any(alive(rank) for rank in ranks)
    job.finish(attempts=2)
    assert job.lost_pod(0) == pod


@pytest.mark.promise("Clusters: The pods of a job are reached by nobody else")
def test_an_address_that_another_job_has_taken_harms_neither_job(
    hosts: Callable[..., Hosts], tmp_path: Path, fork_server: ForkServerContext
) -> None:
    """Pod 0 of a job is gone, its name still leads to its former address, and that is another job's pod 0 by now."""
    job = hosts()
    job.run()
    job.running[0].kill()
    job.running[0].wait()
    (tmp_path / "other").mkdir()
    own = {"FLK_JOB_UID": "uid-2", "FLK_RDZV_SECRET": "secret-2"}
    other = Hosts(tmp_path / "other", job.net, fork_server=fork_server, **own)
    try:
        ranks = other.run()
        refused = "it belongs to another job"
        other.until(lambda: refused in other.log(0), "members of the first job are refused")
        assert all(alive(rank) for rank in ranks)
        spare = len(job.net.hosts)
        job.net.add()
        job.place(0, spare)
        job.net.name_leader(job.net.hosts[spare].address)
        job.start("train.py", only=0)
        job.ranks(1)
        assert all(alive(rank) for rank in ranks)
        job.finish(attempts=2)
        other.finish(attempts=1)
    finally:
        other.kill()


def test_a_bad_network_is_no_fault(hosts: Callable[..., Hosts]) -> None:
    job = hosts(FLK_LEASE="5")
    leader, *members = job.net.hosts
    leader.limit("64kbit")
    for host in members:
        host.lose(0.05)
    ranks = job.run()
    time.sleep(6)
    assert all(alive(rank) for rank in ranks), job.logs_of_all()
    job.finish(attempts=1)


def test_ranks_of_pods_that_have_only_ipv6_addresses_form_a_group(
    tmp_path: Path, fork_server: ForkServerContext
) -> None:
    script = """
        import os
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME"), int(total))
    """
    with network(2, ipv6=True) as net:
        job = Hosts(tmp_path, net, pods=2, fork_server=fork_server)
        job.write(script)
        job.start("train.py")
        try:
            assert job.wait() == [0, 0], job.logs_of_all()
        finally:
            job.kill()
        for rank in range(2):
            assert f"[rank {rank}] {net.hosts[0].address} eth0 2\n" in job.log(rank)
