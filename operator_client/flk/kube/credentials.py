"""Credentials for requests to an API server: headers and client certificates of a kubeconfig user, renewed in time.

flk reads these itself: importing the kubernetes package takes 300 ms, more than all the rest of `flk status`, its
reader ignores impersonation, and its renewal takes no lock.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import urllib3

from flk.errors import NoConfigError
from flk.kube import kubeconfig
from flk.kube.connection import open_pool
from flk.kube.kubeconfig import Context, connection_options, shown_by_kubectl
from flk_runtime.contract.values import dataclass

_REREAD: Final = 60.0  # seconds after which files of tokens are read again


@dataclass(frozen=True)
class Credential:
    """A token or client certificate that is valid until ``expires``, in seconds since the epoch."""

    authorization: str = ""  # value of the Authorization header
    certificate: tuple[bytes, bytes] | None = None  # client certificate and key, in PEM
    expires: float = math.inf


class Access:
    """Access to one API server: its address, connections, and headers with valid credentials.

    Many threads may use one Access. Credentials are renewed by one of them, while the others wait for the result.
    """

    def __init__(self, context: Context) -> None:
        self.namespace = context.namespace
        self._lock = threading.Lock()
        self._credential: Credential | None = None
        self._take(context)

    @property
    def server(self) -> str:
        """Address of the API server, without a slash at the end."""
        return self.context.server

    def headers(self) -> urllib3.HTTPHeaderDict:
        """Return the headers that every request needs. Raises NoConfigError if the credentials cannot be renewed."""
        with self._lock:
            if self._credential is None or time.time() >= self._credential.expires:
                self._obtain()
            return self._headers()

    def renew(self, refused: Mapping[str, str]) -> None:
        """Obtain new credentials after the server has refused ``refused``, unless another thread has done so.

        The kubeconfig is read again, with the files that it names: the user may have logged in since.
        """
        with self._lock:
            if self._credential is not None and self._headers() == refused:
                # The service account of a pod is of no file.
                self._take(kubeconfig.load(self.context.name if self.context.files else None))
                self._obtain()

    def _headers(self) -> urllib3.HTTPHeaderDict:
        headers = self._impersonation.copy()
        if self._credential is not None and self._credential.authorization:
            headers["Authorization"] = self._credential.authorization
        return headers

    def _take(self, context: Context) -> None:
        """Use a context, with the certificate of the present credential if that has one."""
        certificate = self._credential.certificate if self._credential else None
        self._impersonation, self.pool = _impersonation(context), open_pool(context, certificate)
        self.context = context

    def _obtain(self) -> None:
        before = self._credential
        self._credential = _credential(self.context, before)
        if self._credential.certificate != (before.certificate if before else None):
            self.pool = open_pool(self.context, self._credential.certificate)


def connect(context: str | None = None) -> Access:
    """Return the access that a context of the kubeconfig describes (default: the current one), without a request."""
    return Access(kubeconfig.load(context))


def _credential(context: Context, before: Credential | None) -> Credential:
    """Return the user's credential. Raises NoConfigError if it cannot be obtained."""
    user = context.user
    if not context.is_secure:
        return Credential()
    if user.get("tokenFile"):
        return _token_file(context, before)
    if user.get("token"):
        return Credential(_bearer(context, str(user["token"])))
    # As in kubectl, the plugin of a user who has a certificate does not run.
    if user.get("exec") and not (user.get("client-certificate") or user.get("client-certificate-data")):
        return _from_plugin(context)
    if old := next((key for key in ("auth-provider", "username") if user.get(key)), ""):
        problem = f"the user of context {context.name} has {old}, which flk does not read"
        raise NoConfigError(problem, hint="use a token, a client certificate or a credentials plugin (exec)")
    return Credential()


def _bearer(context: Context, token: str) -> str:
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise NoConfigError(
            f"the token of context {context.name} has characters that no token has", hint=shown_by_kubectl()
        )
    return f"Bearer {token}"


def _token_file(context: Context, before: Credential | None) -> Credential:
    """Read the token from its file, which may be replaced. While it cannot be read, the last one counts."""
    path = Path(str(context.user["tokenFile"]))
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        token = "" if before else str(context.user.get("token") or "")  # as in kubectl, which reads the file first
    if token:
        return Credential(_bearer(context, token), expires=time.time() + _REREAD)
    if before is not None:
        return before
    raise NoConfigError(
        f"the token file {path} of context {context.name} cannot be read or is empty", hint=shown_by_kubectl()
    )


def _from_plugin(context: Context) -> Credential:
    from flk.kube import exec_plugin  # needs subprocess, which most users' commands need not import

    status = exec_plugin.run(context)
    expires = _expiration(status.get("expirationTimestamp"))
    certificate = None
    if status.get("clientCertificateData") and status.get("clientKeyData"):
        certificate = str(status["clientCertificateData"]).encode(), str(status["clientKeyData"]).encode()
    token = str(status.get("token") or "")
    return Credential(_bearer(context, token) if token else "", certificate, expires)


def _expiration(time_text: Any) -> float:
    """Return an RFC 3339 time in seconds since the epoch; infinity for none."""
    try:
        whole = re.sub(r"\.\d+", "", str(time_text)).replace("Z", "+00:00")  # Python 3.10 takes few fractions
        return datetime.fromisoformat(whole).timestamp()
    except (ValueError, OverflowError):
        return math.inf


def _impersonation(context: Context) -> urllib3.HTTPHeaderDict:
    """Return the headers for `as` and `as-groups` of a kubeconfig's user. As in kubectl, they need no encryption.

    They are no credentials: behind `kubectl proxy`, a command without them would act with more rights than it is to.
    """
    user, headers = dict(context.user), urllib3.HTTPHeaderDict()
    if chosen := connection_options().connection.user:  # as in kubectl: it replaces the kubeconfig's
        user["as"] = chosen
    if unread := next((key for key in ("as-uid", "as-user-extra") if user.get(key)), ""):
        problem = f"the user of context {context.name} has {unread}, which flk does not read"
        raise NoConfigError(problem, hint="impersonate with as and as-groups only")
    if user.get("as"):
        headers.add("Impersonate-User", str(user["as"]))
    for group in user.get("as-groups") or []:
        headers.add("Impersonate-Group", str(group))
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        problem = f"context {context.name} impersonates a name with characters that no header can have"
        raise NoConfigError(problem, hint=shown_by_kubectl())
    return headers
