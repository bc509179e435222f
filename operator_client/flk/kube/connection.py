"""Open connections to an API server: certificates and proxies of a kubeconfig become a urllib3 pool."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, InsecureRequestWarning

from flk.errors import NoConfigError
from flk.kube.kubeconfig import Context, shown_by_kubectl

_CONNECTIONS: Final = 256  # connections that are kept open: one for each pod whose log is followed


def open_pool(context: Context, certificate: tuple[bytes, bytes] | None = None) -> urllib3.PoolManager:
    """Return a pool of connections to the API server of a context.

    ``certificate`` is a client certificate with its key, in PEM, that counts instead of the user's.
    Raises NoConfigError if a certificate, a key or the proxy cannot be used.
    """
    options: dict[str, Any] = {"maxsize": _CONNECTIONS, "block": False}
    if context.is_secure:
        options |= _tls_options(context, certificate)
    proxy = str(context.cluster.get("proxy-url") or _proxy_of_environment(context.server))
    try:
        if not proxy:
            return urllib3.PoolManager(**options)
        user = unquote(urllib3.util.parse_url(proxy).auth or "")
        return urllib3.ProxyManager(proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=user or None), **options)
    except (HTTPError, ValueError):
        own = context.cluster.get("proxy-url")
        raise NoConfigError(
            f"the proxy of {f'context {context.name}' if own else 'the environment'} is not an address of HTTP",
            hint=shown_by_kubectl() if own else "$HTTPS_PROXY has it; flk speaks HTTP to proxies, and not SOCKS",
        ) from None


def cluster_key(context: Context) -> str:
    """Return what tells the cluster of a context from others in names of files, also from one that had its address."""
    try:
        authority = data_or_file(context.cluster, "certificate-authority")
    except (OSError, ValueError):
        authority = b""  # the connection says what is wrong with it
    named = [str(context.cluster.get(key) or "") for key in ("proxy-url", "tls-server-name")]
    return hashlib.sha256("\n".join([context.server, *named, ""]).encode() + authority).hexdigest()[:16]


def _tls_options(context: Context, certificate: tuple[bytes, bytes] | None) -> dict[str, Any]:
    cluster = context.cluster
    insecure = bool(cluster.get("insecure-skip-tls-verify"))
    try:
        authority = data_or_file(cluster, "certificate-authority")
        # Between the certificates of a file are comments, which may have any encoding.
        tls = ssl.create_default_context(cadata=authority.decode("ascii", "ignore") if authority else None)
        # As kubectl: an intermediate certificate may be trusted, and authorities made by older tools are accepted.
        tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if insecure:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
            urllib3.disable_warnings(InsecureRequestWarning)  # the kubeconfig says that this is wanted
        found = certificate or _client_certificate(context.user)
        if found:
            _load_certificate(tls, *found)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        said = [getattr(error, name, None) for name in ("filename", "strerror")]
        reason = (": ".join(filter(None, said)) or str(error)).partition(" (_ssl.c:")[0]
        problem = f"the certificates of context {context.name} cannot be used: {reason}"
        raise NoConfigError(problem, hint=shown_by_kubectl()) from None
    options: dict[str, Any] = {"ssl_context": tls, "cert_reqs": "CERT_NONE" if insecure else "CERT_REQUIRED"}
    if cluster.get("tls-server-name"):
        options |= dict.fromkeys(("server_hostname", "assert_hostname"), str(cluster["tls-server-name"]))
    return options


def _client_certificate(user: Mapping[str, Any]) -> tuple[bytes, bytes] | None:
    certificate = data_or_file(user, "client-certificate")
    return (certificate, data_or_file(user, "client-key") or certificate) if certificate else None


def data_or_file(entry: Mapping[str, Any], key: str) -> bytes:
    """Return what ``key-data`` holds in base64, or the content of the file that ``key`` names; empty without both.

    The base64 may have several lines, as the command of that name writes it.
    """
    if entry.get(f"{key}-data"):
        try:
            return base64.b64decode("".join(str(entry[f"{key}-data"]).splitlines()), validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    return Path(str(entry[key])).read_bytes() if entry.get(key) else b""


def _load_certificate(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a client certificate. Python reads certificates from files only, so a private file exists briefly."""
    descriptor, path = tempfile.mkstemp(prefix="flk-")  # readable by this user only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(certificate + b"\n" + key)
        tls.load_cert_chain(path, password="")
    finally:
        os.unlink(path)


def _proxy_of_environment(server: str) -> str:
    """Return the proxy that $HTTPS_PROXY, $HTTP_PROXY and $NO_PROXY name for a server; empty for none."""
    try:
        parts = urlsplit(server)
    except ValueError:
        return ""  # no address, which the first request says
    proxy = _variable(f"{parts.scheme}_proxy")
    host = parts.hostname or ""
    if not proxy or host == "localhost" or _is_loopback(host):
        return ""
    excluded = (entry.strip().lower() for entry in _variable("no_proxy").split(","))
    if any(_covers(entry, host, parts.netloc) for entry in excluded if entry):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"  # as in kubectl, curl and pip


def _variable(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def _covers(entry: str, host: str, netloc: str) -> bool:
    """Return whether an entry of $NO_PROXY means a host: ``*``, a domain, an address or a network."""
    if entry in ("*", host, f"[{host}]", netloc) or host.endswith("." + entry.removeprefix("*").lstrip(".")):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
