"""DiLoCo without processes: options, compression, the outer optimizer, and who takes part in rounds."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flk.spec.parts import DiLoCo as JobDiLoCo
from flk_diloco import DiLoCo, Membership
from flk_diloco.compression import ErrorFeedback, decode, encode, encoded_size
from flk_diloco.exchange import HubExchange
from flk_diloco.lead import Lead
from flk_diloco.messages import MESSAGES, Begin, CatchUp, Contribution, FromHub, Hello, Peer, Result, session
from flk_diloco.outer import OuterOptimizer
from flk_diloco.rounds import Limits, Member, Rounds
from flk_diloco.server import Hub
from flk_diloco.worker import OuterLoop
from flk_runtime.contract import pod_env, user_env
from flk_runtime.errors import RuntimeFailure, SetupError
from flk_runtime.wire import Refused, Stream
from tests.support.processes import until


def test_options_as_text() -> None:
    assert DiLoCo.parse("") == DiLoCo()
    text = "inner=FULL_SHARD,every=50,dtype=int8,lr=0.5,sites=2"
    assert DiLoCo.parse(text) == DiLoCo("full_shard", 50, "int8", 0.5, sites=2)


def test_every_option_of_a_job_reaches_the_ranks() -> None:
    job = JobDiLoCo.model_validate(
        {
            "inner": "full_shard",
            "every": 50,
            "dtype": "int8",
            "lr": 0.5,
            "momentum": 0.8,
            "sites": 3,
            "site": 2,
            "wait": "1m",
            "timeout": "20s",
            "hub": "hub:1",
            "secret": "hub:secret",
        }
    )
    options = DiLoCo.parse(job.options())
    assert options == DiLoCo("full_shard", 50, "int8", 0.5, 0.8, 3, 2, wait=60, timeout=20)
    assert all(getattr(options, each.name) != each.default for each in dataclasses.fields(DiLoCo))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner=none", "expected a strategy of the ranks within a worker"),
        ("inner=auto", "expected a strategy of the ranks within a worker"),
        ("inner=diloco", "expected a strategy of the ranks within a worker"),
        ("inner=zero", "unknown strategy 'zero'"),
        ("dtype=int2", "expected one of fp32, fp16, int8, int4"),
        ("every=0", "expected an integer, 1 or more"),
        ("every=x", "expected a number"),
        ("lr=nan", "expected a number above 0"),
        ("momentum=1", "from 0 to below 1"),
        ("site=1", "there are 1 sites"),
        ("steps=3", "expected KEY=VALUE with a key of inner, every"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        DiLoCo.parse(text)


def test_membership() -> None:
    environment = {
        user_env.WORKER: "1",
        user_env.WORKERS: "2",
        pod_env.SERVICE_ADDRESS: "hub:1",
        pod_env.SERVICE_SECRET: "s",
    }
    assert Membership.read(DiLoCo(sites=3, site=2), environment) == Membership(5, 6, "hub:1", "s")
    assert "'s'" not in repr(Membership.read(DiLoCo(), environment))  # a secret is not printed
    with pytest.raises(SetupError, match="2 workers and no address where they meet"):
        Membership.read(DiLoCo(), {user_env.WORKERS: "2"})


@pytest.mark.parametrize(("dtype", "error"), [("fp32", 0.0), ("fp16", 2**-11), ("int8", 1 / 254), ("int4", 1 / 14)])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_compression(dtype: str, error: float, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    data = encode(values, dtype)
    assert len(data) == encoded_size(dtype, count)
    largest = values.abs().max() if count else torch.tensor(0.0)
    assert ((decode(data, dtype, count) - values).abs() <= error * largest * (1 + 1e-6)).all()


@pytest.mark.soak
def test_values_of_more_bytes_than_an_int_of_c_counts() -> None:
    """Each worker encodes its parameters in fp32 when it begins: these are 536 million."""
    assert len(encode(torch.zeros(1 << 29), "fp32")) == 1 << 31


def test_compression_of_zeros_and_of_what_fp16_does_not_have() -> None:
    assert not decode(encode(torch.zeros(7), "int8"), "int8", 7).any()
    assert decode(encode(torch.tensor([1e9]), "fp16"), "fp16", 1).item() == pytest.approx(1e9, rel=2**-11)
    assert not decode(encode(torch.zeros(7), "fp16"), "fp16", 7).any()
    with pytest.raises(ValueError, match="3 bytes are not 2 values of fp16"):
        decode(b"abc", "fp16", 2)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_rounding_loses_is_sent_later(dtype: str) -> None:
    feedback = ErrorFeedback(dtype, 3)
    values = torch.tensor([1.0, 1e-3, -0.9e-3])  # a step is 1/127 or 1/7, so that all but the first are lost at first
    total = sum((decode(feedback.encode(values), dtype, 3) for _ in range(1000)), torch.zeros(3))
    assert total.tolist() == pytest.approx([1000.0, 1.0, -0.9], rel=0.1)


def test_a_byte_holds_two_values_of_int4() -> None:
    values = torch.tensor([7.0, -7.0, 3.0, -1.0, 0.0])
    assert encode(values, "int4")[4:] == bytes([0x97, 0xF3, 0x00])
    assert torch.equal(decode(encode(values, "int4"), "int4", 5), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_not_sent(value: float) -> None:
    """int8 would keep them in its residual for ever."""
    lead = Lead({"weight": torch.Size([3])}, torch.ones(3), 0, DiLoCo(dtype="int8"), Membership(2, 3))
    sent: list[bytes] = []
    lead._exchange = SimpleNamespace(submit=lambda version, data: sent.append(data))  # type: ignore[assignment]
    with pytest.raises(
        RuntimeFailure, match=r"^worker 2 has parameters that are not finite at round 1, and does not send them: "
    ):
        lead.submit(torch.tensor([1.0, value, 0.0]))
    lead.submit(torch.zeros(3))
    assert decode(sent.pop(), "int8", 3).tolist() == [1.0, 1.0, 1.0]
    assert not sent


def test_outer_optimizer_is_nesterov_sgd_and_moves_between_workers() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(1))
    outer = OuterOptimizer(start, DiLoCo(dtype="fp32", lr=0.7, momentum=0.9))
    parameter = start.clone().requires_grad_()
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(3):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        outer.apply(encode(gradient, "fp32"))
        parameter.grad = gradient
        sgd.step()
    torch.testing.assert_close(outer.parameters, parameter.detach())
    other = OuterOptimizer(torch.zeros(5), DiLoCo(dtype="fp32"))
    other.from_bytes(outer.to_bytes(), outer.version)
    restored = OuterOptimizer(torch.zeros(5), DiLoCo(dtype="fp32"))
    restored.load_state_dict(outer.state_dict())
    for each in (outer, other, restored):
        each.apply(encode(torch.ones(5), "fp32"))
        assert each.version == 4
        assert torch.equal(each.parameters, outer.parameters)
    with pytest.raises(ValueError, match="parameters differs"):
        restored.load_state_dict(OuterOptimizer(torch.zeros(4), DiLoCo(dtype="fp32")).state_dict())


class Workers:
    """A hub without sockets, and what it has sent to each worker."""

    def __init__(self, workers: int) -> None:
        self.sent: dict[int, list[tuple[FromHub, bytes]]] = {}
        self.log: list[str] = []
        self.rounds = Rounds(Limits(workers, wait=10, timeout=20), 1, "fp32", 0.0, self.log.append)

    def join(self, worker: int, version: int = 0, *, digest: str = "", now: float = 0.0) -> None:
        self.sent[worker] = sent = []
        member = Member(worker, lambda message, data: sent.append((message, data)), version, digest)
        self.rounds.join(member, now)

    def contribute(self, worker: int, value: float, version: int = 1, now: float = 0.0) -> None:
        self.rounds.contribute(worker, version, encode(torch.tensor([value]), "fp32"), now)

    def take(self, worker: int) -> list[Any]:
        """What was sent to the worker since the last call: types, and averages of results."""
        sent, self.sent[worker][:] = list(self.sent[worker]), []
        return [
            (decode(data, "fp32", 1).item(), "joins" if message.joins else "")
            if isinstance(message, Result)
            else type(message).__name__.lower() + ("+joins" if getattr(message, "joins", False) else "")
            for message, data in sent
        ]


def test_a_round_ends_with_the_average_of_all() -> None:
    workers = Workers(2)
    workers.join(0)
    assert workers.take(0) == []  # it waits for the other
    workers.join(1)
    workers.contribute(0, 1.0)
    assert workers.take(0) == ["begin"]
    workers.contribute(1, 2.0)
    assert workers.take(0) == [(1.5, "")]
    assert workers.take(1) == ["begin", (1.5, "")]


def test_workers_begin_without_one_that_does_not_come() -> None:
    workers = Workers(3)
    workers.join(0)
    workers.join(1)
    workers.rounds.tick(9.9)
    assert workers.take(0) == []
    workers.rounds.tick(10.1)
    assert workers.take(0) == workers.take(1) == ["begin"]


@pytest.mark.parametrize("within", [True, False])
def test_a_lost_worker_holds_up_no_round_and_joins_at_a_boundary(within: bool) -> None:
    workers = Workers(3)
    for worker in range(3):
        workers.join(worker)
    workers.contribute(0, 1.0)
    if within:
        workers.contribute(2, 100.0)  # it has contributed: that counts
    workers.rounds.leave(2, 1.0, "killed")
    workers.contribute(1, 3.0)
    average = 104 / 3 if within else 2.0
    assert workers.take(0)[1:] == [(pytest.approx(average), "")]
    workers.contribute(0, 0.0, version=2)
    workers.contribute(1, 0.0, version=2)
    workers.take(0), workers.take(1)
    workers.join(2, 0, digest="x")  # from the start: it is two rounds behind
    assert workers.take(0) == ["give"]
    workers.rounds.give(0, 2, b"parameters")
    assert workers.take(2) == ["catchup"]
    workers.contribute(0, 4.0, version=3)
    workers.contribute(1, 6.0, version=3)  # the others have not waited for it
    assert workers.take(2) == [(5.0, "joins")]
    workers.contribute(0, 1.0, version=4)
    workers.contribute(1, 1.0, version=4)
    assert workers.take(0) == [(5.0, "")]
    workers.contribute(2, 4.0, version=4)
    assert workers.take(0) == [(2.0, "")]


def test_state_that_lacks_the_latest_round_is_completed() -> None:
    workers = Workers(2)
    workers.join(0)
    workers.join(1)
    for version in (1, 2):
        workers.contribute(0, 1.0, version)
        workers.contribute(1, 3.0, version)
    workers.rounds.leave(1, 0.0, "killed")
    workers.contribute(0, 7.0, version=3)
    workers.join(1, 1)
    workers.rounds.give(0, 2, b"parameters")  # it has not applied version 3 yet
    assert workers.take(1) == ["catchup", (7.0, "")]


def test_other_initial_parameters_are_replaced_at_the_start() -> None:
    workers = Workers(2)
    workers.join(0, digest="one")
    workers.join(1, digest="other")
    assert workers.take(0) == ["begin", "give"]
    workers.rounds.give(0, 0, b"parameters")
    assert workers.take(1) == ["catchup+joins"]


def test_a_new_hub_goes_on_from_the_worker_that_is_furthest() -> None:
    workers = Workers(2)
    workers.join(0, 7)
    workers.join(1, 8)
    assert workers.take(1) == ["begin", "give"]
    workers.rounds.give(1, 8, b"parameters")
    assert workers.take(0) == ["catchup+joins"]
    workers.contribute(0, 1.0, version=9)
    workers.contribute(1, 2.0, version=9)
    assert workers.take(0) == [(1.5, "")]


def test_a_hub_that_goes_back_forgets_what_rounding_has_lost() -> None:
    results: list[bytes] = []

    def send(message: FromHub, data: bytes) -> None:
        if isinstance(message, Result):
            results.append(data)

    def contribute(worker: int, version: int, second: float) -> None:
        rounds.contribute(worker, version, encode(torch.tensor([7.0, second]), "int4"), 0.0)

    rounds = Rounds(Limits(2, wait=10, timeout=20), 2, "int4", 0.0, lambda line: None)
    for worker in (0, 1):
        rounds.join(Member(worker, send, 10, ""), 0.0)
    contribute(0, 11, 3.0)
    contribute(1, 11, 0.0)
    assert decode(results.pop(), "int4", 2).tolist() == [7.0, 2.0]  # the average is 1.5
    for worker in (0, 1):
        rounds.leave(worker, 0.0, "killed")
    rounds.join(Member(0, send, 5, ""), 0.0)
    rounds.tick(11.0)
    contribute(0, 6, 1.0)
    assert decode(results.pop(), "int4", 2).tolist() == [7.0, 1.0]


def test_the_donor_is_lost() -> None:
    workers = Workers(3)
    workers.join(0, 5)
    workers.join(1, 5)
    workers.join(2, 3)
    assert workers.take(0) == ["begin", "give"]
    workers.rounds.leave(0, 0.0, "killed")
    assert workers.take(1) == ["begin", "give"]
    workers.rounds.give(0, 5, b"late")  # from the lost one
    workers.rounds.give(1, 5, b"parameters")
    assert workers.take(2) == ["catchup+joins"]


def test_a_late_worker_is_told_apart() -> None:
    workers = Workers(2)
    workers.join(0)
    workers.join(1)
    workers.contribute(1, 1.0, now=5.0)
    assert workers.rounds.tick(24.9) == []
    assert workers.rounds.tick(25.1) == [0]


def test_a_single_worker_goes_on_alone() -> None:
    workers = Workers(2)
    workers.join(0)
    workers.join(1)
    workers.rounds.leave(0, 0.0, "")
    workers.contribute(1, 3.0)
    assert workers.take(1)[1:] == [(3.0, "")]
    assert workers.rounds.left == 1


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "contribute", "give"]), st.integers(0, 2)), max_size=60))
def test_workers_that_take_part_have_received_the_same_rounds(events: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order: a worker that takes part is at the version of all others."""
    workers = Workers(3)
    versions = dict.fromkeys(range(3), 0)
    for event, worker in events:
        if event == "join":
            workers.join(worker, versions[worker])
        elif event == "leave":
            workers.rounds.leave(worker, 0.0, "killed")
        elif event == "contribute":
            workers.contribute(worker, 1.0, versions[worker] + 1)
        elif worker in workers.sent:
            workers.rounds.give(worker, versions[worker], b"parameters")
        workers.rounds.tick(100.0)
        for other, sent in workers.sent.items():
            for message, _ in sent:
                if isinstance(message, Result) and message.version == versions[other] + 1:
                    versions[other] += 1
                elif isinstance(message, CatchUp):
                    versions[other] = message.version
            sent.clear()
        active = {versions[member.worker] for member in workers.rounds.active if not member.behind}
        assert len(active) <= 1


