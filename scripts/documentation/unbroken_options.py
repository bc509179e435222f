"""Options in the text of the site: `--metrics` is not broken after its hyphens, as a browser does at the end of a line.

A hook of MkDocs (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any, Final

_CODE: Final = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_OPTION: Final = re.compile(r"(?<![\w-])--?\w[\w-]*")


def on_page_content(html: str, **_: Any) -> str:
    """Return the HTML of a page with each option in `code` in a span, whose style is in docs/assets/site.css."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
