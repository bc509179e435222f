"""Builds the launcher of a pod: which parts it has, and how they reach each other.

Parts that a job does not need are not imported. What listens has its port when this returns. Nothing is started, but
for what the job needs before it has ranks: the hub, the service of checkpoints in memory, and the reading of usage.
"""

from __future__ import annotations

import os
import selectors
from typing import TYPE_CHECKING

from flk_runtime.launcher import coordinator, health
from flk_runtime.launcher.agent import Agent
from flk_runtime.launcher.control import Control
from flk_runtime.launcher.forkserver import ForkServer
from flk_runtime.launcher.hangs.watch import Watch
from flk_runtime.launcher.output import Output
from flk_runtime.launcher.ranks import Ranks
from flk_runtime.launcher.record_writer import RecordWriter
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import Wakeup
from flk_runtime.launcher.transport import Member, messages

if TYPE_CHECKING:
    from flk_runtime.launcher.replication.plan import Copy
    from flk_runtime.launcher.telemetry.usage import Meter


def build_agent(settings: Settings, wakeup: Wakeup, server: ForkServer, output: Output, error_folder: str) -> Agent:
    """The launcher of a pod, ready to run. ``error_folder`` is for files of the ranks."""
    records = RecordWriter(settings, output.write_stderr, output.last_lines)
    telemetry, log = records.telemetry, records.log
    hub = None
    if settings.hub_port:
        from flk_runtime.launcher.hub import HubProcess

        hub = HubProcess(settings, os.environ, log)
    ranks = Ranks(
        settings,
        server,
        selectors.DefaultSelector(),
        output,
        error_folder=error_folder,
        count_lines=records.count_lines,
        hub=hub,
        look=telemetry.add_line if telemetry else None,
        log=log,
    )
    rendezvous = None
    if settings.pod == 0:
        rendezvous = coordinator.serve(settings, wakeup.post, log, telemetry, records.limits)
    memory = None
    if settings.trains:
        from flk_runtime.launcher.replication.service import MemoryService

        def tell_unreadable(attempt: int, copies: list[Copy]) -> None:  # an attempt runs, so the agent is there
            agent.tell_unreadable(attempt, copies)

        memory = MemoryService.open(settings, wake=wakeup.wake, post=wakeup.post, unreadable=tell_unreadable, log=log)
    port = rendezvous.port if rendezvous else settings.rendezvous_port
    inventory = memory.inventory if memory else lambda: None
    member = Member(settings, port, wakeup.post, log, inventory, records.former, lambda: health.check(settings))
    questions = {
        "stacks": lambda asker: member.send(messages.StacksWanted(asker)),
        "metrics": lambda asker: member.send(messages.TelemetryWanted(asker)),
    }
    watch = Watch(
        settings,
        member.post_status,
        lambda number, snapshots: member.send(messages.StacksReport(number, snapshots)),
        lambda: memory.received_at if memory else 0.0,
        _started_meter(settings) if settings.telemetry else None,
    )
    control = Control(error_folder, questions, log)
    agent = Agent(
        settings, wakeup, records, ranks, member, watch, control, rendezvous=rendezvous, memory=memory, hub=hub
    )
    return agent


def _started_meter(settings: Settings) -> Meter:
    from flk_runtime.launcher.telemetry.usage import Meter

    meter = Meter(settings)
    meter.start()
    return meter
