"""The script that draws the charts in the page: Vega, Vega-Lite and Vega-Embed in one piece, from vl-convert."""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import Final

from flk.user_files import cache_folder, write_whole

MISSING: Final = "the charts are left out, their numbers are in tables: pip install vl-convert-python brings the charts"


def drawing_script() -> str | None:
    """Return the script, which needs no network; None where vl-convert is not installed.

    Making it takes seconds, so it is kept in the user's cache folder for each version.
    """
    try:
        import vl_convert
    except ImportError:
        return None
    kept = cache_folder() / f"vega-{metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    made = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with contextlib.suppress(OSError):
        write_whole(kept, made.encode())
    return made
