"""Count what flk says of a training in which nothing is wrong, under load.

    python benchmarks/false_alarms.py [--rounds 14] [--calm 515] [--processes 2]

The job of `diagnosis` trains beside a process for each processor that does nothing but compute, and no fault is
injected. Each attempt that ends and each rank that is called slow is a false alarm, and so is the end of the job. 14
rounds are two hours, from which on the rate is judged. It needs root, ip, iptables and tc.
Goal: no alarm.
"""

from __future__ import annotations

import sys

import diagnosis
import measure

ENOUGH_HOURS = 2.0  # for a verdict


def main() -> int:
    parser = measure.parser(__doc__, rounds=14)
    parser.add_argument("--calm", type=float, default=515, help="seconds of a round (default 515)")
    options = diagnosis.options_of(parser)
    report = measure.Report("false_alarms", options)
    with diagnosis.diagnosed(options.processes) as job:
        try:
            for _ in range(options.rounds):
                job.stay_calm(options.calm)
        finally:
            hours = job.calm_seconds / 3600
            if hours:
                what = "false alarms per hour without a fault"
                report.rate(what, len(job.false_alarms), hours, ENOUGH_HOURS, measure.at_most(0))
            code = report.finish()
    return code


if __name__ == "__main__":
    sys.exit(main())
