"""What flk says about a server of S3 that has no conditional writes. `tests/local/test_s3.py` uses a real server."""

from __future__ import annotations

from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from flk_runtime.checkpoint.storage.manifest import pointer_text  # noqa: E402
from flk_runtime.checkpoint.storage.s3 import S3Destination  # noqa: E402


def destination(monkeypatch: pytest.MonkeyPatch, server: str) -> S3Destination:
    """A prefix on a server with conditional writes, one that ignores conditions, or one that refuses them."""
    made = S3Destination("s3://bucket/runs")
    made._store = obstore.store.MemoryStore()
    made.token = "a"

    class Client:
        def __getattr__(self, name: str) -> Any:
            return getattr(obstore, name)

        def put(self, store: Any, key: str, content: bytes, **mode: Any) -> Any:
            if server == "refuses" and mode:
                raise obstore.exceptions.GenericError("<Code>NotImplemented</Code>")
            return obstore.put(store, key, content, **(mode if server == "has" else {}))

    monkeypatch.setattr(made, "_client", Client())
    return made


@pytest.mark.parametrize("server", ["has", "ignores", "refuses"])
def test_a_server_without_conditional_writes_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    made = destination(monkeypatch, server)
    warning = made.prepare()
    assert bool(warning) == (server != "has")
    assert not warning or warning.startswith("the server of s3://bucket/runs has no conditional writes")
    assert "\n" not in warning
    assert not made._exists(".probe")
    made.claim()
    made.commit(7, b"{}")
    assert made.latest() == pointer_text(7).encode()
