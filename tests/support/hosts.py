"""The launchers of a job on hosts of their own, with a network between them that tests can break."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

from flk_runtime.contract import pod_env, user_env
from tests.support.network import LEADER_NAME, Network
from tests.support.pods import Pods

PORT = 29400
LEASE = 3.0  # seconds
# Ranks that do not talk to each other: only the rendezvous ends an attempt here.
SCRIPT = """
    import os, pathlib, time

    pathlib.Path(f"pid.{os.environ['FLK_ATTEMPT']}.{os.environ['RANK']}").write_text(str(os.getpid()))
    while not pathlib.Path("stop").exists():
        time.sleep(0.02)
"""


class Hosts(Pods):
    """The launchers of a job of three pods, each on a host of its own. The leader is found by name."""

    def __init__(
        self,
        folder: Path,
        net: Network,
        pods: int = 3,
        fork_server: ForkServerContext | None = None,
        **variables: str,
    ) -> None:
        super().__init__(folder, PORT, pods, 1, fork_server, **variables)
        self.net = net
        self.variables |= {
            pod_env.RDZV_ENDPOINT: f"{LEADER_NAME}:{PORT}",
            user_env.LEASE: str(LEASE),
            pod_env.RESTARTS: "20",
            user_env.START: "fork" if fork_server else "spawn",  # a new interpreter need not import torch
            pod_env.JOB_UID: "uid-1",
            pod_env.RDZV_SECRET: "secret-1",
            **variables,
        }
        for pod in range(pods):
            self.place(pod, pod)
        net.name_leader(net.hosts[0].address)
        self.write(SCRIPT)

    def place(self, pod: int, host: int) -> None:
        """Let the launchers of a pod that start from now on run on this host."""
        self.hosts_of[pod] = self.net.hosts[host]
        self.variables_of[pod] = {pod_env.POD_IP: self.net.hosts[host].address}

    def run(self) -> list[int]:
        """Start the job, and return the process ids of the ranks of its first attempt."""
        self.start("train.py")
        return self.ranks(0)

    def ranks(self, attempt: int) -> list[int]:
        return [self.pid(attempt, rank) for rank in range(3)]

    def finish(self, attempts: int) -> None:
        """Let the ranks succeed, and check the number of attempts."""
        (self.folder / "stop").touch()
        assert self.wait() == [0, 0, 0], self.logs_of_all()
        assert [attempt.number for attempt in self.record().attempts] == list(range(attempts)), self.logs_of_all()

    def lost_pod(self, attempt: int) -> int:
        """The pod whose loss ended this attempt."""
        failure = self.record().attempts[attempt].failure
        assert failure is not None
        assert failure.kind == "lost", failure
        return failure.pod
