"""HTTP client for a Kubernetes API server: kubeconfig and credentials, requests with retries, errors, list-and-watch.

`connect` reads a context of the kubeconfig, `ApiClient` sends requests and `list_and_watch` follows a collection. The
package knows nothing of flk but its errors. Only `flk.jobs` and the packages above it may import it.
"""

from flk.kube.client import ApiClient, RetryPolicy
from flk.kube.credentials import Access, connect
from flk.kube.kubeconfig import ConnectionOptions, connection_options, set_connection_options
from flk.kube.resources import Document, Object, RequestTarget, Resource, check_selector
from flk.kube.watch import Changed, Listed, list_and_watch

__all__ = [
    "Access",
    "ApiClient",
    "Changed",
    "ConnectionOptions",
    "Document",
    "Listed",
    "Object",
    "RequestTarget",
    "Resource",
    "RetryPolicy",
    "check_selector",
    "connect",
    "connection_options",
    "list_and_watch",
    "set_connection_options",
]
