"""What flk reads and changes between steps, where a script trains on a stream of the GPU of its own."""

from __future__ import annotations

from flk_runtime.contract import pod_env
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL

# No GPU: what a stream has queued is done when the host waits for all streams, and no earlier.
STREAM = (
    SMALL_MODEL
    + """
from flk_runtime.system import device as devices

class Stream:
    def __init__(self):
        self.queued, self.waits = [], 0

    def wait(self):
        self.waits += 1
        while self.queued:
            self.queued.pop(0)()

stream = Stream()
devices.synchronize = stream.wait

def train(parameters, value, at_once=False):
    def change():
        for each in parameters:
            each.data.fill_(value)
    change() if at_once else stream.queued.append(change)

def values(parameters):
    assert not stream.queued
    return {each for parameter in parameters for each in parameter.flatten().tolist()}
"""
)


def test_a_round_of_diloco_takes_what_another_stream_still_computes_and_is_seen_by_it(ranks: Ranks) -> None:
    script = (
        STREAM
        + """
with init("diloco") as run:
    model, optimizer = run.parallelize(*build())
    parameters = list(model.parameters())
    for step in range(3):
        train(parameters, float(step))
        before = stream.waits
        run.step()
        assert values(parameters) == {float(step)}
        assert stream.waits >= before + 4, "before and after what is sent, and what is set"
"""
    )
    ranks(script, 1, {pod_env.DILOCO_OPTIONS: "every=1,lr=1,momentum=0,dtype=fp32"})


def test_a_replica_that_another_stream_still_computes_is_no_other_one(ranks: Ranks) -> None:
    script = (
        STREAM
        + """
with group(), init("ddp") as run:
    model, optimizer = run.parallelize(*build())
    for step in range(3):
        train(list(model.parameters()), float(step), at_once=run.rank == 0)
        run.step()
"""
    )
    ranks(script, 2)
