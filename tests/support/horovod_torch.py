"""A stand-in for `horovod.torch` under a real horovodrun, which asks it what was built before it starts ranks.

Horovod's own is C++, whose build takes minutes of processor time. flk itself takes ranks from horovodrun's variables.
"""

from __future__ import annotations


def gloo_built() -> bool:
    return True
