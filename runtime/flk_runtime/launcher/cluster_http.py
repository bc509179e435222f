"""Requests of the launcher to servers in the cluster, with a token of the pod."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from pathlib import Path
from typing import Final

TIMEOUT: Final = 5.0  # seconds for one request
ERRORS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)  # of a request and of what is in its answer


def send(
    url: str, body: bytes | None, *, method: str, content_type: str, token: Path | None, authority: str | None
) -> bytes:
    """Send a request, and return the answer. Raises one of ERRORS.

    ``token`` is the file of the token, and ``authority`` the file of who has signed the certificates.
    """
    headers = {"Content-Type": content_type}
    if token:  # it is read anew each time, since the kubelet renews it
        headers["Authorization"] = f"Bearer {token.read_text().strip()}"
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
    context = ssl.create_default_context(cafile=authority) if url.startswith("https:") else None
    # No proxy: the server is in the cluster.
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
        return bytes(answer.read())