def test_a_hub_that_closes_has_lost_no_worker() -> None:
    said: list[str] = []
    hub = Hub("127.0.0.1", 0, "secret", log=said.append)
    hub.start()
    layout = {"workers": 2, "wait": 60.0, "timeout": 60.0, "size": 1, "dtype": "fp32"}
    workers = [_connected(hub, worker, layout) for worker in range(2)]
    hub.close()
    for worker in workers:
        worker.close()
    until(lambda: not hub._peers, "the hub closes the connections of its workers")
    assert said == ["begin with 2 of 2 workers, at round 0"]


LAYOUT = {"workers": 2, "wait": 60.0, "timeout": 60.0, "size": 1, "dtype": "fp32"}


def test_the_first_worker_after_all_have_left_sets_the_layout(hub: Hub) -> None:
    """A training that was started by mistake, or with another model, keeps the right one out only while it lasts."""
    first = _connected(hub, 0, LAYOUT)
    assert "its model differs" in _refusal(hub, {**LAYOUT, "size": 5})
    first.close()
    until(lambda: not hub._peers, "the hub knows that the worker has left")
    _connected(hub, 0, {**LAYOUT, "size": 5}).close()


def test_nonsense_of_a_worker_ends_its_connection_only(hub: Hub) -> None:
    peers = [_connected(hub, worker, LAYOUT) for worker in range(2)]
    assert isinstance(peers[0].receive()[0], Begin)
    peers[1].send(Contribution(1), b"\0" * 5)
    until(lambda: 1 not in hub._peers, "the hub has closed the connection")
    peers[0].send(Contribution(1), b"\0" * 4)
    assert isinstance(peers[0].receive()[0], Result)
    for peer in peers:
        peer.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub("127.0.0.1", 0, "secret", log=lambda line: None)
    made.start()
    yield made
    made.close()


