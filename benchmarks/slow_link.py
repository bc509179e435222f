"""Measure training over links of 100 Mbit/s: DiLoCo against DDP and torchft, in speed, bytes and held-out loss.

    python benchmarks/slow_link.py [--rounds 6] [--rate 100mbit] [--steps 200]

Four hosts, network namespaces of this machine whose links tc limits, run the bundled GPT with two ranks each: as one
DDP job of 8 ranks, and as 4 workers of DiLoCo with the inner strategy full_shard. All runs see the same number of
tokens. Then they run it with one rank each, under flk's DiLoCo and torchft 0.2.0's, which is installed into the
user's cache folder if that is possible. Both send float32 every 50 steps. Bytes are what the hosts' interfaces have
sent. It needs root, ip, iptables and tc.
Goals of DiLoCo: more tokens per second than DDP, with rounds of 50 steps at most 1/100 of its bytes per step in fp16
and 1/400 in int4, and a held-out loss at most 1 % higher. Against torchft: as fast, with as many
bytes and the same loss.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import launch
import measure
from example import EXAMPLE

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.network import Host, network

HOSTS, BLOCK = 4, 64
TORCHFT = "torchft==0.2.0"
# Its dependencies except torch, which is not installed a second time.
TORCHFT_NEEDS = ("opentelemetry-exporter-otlp-proto-http>=1.39", "opentelemetry-sdk>=1.39")
AS_GOOD = measure.at_most(1.01)
FASTER = measure.at_least(1)
_LINE = re.compile(r"\[rank (\d+)\] (\{.*\})")


@dataclass(frozen=True)
class Case:
    """A way to train."""

    strategy: str  # of flk, or torchft
    options: str = ""  # of DiLoCo
    processes: int = 2  # on each host

    @property
    def name(self) -> str:
        """The name of the case in the output."""
        return f"{self.strategy} {self.options}".strip()


class Training:
    """One run on all hosts: its tokens per second, bytes per step, and the held-out loss at its end."""

    def __init__(self, hosts: list[Host], case: Case, arguments: list[str], steps: int) -> None:
        self.name = case.name
        self.loss = math.nan
        with tempfile.TemporaryDirectory() as name:
            before = sum(sent_bytes(host) for host in hosts)
            begin = start_torchft if case.strategy == "torchft" else start_flk
            jobs = [begin(host, index, hosts[0], case, arguments, name) for index, host in enumerate(hosts)]
            began = last = 0.0
            try:
                for line in jobs[0].stdout or ():
                    found = _LINE.search(line)
                    values = json.loads(found[2]) if found else {}
                    if "heldout_loss" in values:
                        last = time.monotonic()
                        began = began or last
                        self.loss = values["heldout_loss"]
                        measure.progress(f"{self.name}: {values['step']} steps, {last - began:.0f} s, {self.loss:.4f}")
                codes = [job.wait(300) for job in jobs]
            finally:
                for job in jobs:
                    job.kill()
            if any(codes):
                sys.exit(f"{self.name}: the launchers ended with {codes}; see the output above")
            self.seconds = last - began
            self.bytes_per_step = (sum(sent_bytes(host) for host in hosts) - before) / steps


def start_flk(
    host: Host, index: int, first: Host, case: Case, arguments: list[str], folder: str
) -> subprocess.Popen[str]:
    """Start the launcher of one host."""
    variables = {
        "FLK_PODS": str(HOSTS),
        "FLK_POD_INDEX": str(index),
        "FLK_PROCESSES": str(case.processes),
        "FLK_POD_IP": host.address,
        "FLK_STRATEGY": case.strategy,
        "FLK_PREFLIGHT": "off",
        "FLK_HANG_TIMEOUT": "0",
        "FLK_RDZV_SECRET": "benchmark",
        "OMP_NUM_THREADS": "1",
    }
    if case.strategy == "diloco":
        variables |= {
            "FLK_RDZV_ENDPOINT": f"10.77.0.{index + 1}:29400",
            "FLK_WORKERS": str(HOSTS),
            "FLK_DILOCO": case.options,
            "FLK_SERVICE_ADDRESS": f"{first.address}:29401",
            "FLK_SERVICE": "flk_diloco",
        }
    else:
        variables["FLK_RDZV_ENDPOINT"] = f"{first.address}:29400"
    return start(host, index, ["-m", "flk_runtime", "--", str(EXAMPLE), *arguments], variables, folder)


def start_torchft(
    host: Host, index: int, first: Host, case: Case, arguments: list[str], folder: str
) -> subprocess.Popen[str]:
    """Start the worker of one host."""
    packages = launch.packages_folder(TORCHFT, TORCHFT_NEEDS)
    assert packages is not None, "check packages_folder() before"
    script = str(Path(__file__).with_name("torchft_gpt.py"))
    variables = {"PYTHONPATH": launch.with_packages(packages), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    command = [script, str(index), str(HOSTS), host.address, first.address, case.options, *arguments]
    return start(host, index, command, variables, folder)


def start(
    host: Host, index: int, command: list[str], variables: Mapping[str, str], folder: str
) -> subprocess.Popen[str]:
    """Start a Python process on a host. The output of the first host is read."""
    out = subprocess.PIPE if index == 0 else subprocess.DEVNULL
    error = None if index == 0 else subprocess.DEVNULL
    python = [*host.prefix, sys.executable, "-u"]
    return subprocess.Popen(
        [*python, *command], stdout=out, stderr=error, text=True, cwd=folder, env={**os.environ, **variables}
    )


def limit(host: Host, rate: str) -> None:
    """Limit what a host sends."""
    queue = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    subprocess.run([*host.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", *queue], check=True)


def sent_bytes(host: Host) -> int:
    """Bytes that the interface of a host has sent, headers included."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    # `ip netns exec` mounts the namespace's own /sys.
    return int(subprocess.run([*host.prefix, "cat", path], capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it (default 100mbit)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default 200)")
    parser.add_argument("--width", type=int, default=256, help="of the GPT (default 256)")
    parser.add_argument("--batch-size", type=int, default=2, help="pieces of text per rank and step (default 2)")
    parser.add_argument("--lr", default="3e-3", help="of the inner optimizer")
    parser.add_argument("--outer", default="", help="more options of DiLoCo, as in lr=0.7,momentum=0.8")
    options = parser.parse_args()
    report = measure.Report("slow_link", options)
    arguments = [
        "--steps",
        str(options.steps),
        "--block",
        str(BLOCK),
        "--width",
        str(options.width),
        "--lr",
        options.lr,
    ]
    arguments += ["--batch-size", str(options.batch_size)]
    arguments += ["--evaluate-every", str(max(1, options.steps // 8)), "--dropout", "0"]
    extra = f",{options.outer}" if options.outer else ""
    cases = {
        "ddp": Case("ddp"),
        "fp16": Case("diloco", f"inner=full_shard,every=50,dtype=fp16{extra}"),
        "int4": Case("diloco", f"inner=full_shard,every=50,dtype=int4{extra}"),
    }
    if launch.packages_folder(TORCHFT, TORCHFT_NEEDS):
        cases["alone"] = Case("diloco", "inner=ddp,every=50,dtype=fp32", processes=1)
        cases["torchft"] = Case("torchft", "50", processes=1)
    runs: dict[str, list[Training]] = {name: [] for name in cases}
    for number in range(options.rounds):
        order = list(cases) if number % 2 == 0 else list(cases)[::-1]
        for name in order:
            with network(HOSTS) as net:
                for host in net.hosts:
                    limit(host, options.rate)
                runs[name].append(Training(net.hosts, cases[name], arguments, options.steps))
    compared = [("fp16", "ddp", measure.at_most(1 / 100)), ("int4", "ddp", measure.at_most(1 / 400))]
    compared += [("alone", "torchft", measure.at_most(1))] if "torchft" in cases else []
    for name, other, fewer in compared:
        mine, peer = runs[name], runs[other]
        what = f"DiLoCo, {mine[0].name.partition(' ')[2]} / {'DDP' if other == 'ddp' else other}"
        tokens = options.steps * HOSTS * cases[name].processes * options.batch_size * BLOCK
        speeds = [tokens / run.seconds for run in mine], [tokens / run.seconds for run in peer]
        report.compare(f"{what}, speed", *speeds, FASTER, "tokens/s")
        sent = [run.bytes_per_step for run in mine], [run.bytes_per_step for run in peer]
        report.compare(f"{what}, bytes per step", *sent, fewer, "bytes")
        losses = [run.loss for run in mine], [run.loss for run in peer]
        report.compare(f"{what}, held-out loss", *losses, AS_GOOD, "nats")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
