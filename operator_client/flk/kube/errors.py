"""Turn the error answers and the broken connections of an API server into flk's errors, with a hint each.

Only the API server's own messages are shown: any other text in an answer may hold secrets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from urllib3.exceptions import HTTPError, LocationParseError, NewConnectionError, SSLError, TimeoutError

from flk.errors import (
    ApiError,
    ConflictError,
    FlkError,
    ForbiddenError,
    JobNotFoundError,
    MissingApiError,
    NoConfigError,
    UnreachableError,
)
from flk.kube.kubeconfig import Context, config_view
from flk.kube.resources import RequestTarget, Resource
from flk.user.commands import Commands
from flk_runtime.contract import foreign

RETRIED: Final = frozenset({429, 500, 502, 503, 504})  # HTTP statuses after which a request is sent again
# How an API server says that its authorization refuses a request, and why, if it tells. Policies and webhooks refuse
# with the same status, in words of their own.
_UNAUTHORIZED: Final = (
    r'User "([^"]*)" cannot (\w+) (?:resource|path)(?: "([^"]*)")?[^:]*(?:: (.+))?'  # user, verb, what, why
)


def error_from_response(status: int, body: bytes, verb: str, target: RequestTarget, context: Context) -> FlkError:
    """Return the error for an answer with an HTTP status of 300 or more."""
    if status < 400:
        return ApiError(
            f"the API server {context.server} redirects to another address (HTTP status {status}), and flk sends no "
            "credentials there",
            hint=f"check the server's address: {config_view()}",
            status=status,
        )
    reply = status_object(body)
    message = " ".join(str(reply.get("message", "")).split())
    details = reply.get("details") or {}
    if status == 401 and not context.is_secure:
        return NoConfigError(
            f"the API server {context.server} wants credentials, and as kubectl, flk sends none without TLS",
            hint=f"its address has to begin with https: {config_view()}",
            status=status,
        )
    if status == 401:
        return NoConfigError(
            f"the API server {context.server} does not accept the credentials of context {context.name}",
            hint="they may have expired: log in to the cluster again",
            status=status,
        )
    # A proxy answers without a Status, and so do API servers for paths that they do not serve, and kubelets for pods.
    if status in (403, 404) and not (
        reply or target.resource.subresource or body.strip() in (b"", b"404 page not found")
    ):
        return not_an_api_server(context, status)
    unauthorized = re.search(_UNAUTHORIZED, message)
    if status == 403 and (unauthorized or not message):
        return _forbidden(unauthorized, verb, target, context)
    if status == 404:
        return _not_found(bool(reply), details, target, context)
    if status == 409:
        return ConflictError(message or f"{target} exists already, or was changed meanwhile", status=status)
    causes = [cause for cause in details.get("causes") or [] if isinstance(cause, dict)]
    fields = [
        f"{cause['field']}: {' '.join(str(cause.get('message')).split())}"
        for cause in causes
        if cause.get("field") and str(cause.get("message")) not in message
    ]
    reason = "; ".join([message, *fields]) if message else f"HTTP status {status}"
    if status in RETRIED:
        problem = f"the API server {context.server} failed to {verb} {target}: {reason}"
        doctor = Commands(target.namespace or "", context.named).flk("doctor")
        hint = f"a controller that checks such objects may not be running; {doctor} says more"
        return ApiError(problem, hint=hint if "failed calling webhook" in reason else "", status=status)
    reasons = [str(cause.get("reason")) for cause in causes]
    return ApiError(f"the API server refused to {verb} {target}: {reason}", status=status, causes=reasons)


def error_from_connection(error: HTTPError, context: Context) -> ApiError:
    """Return the error for a request that got no answer."""
    if isinstance(error, LocationParseError):
        return NoConfigError(f"the server {context.server!r} of context {context.name} is not an address")
    if is_final(error):
        reason = _innermost(error).partition(" (_ssl.c:")[0]  # without the line of Python's source
        if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:  # by the version of OpenSSL
            return UnreachableError(
                f"the server {context.server} of context {context.name} does not speak TLS",
                hint=f"check its address and its port: {config_view()}",
            )
        if " alert " in reason:  # of the server
            return UnreachableError(
                f"the API server {context.server} refuses the connection of context {context.name}: {reason}",
                hint="the client certificate may be missing or have expired: log in to the cluster again",
            )
        return UnreachableError(
            f"cannot trust the API server {context.server}: {reason}",
            hint="the kubeconfig's certificate-authority must be the one that signed the server's certificate, which "
            "must be for the server's address, or for the kubeconfig's tls-server-name",
        )
    silent = isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)
    problem = "does not answer" if silent else f"cannot be reached: {_innermost(error)}"
    command = Commands(connection=context.named).kubectl("cluster-info", namespaced=False)
    same = f"{command} asks the same server" + "; --request-timeout 2m waits longer" * silent
    return UnreachableError(
        f"the API server {context.server} of context {context.name} {problem}",
        hint=f"check the cluster, and the VPN or proxy that it needs; {same}",
    )


def missing_api(resource: Resource, context: Context, served: Sequence[str] = ()) -> MissingApiError:
    """Return the error for a kind of objects that the cluster has not, or has in other versions than flk knows."""
    cluster = f"the cluster of context {context.name}"
    if served:
        known = ", ".join((resource.version, *resource.others))
        found = f"{cluster} serves {resource} in version {', '.join(served)} only, and flk knows {known}"
        hint = "use a version of flk that is as new as the cluster's"
        return MissingApiError(found, hint=hint, status=404, served=served)
    kind = f"{resource.jobs} (API {resource.api_version})" if resource.jobs else str(resource)
    return MissingApiError(f"{cluster} does not serve {kind}", hint=resource.install, status=404)


def not_an_api_server(context: Context, status: int) -> ApiError:
    """Return the error for an answer that no API server gives, as of a proxy in front of it."""
    return ApiError(
        f"{context.server} did not answer as a Kubernetes API server does (HTTP status {status})",
        hint=f"check the server's address, and the proxy in front of it if there is one: {config_view()}",
        status=0 if status == 404 else status,  # with 404, an API server says that it has no such object
    )


def is_final(error: HTTPError) -> bool:
    """Return whether a request without an answer would fail again: a wrong address, protocol or certificate.

    A connection that is closed in the TLS handshake is none of these: a proxy does so while its server is away.
    """
    if isinstance(error, SSLError):
        return "EOF occurred" not in _innermost(error)
    return isinstance(error, LocationParseError)


def status_object(body: bytes) -> dict[str, Any]:
    """Return the Kubernetes Status that an answer holds, empty if it holds something else."""
    try:
        reply = foreign.parse(body)
    except foreign.ForeignError:
        return {}
    if not isinstance(reply, dict) or reply.get("kind") != "Status":
        return {}
    return {**reply, "details": reply["details"] if isinstance(reply.get("details"), dict) else {}}


def _forbidden(
    unauthorized: re.Match[str] | None, verb: str, target: RequestTarget, context: Context
) -> ForbiddenError:
    user, verb, plural, why = unauthorized.groups("") if unauthorized else ("", verb, "", "")
    if verb == "impersonate":  # which --as needs, before anything is done
        target = RequestTarget(Resource("", "v1", plural))
    commands = Commands(target.namespace or "", context.named)
    question = f"auth can-i {verb} {target.resource}{'' if target.namespace else ' -A'}"
    return ForbiddenError(
        f"no permission to {verb} {target.resource}{target.location or ' in all namespaces'}"
        + (f" (as {user})" if user else "")
        + (f": {why}" if why else ""),
        hint="ask the cluster's administrator for it; this shows whether you have it: "
        f"{commands.kubectl(question, namespaced=bool(target.namespace))}"
        + (
            "; or choose another kind of objects with --target of flk submit"
            if verb == "create" and target.resource.jobs
            else ""
        ),
        status=403,
    )


def _not_found(known: bool, details: dict[str, Any], target: RequestTarget, context: Context) -> FlkError:
    resource, commands = target.resource, Commands(connection=context.named)
    # No API of that group, where the answer is not a Status, or none of that version with this kind.
    if not (known and details.get("name")):
        return missing_api(resource, context)
    if details.get("kind") == "namespaces":
        return ApiError(
            f"there is no namespace {details.get('name')} in the cluster of context {context.name}",
            hint=f"{commands.kubectl('get namespaces', namespaced=False)} lists those that exist",
            status=404,
        )
    if resource.jobs and target.name:
        return JobNotFoundError(f"there is no job {target.name}{target.location}")
    return ApiError(f"not found: {target}", status=404)


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost cause, such as "Connection refused"."""
    while inner := (error.__cause__ or error.__context__ or getattr(error, "original_error", None)):
        error = inner
    return str(getattr(error, "strerror", None) or getattr(error, "verify_message", None) or error)