def _refusal(hub: Hub, layout: dict[str, Any]) -> str:
    stream: Peer = Stream(
        socket.create_connection(("127.0.0.1", hub.port)), session("secret", serves=False), MESSAGES, 60.0
    )
    stream.send(Hello(9, layout, 0, "", "it"))
    message, _ = stream.receive()
    stream.close()
    assert isinstance(message, Refused)
    return message.reason


def _connected(hub: Hub, worker: int, layout: dict[str, Any]) -> Peer:
    """A worker that the hub knows."""
    tcp = socket.create_connection(("127.0.0.1", hub.port))
    stream: Peer = Stream(tcp, session("secret", serves=False), MESSAGES, 15.0)
    stream.send(Hello(worker, layout, 0, "", "it"))
    until(lambda: worker in hub._peers, "the hub knows the worker")
    return stream


def test_the_farewell_of_a_worker_is_not_taken_for_a_message_of_a_former_connection() -> None:
    """A connection that is made at the same time drops what was queued before, and sees that it may send no more."""
    exchange = object.__new__(HubExchange)
    exchange._lock = threading.Lock()
    held: list[bool] = []

    class Outgoing(queue.SimpleQueue[Any]):
        def put(self, *arguments: Any, **named: Any) -> None:
            held.append(exchange._lock.locked() and exchange._closing)

    exchange._outgoing, exchange._thread = Outgoing(), threading.Thread()
    exchange._thread.start()
    exchange.close()
    assert held == [True, True]


