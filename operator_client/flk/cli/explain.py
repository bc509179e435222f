"""`flk explain`: print the page of a cause."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.errors import UsageError


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="Code of a cause, as `flk why` prints it.", show_default=False),
    ] = None,
) -> None:
    """Print what a cause means and what to do about it. Without a code, list all causes.

    The reference has the same text.
    """
    from flk.cli.output import table
    from flk.health import CAUSES, cause_of, page

    if code is None:
        print("\n".join(table(["CODE", "MEANING"], [[cause.code, cause.title] for cause in CAUSES])))
        return
    found = cause_of(code)
    if found is None:
        import difflib

        near = difflib.get_close_matches(code, [cause.code for cause in CAUSES], n=1)
        hint = f"did you mean {near[0]}? flk explain lists all codes" if near else "flk explain lists all codes"
        raise UsageError(f"there is no cause {code!r}", hint=hint)
    print(page(found))
