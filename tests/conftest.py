"""For all tests: generated examples have no time limit, and processes that tests start can be interrupted."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("flk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flk")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell without job control starts background commands so, and their children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
