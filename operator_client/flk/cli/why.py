"""`flk why`: say why a job does not run, or why it ended; and `flk explain`: what a cause means."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, open_job, output_format
from flk.cli.output import json_text, table, width_of, wrapped
from flk.errors import UsageError
from flk.spec.units import short_duration
from flk.user.terminal import printable, styled

if TYPE_CHECKING:
    from flk.health import Diagnosis


def why(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    output: Annotated[str, output_format("text", "json")] = "text",
) -> int | None:
    """Say why a job does not run, or why it ended: the cause, its evidence, and the remedy.

    Then come the other things that were found, and why they are not the cause. `flk explain CODE` tells more about a
    cause. Works for every PyTorchJob. Exits with 103 if the job was deleted before it had ended, else with 0.
    """
    from flk.jobs.answer import look

    client, job = open_job(job, context, namespace)
    found = look(client, job, note)
    answer, state = found.report, found.state
    if output == "text":
        sys.stdout.write(text(answer, client.now()))
    else:
        print(json_text(answer.to_dict()))
    return state.code if state.was_deleted else None


def text(answer: Diagnosis, now: float) -> str:
    """Return the answer for people. Times are told as ages, as kubectl does."""
    from flk.health import cause_of

    def ago(time: float) -> str:
        return f" ({short_duration(now - time)} ago)" if time else ""

    cause = answer.cause
    lines = [f"{cause.code}: {answer.summary}" if cause else f"{answer.job}: {answer.summary}"]
    if cause:
        lines += ["", "evidence:"]
        for item in cause.evidence:
            lines.append(f"  {item.where}{ago(item.time)}")
            if said := _beyond(" ".join(item.text.split()), answer.summary):
                lines.append(f"    {said}")
        lines += ["", "remedy:", f"  {cause.remedy}"]
        if answer.stuck:
            lines.append("  It does not resolve by itself.")
        elif cause.resolves_itself:
            known = cause_of(cause.code)
            through = known.cured_by if known else ""
            lines.append(f"  It may resolve by itself{f', through {through}' if through else ''}.")
    if answer.others:
        lines += ["", "not the cause:"]
        for other in answer.others:
            count = f" (x{other.count})" if other.count > 1 else ""
            lines += [f"  {other.text}{count}{ago(other.time)}", f"    {other.why_not}"]
    if not answer.known:
        lines += ["", "examined:", *(f"  {item}" for item in answer.examined)]
    width = width_of(sys.stdout)
    shown = [part for line in lines for part in wrapped(printable(line), width)]
    if cause:
        shown[0] = shown[0].replace(cause.code, styled(cause.code, "bad", sys.stdout), 1)
    return "".join(f"{line}\n" for line in shown)


def _beyond(said: str, headline: str) -> str:
    """Return what a piece of evidence says beyond the headline: its reason, if that has the message; empty: nothing.

    The value of a field, one word, is told in full. The level of a line of a log (ERROR) is no reason.
    """
    reason, _, message = said.partition(": ")
    if " " in message and message in headline and " " not in reason and said not in headline:
        return "" if reason.isupper() else reason
    return "" if " " in said and said in headline else said


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="Code of a cause, as `flk why` prints it.", show_default=False),
    ] = None,
) -> None:
    """Print what a cause means and what to do about it. Without a code, list all causes.

    The reference has the same text.
    """
    from flk.health import CAUSES, cause_of, page

    if code is None:
        print("\n".join(table(["CODE", "MEANING"], [[cause.code, cause.title] for cause in CAUSES])))
        return
    found = cause_of(code)
    if found is None:
        near = difflib.get_close_matches(code, [cause.code for cause in CAUSES], n=1)
        hint = f"did you mean {near[0]}? flk explain lists all codes" if near else "flk explain lists all codes"
        raise UsageError(f"there is no cause {code!r}", hint=hint)
    print(page(found))
