"""Run all benchmarks, print their results as tables, and name the goals that are missed.

    python benchmarks/run_all.py [NAME ...] [--rounds N] [--write PAGE]
    python benchmarks/run_all.py --mark PAGE

A benchmark that misses a goal, fails or cannot run here does not stop the others. --write puts the tables into a page
in Markdown, between the lines BEGIN and END, in place of the older ones of the same benchmarks, and names rows of these
that were not measured, as without an optional package. Exit code: 1 if a goal is missed, a benchmark fails or a page
loses rows, else 0. --mark measures nothing: it writes below each table of a page whether the code has changed since, as
--write does.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import measure
import measured
from measure import Result, Verdict

ROOT: Final = Path(__file__).parents[1]
NAMES: Final = (
    "cli",
    "start",
    "recovery",
    "recovery_loops",
    "failures",
    "diagnosis",
    "false_alarms",
    "slow_ranks",
    "pod_recovery",
    "elastic",
    "rendezvous",
    "overhead",
    "loop",
    "hosted",
    "streams",
    "curves",
    "telemetry",
    "checkpoint",
    "memory",
    "parallel",
    "plan",
    "scale",
    "submit",
    "large_jobs",
    "many_jobs",
    "slow_link",
    "diloco_loss",
    "gpu",
)
BEGIN: Final = "<!-- results: written by benchmarks/run_all.py -->"
END: Final = "<!-- end of results -->"
_SECTION: Final = re.compile(r"^### (\w+)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
_ROW: Final = re.compile(r"^\| (.+?) \|", re.MULTILINE)


def run(name: str, rounds: int | None) -> tuple[list[Result], int]:
    """Run a benchmark in a process of its own. Returns its results and its exit code."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "results"
        options = ["--json", str(file), *(["--rounds", str(rounds)] if rounds else [])]
        code = subprocess.run([sys.executable, str(folder / f"{name}.py"), *options]).returncode
        lines = file.read_text().splitlines() if file.exists() else []
        return [Result.from_json(line) for line in lines], code


def table(environment: str, results: Iterable[Result]) -> str:
    """The results of a benchmark as a table in Markdown, with what they were measured on above it."""
    lines = [
        f"Measured on {environment}.",
        "",
        "| what | median | ratio (95 % interval) | goal | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        median = f"{result.ours:.4g} / {result.theirs:.4g} {result.unit}"
        ratio = f"{result.ratio:.3f} ({result.span})"
        lines.append(f"| {result.what} | {median} | {ratio} | {result.goal} | {result.verdict} |")
    return "\n".join(lines)


def replaced(page: str, tables: Mapping[str, str]) -> str:
    """The text of a page with these tables, by benchmark, between the lines BEGIN and END; tables of others stay.

    Raises ValueError if the page lacks these lines.
    """
    before, begin, rest = page.partition(BEGIN)
    found, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    sections = {**dict(_SECTION.findall(found)), **tables}
    content = "".join(f"### {name}\n\n{sections[name].strip()}\n\n" for name in NAMES if name in sections)
    return f"{before}{BEGIN}\n\n{content}{END}{after}"


def lost(page: str, name: str, results: Iterable[Result]) -> list[str]:
    """The first cells of the rows that a page has of a benchmark, and the results have not."""
    before = dict(_SECTION.findall(page.partition(BEGIN)[2].partition(END)[0])).get(name, "")
    measured_now = {result.what for result in results}
    return [what for what in _ROW.findall(before) if what not in {"what", "---"} | measured_now]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: {' '.join(NAMES)})")
    parser.add_argument("--rounds", type=int, help="measurements of each side, instead of each benchmark's default")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page in Markdown to put the tables into")
    parser.add_argument("--mark", type=Path, metavar="PAGE", help="a page whose tables get marks, without measuring")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]} (there are {', '.join(NAMES)})")
    if options.mark:
        try:
            options.mark.write_text(measured.marked(options.mark.read_text(), ROOT))
        except measured.HistoryError as error:
            parser.error(str(error))
        return 0
    problems: list[str] = []
    skipped: list[str] = []
    for name in options.names or NAMES:
        print(f"== {name}", flush=True)
        environment = measure.environment()
        found, code = run(name, options.rounds)
        problems += [str(result) for result in found if result.verdict is Verdict.MISSED]
        if code == measure.SKIPPED:
            skipped.append(name)
        elif code and not any(result.verdict is Verdict.MISSED for result in found):
            problems.append(f"failed: {name} ended with {code}")
        if not found:
            continue
        made = table(environment, found)
        print(f"\n{made}\n", flush=True)
        if options.write:
            before = options.write.read_text()
            problems += [f"not measured, and no more on the page: {what}" for what in lost(before, name, found)]
            page = replaced(before, {name: made})
            with contextlib.suppress(measured.HistoryError):
                page = measured.marked(page, ROOT)
            options.write.write_text(page)
    for problem in problems:
        print(problem)
    if skipped:
        print(f"not measured, because this machine could not run them: {', '.join(skipped)}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
