"""The contract of client and pods: exit codes, variables, paths in the pod, failures, records, the format of logs.

Of the runtime the client imports this package only. It uses the standard library only, so that every command of the
client can import it fast.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