def test_the_agreed_state_is_refused_where_the_parameters_have_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = OuterLoop.__new__(OuterLoop)
    monkeypatch.setattr(loop, "_lead", None, raising=False)
    monkeypatch.setattr(loop, "_shapes", {"a": None, "b": None}, raising=False)
    monkeypatch.setattr(loop, "_options", DiLoCo(every=5), raising=False)
    loop.load_state_dict({"names": ["a", "b"], "version": 1})
    with pytest.raises(ValueError, match="its rounds come every 7 steps: keep every=7"):
        loop.load_state_dict({"names": ["a", "b"], "version": 1, "every": 7})
    with pytest.raises(ValueError, match="in another order"):
        loop.load_state_dict({"names": ["b", "a"], "version": 1})


def test_a_worker_that_waits_says_why_it_has_no_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # at which nothing listens afterwards
    lead = Lead({"weight": torch.Size([3])}, torch.ones(3), 0, DiLoCo(), Membership(1, 2, address, "s"))
    lead.connect()
    refused = f"the hub at {address}: [Errno 111] Connection refused"
    until(lambda: lead.missing == refused, "the connection fails", context=lambda: lead.missing)
    lead.close()


def test_what_workers_exchange_has_its_dtype_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        outer = OuterOptimizer(torch.zeros(3, dtype=torch.float32), DiLoCo(dtype="int8"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {each.dtype for each in outer.state_dict().values() if isinstance(each, torch.Tensor)} == {torch.float32}
