"""Time stamps of the kubelet, which begin the lines of a log that is asked for with them."""

from __future__ import annotations

import re
from typing import Final

STAMP: Final = re.compile(rb"((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)) ")


def split_stamp(line: bytes) -> tuple[str, str]:
    """Return the time stamp and the text of a line of a log; the first is empty for a message of the kubelet."""
    match = STAMP.match(line)
    if match is None:
        return "", line.decode(errors="replace")
    return match[1].decode(), line[match.end() :].decode(errors="replace")
