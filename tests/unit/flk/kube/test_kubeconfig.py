"""Kubeconfigs: the context that is selected, the credentials and their renewal, and the errors."""

from __future__ import annotations

import base64
import contextlib
import copy
import errno
import json
import os
import pty
import random
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import urllib3
import yaml

from flk.errors import NoConfigError, NoKubeconfigError
from flk.kube.credentials import Access, connect
from flk.kube.errors import error_from_connection
from flk.kube.kubeconfig import ConnectionOptions, load
from flk.observe.client import JobClient
from flk.user.commands import Connection
from tests.support.certificates import make_certificate

SECRET = "a-very-secret-token"


def config(name: str = "here", **context: Any) -> dict[str, Any]:
    return {
        "current-context": name,
        "clusters": [{"name": "c", "cluster": {"server": f"https://{name}.example:6443"}}],
        "users": [{"name": "u", "user": {"token": SECRET}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u", **context}}],
    }


def with_user(**user: Any) -> dict[str, Any]:
    return config() | {"users": [{"name": "u", "user": user}]}


def with_cluster(**cluster: Any) -> dict[str, Any]:
    return config() | {"clusters": [{"name": "c", "cluster": {"server": "https://here.example", **cluster}}]}


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_authorities: None) -> Any:
    """Writes kubeconfigs (mappings, or text) and has them used, as a list of files."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def write(*contents: Any) -> list[Path]:
        paths = []
        for number, content in enumerate(contents):
            paths.append(tmp_path / f"config-{number}")
            paths[-1].write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
        return paths

    return write


def test_namespace_is_the_contexts(use: Any) -> None:
    use(config(namespace="team"))
    assert load().namespace == "team"
    use(config())
    assert load().namespace == "default"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_first_document_counts_in_any_encoding_of_yaml(use: Any, encoding: str) -> None:
    (path,) = use("")
    path.write_bytes(f"{yaml.safe_dump(config())}---\n{{}}\n".encode(encoding))
    assert load().server == "https://here.example:6443"


def test_first_of_several_files_wins(use: Any, tmp_path: Path) -> None:
    use(config("one"), config("two"))
    assert load().server == "https://one.example:6443"
    assert load("two").name == "two"


def test_files_that_are_not_there_are_passed_over(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = use(config())
    monkeypatch.setenv("KUBECONFIG", f"/nowhere/config:{path}")
    assert load().name == "here"


def test_neither_kubeconfig_nor_token_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoConfigError, match="/nowhere/config does not exist") as caught:
        load()
    assert "KUBECONFIG" in caught.value.hint
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(NoConfigError, match="no service account token"):
        load()


def test_unknown_context_is_told_what_was_likely_meant(use: Any) -> None:
    use(config("production"))
    with pytest.raises(NoConfigError, match="no context 'prodution'") as caught:
        load("prodution")
    assert caught.value.hint == "did you mean production?"


def test_no_current_context(use: Any) -> None:
    use(config("here") | {"current-context": ""})
    with pytest.raises(NoConfigError, match="has no current context") as caught:
        load()
    assert "here" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        "a: [",
        "- 1",
        "\0",
        "contexts: [{}]",
        "contexts: [1]",
        yaml.safe_dump(config() | {"clusters": []}),
        yaml.safe_dump(config() | {"clusters": [{"name": "c", "cluster": {}}]}),
        yaml.safe_dump(config() | {"users": []}),
        yaml.safe_dump(config() | {"users": [{"user": {"token": SECRET}}]}),
        yaml.safe_dump(config() | {"contexts": [{"name": "here"}]}),
        yaml.safe_dump(with_cluster(**{"insecure-skip-tls-verify": "false"})),
        yaml.safe_dump(with_cluster(extensions=5)),
    ],
)
def test_broken_files_are_one_clear_line(use: Any, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    use(text)
    with pytest.raises(NoConfigError) as caught:
        load()
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def plugin(script: str, **more: Any) -> dict[str, Any]:
    version = "client.authentication.k8s.io/v1"
    return with_user(exec={"apiVersion": version, "command": sys.executable, "args": ["-c", script], **more})


REPLY = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"from-plugin"}}'
ADDRESS = (
    "import json, os; info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
    "info['status'] = {'token': info['spec']['cluster']['server'] + os.environ['EXTRA']}; print(json.dumps(info))"
)


@pytest.mark.parametrize(
    ("content", "header"),
    [
        (config(), f"Bearer {SECRET}"),
        (with_user(token=SECRET, tokenFile="/nowhere/token"), f"Bearer {SECRET}"),
        (plugin(f"print({REPLY!r})"), "Bearer from-plugin"),
        (plugin(f"print({REPLY!r})", command="python3"), "Bearer from-plugin"),
        (
            plugin(ADDRESS, provideClusterInfo=True, env=[{"name": "EXTRA", "value": "/x"}]),
            "Bearer https://here.example:6443/x",
        ),
        (plugin(ADDRESS, provideClusterInfo=True, env=[{"name": "EXTRA"}]), "Bearer https://here.example:6443"),
        (
            plugin(ADDRESS, provideClusterInfo=True, env=[{"name": "EXTRA", "value": 0}]),
            "Bearer https://here.example:64430",
        ),
    ],
    ids=[
        *("token", "token whose file is away", "plugin", "plugin on PATH", "plugin that is told of the cluster"),
        *("plugin with a variable without a value", "plugin with a variable whose value is a number"),
    ],
)
def test_credentials_are_in_the_headers(use: Any, content: Any, header: str) -> None:
    use(content)
    assert connect().headers() == {"Authorization": header}


PLUGIN_FAILED = r"the credentials plugin .* of context here failed.*"


@pytest.mark.parametrize("server", ["http://here.example", "http://127.0.0.1:8001", "here.example:8080"])
@pytest.mark.parametrize(
    "content",
    [
        *[config(), with_user(username="ada"), with_user(**{"token": "t", "as": "eve"})],
        plugin(f"open('RAN', 'w'); print({REPLY!r})"),
    ],
)
def test_nothing_secret_goes_over_plain_http(use: Any, content: Any, server: str, tmp_path: Path) -> None:
    """As kubectl, which does not even run the plugin."""
    content["clusters"][0]["cluster"]["server"] = server
    use(content)
    access = connect()
    impersonated = content["users"][0]["user"].get("as")  # which is not secret, and means fewer rights
    expected = {"Impersonate-User": impersonated} if impersonated else {}
    assert (dict(access.headers()), access.server.partition("://")[0]) == (expected, "http")
    assert list(tmp_path.rglob("RAN")) == []


WRONG = [
    None,
    5,
    -1.5,
    True,
    "x",
    "\n",
    "\u00e9",
    "\ud7ff",
    [],
    [5],
    [None],
    {},
    {"a": 5},
    {5: [5]},
    [{}],
    float("nan"),
]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def test_any_value_of_a_kubeconfig_is_taken_or_refused_in_one_line(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"token": "t", "as": "a", "as-groups": ["g"]}
    plugins = {"exec": {**plugin("")["users"][0]["user"]["exec"], "args": ["x"], "env": [{"name": "A", "value": "b"}]}}
    whole = {**with_user(**user), "kind": "Config"}
    whole["clusters"][0]["cluster"] |= {"proxy-url": "http://127.0.0.1:1", "tls-server-name": "x", "extensions": []}
    whole["users"].append({"name": "v", "user": plugins})
    monkeypatch.setattr("subprocess.run", lambda *args, **how: subprocess.CompletedProcess(args, 1, "", ""))
    for current in ("u", "v"):
        whole["contexts"][0]["context"] |= {"user": current, "namespace": "n"}
        for path, wrong in random.Random(5).sample([(path, wrong) for path in places(whole) for wrong in WRONG], 60):
            changed = copy.deepcopy(whole)
            node: Any = changed
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = wrong
            use(changed)
            with contextlib.suppress(NoConfigError):  # and no other error
                connect().headers()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (plugin("import sys; sys.exit('please log in: sso login')"), f"{PLUGIN_FAILED}please log in: sso login"),
        (plugin("print('junk')"), f"{PLUGIN_FAILED}something that is not JSON"),
        (plugin("print('{}')"), f"{PLUGIN_FAILED}no ExecCredential"),
        (plugin("", command="no-such-plugin", installHint="get it here"), "no-such-plugin.* get it here"),
        (with_user(tokenFile="/nowhere/token"), "the token file /nowhere/token of context here cannot be read"),
        (with_user(**{"auth-provider": {"name": "oidc"}}), r"has auth-provider, which flk does not .* \(exec\)"),
        (with_user(**{"as": "ada", "as-uid": "7"}), "has as-uid, which flk does not read"),
        (with_user(**{"as": "ada", "as-user-extra": {"scopes": ["x"]}}), "has as-user-extra, which flk does not read"),
    ],
)
def test_credentials_that_cannot_be_had(use: Any, content: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    use(content)
    with pytest.raises(NoConfigError) as caught:
        connect().headers()
    assert re.search(said, f"{caught.value} {caught.value.hint}")
    assert capfd.readouterr().err == ""


def test_credentials_plugin_that_hangs(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flk.kube.exec_plugin.TIME_LIMIT", 0.1)
    use(plugin("import time; time.sleep(60)"))
    with pytest.raises(NoConfigError, match=r"it did not end within 0\.1 seconds"):
        connect().headers()


def test_what_a_plugin_has_said_before_it_was_ended_is_told(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Mock(side_effect=subprocess.TimeoutExpired("plugin", 60, stderr=b"enter the code\n123"))
    monkeypatch.setattr("subprocess.run", ended)
    use(plugin(""))
    with pytest.raises(NoConfigError, match="it did not end within 60 seconds: enter the code 123"):
        connect().headers()


# Renewal


def counting_plugin(folder: Path, **status: Any) -> dict[str, Any]:
    """A plugin whose token is the number of its run, kept in a file."""
    script = (
        f"import json, pathlib; count = pathlib.Path({str(folder / 'runs')!r})\n"
        "number = len(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text('x' * number)\n"
        f"status = {{'token': f'run-{{number}}', **{status!r}}}\n"
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential', "
        "'status': status}))"
    )
    return plugin(script)


def authorization(access: Access) -> str:
    return str(access.headers()["Authorization"])


def test_plugin_runs_once_until_its_token_expires(use: Any, tmp_path: Path) -> None:
    use(counting_plugin(tmp_path, expirationTimestamp="2999-01-01T00:00:00.123456789Z"))
    access = connect()
    assert [authorization(access) for _ in range(3)] == ["Bearer run-1"] * 3
    use(counting_plugin(tmp_path, expirationTimestamp="2001-01-01T00:00:00Z"))
    access = connect()
    assert [authorization(access) for _ in range(2)] == ["Bearer run-2", "Bearer run-3"]


def test_many_threads_renew_a_refused_token_once(use: Any, tmp_path: Path) -> None:
    use(counting_plugin(tmp_path))
    access = connect()
    refused = access.headers()
    threads = [threading.Thread(target=access.renew, args=(refused,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert authorization(access) == "Bearer run-2"


def test_renewal_reads_the_kubeconfig_again(use: Any) -> None:
    (path,) = use(config("in-cluster") | {"current-context": "other"})  # which no name means
    access = connect("in-cluster")
    refused = access.headers()
    path.write_text(path.read_text().replace(SECRET, "token-of-a-new-login"))
    access.renew(refused)
    assert access.context.named.context == "in-cluster"
    assert authorization(access) == "Bearer token-of-a-new-login"


def test_token_file_is_read_again(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    use(with_user(tokenFile="token"))  # relative to the kubeconfig
    now = [1000.0]
    monkeypatch.setattr("flk.kube.credentials.time.time", lambda: now[0])
    access = connect()
    assert authorization(access) == "Bearer first"
    file.write_text("second")
    assert authorization(access) == "Bearer first"
    now[0] += 100
    assert authorization(access) == "Bearer second"
    file.unlink()
    now[0] += 100
    assert authorization(access) == "Bearer second"


def test_another_user_may_have_what_flk_does_not_read(use: Any) -> None:
    content = with_user(token="t")
    content["users"].append({"name": "other", "user": {"as": "ada", "as-user-extra": {"scopes": ["x"]}}})
    content["users"][0]["user"]["of-a-tool"] = {"theme": ["dark"]}
    use(content)
    assert authorization(connect()) == "Bearer t"


def test_impersonation(use: Any) -> None:
    use(with_user(**{"token": "t", "as": "ada", "as-groups": ["dev", "ops"]}))
    assert list(connect().headers().items()) == [
        ("Impersonate-User", "ada"),
        ("Impersonate-Group", "dev"),
        ("Impersonate-Group", "ops"),
        ("Authorization", "Bearer t"),
    ]


# Where flk runs


# What `kind delete cluster` leaves.
FRAME = "apiVersion: v1\nkind: Config\nclusters: null\ncontexts: null\ncurrent-context: ''\nusers: null\n"


@pytest.mark.parametrize("left", ["", FRAME])
def test_kubeconfig_without_a_context_is_none(use: Any, left: str) -> None:
    use(left)
    with pytest.raises(NoKubeconfigError, match=r"there is no kubeconfig: .*config-0 has no context"):
        load()
    use(left, config())
    assert load().name == "here"


def test_service_account_of_a_pod(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"token": SECRET, "namespace": "team\n", "ca.crt": certificate(tmp_path)[0]}.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("flk.kube.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = connect()
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "team")
    assert authorization(access) == f"Bearer {SECRET}"
    (tmp_path / "namespace").unlink()
    (tmp_path / "namespace").symlink_to("/proc/self/mem")  # which cannot be read
    monkeypatch.setattr("flk.kube.kubeconfig._options", ConnectionOptions(Connection(user="ada")))
    for left in (FRAME, config() | {"current-context": ""}):
        use(left)
        assert (load().namespace, load().named.flags) == ("default", " --as ada")
    assert load("here").name == "here"
    use(config())
    assert load().name == "here"


def test_a_home_of_another_user_has_no_kubeconfig(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = os.stat

    def refused(path: Any, *how: Any, **more: Any) -> os.stat_result:
        if str(path).startswith("/home-of-another"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, *how, **more)

    (tmp_path / "token").write_text(SECRET)
    monkeypatch.setattr("flk.kube.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", "/home-of-another")
    with pytest.raises(NoConfigError, match=r"/home-of-another/\.kube/config does not exist"):
        load()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert load().server == "https://10.0.0.1:443"


@pytest.mark.parametrize("piped", [False, True], ids=["stderr is the terminal", "stderr is a pipe"])
def test_plugin_that_fails_on_a_terminal(use: Any, piped: bool) -> None:
    use(plugin("import sys; sys.exit('please log in')"))
    leader, terminal = pty.openpty()
    script = "from flk.kube.credentials import connect\nconnect().headers()"
    command, plain = [sys.executable, "-c", script], os.environ | {"PYTHON_COLORS": "0"}  # Python 3.13 has colours
    errors = subprocess.PIPE if piped else terminal
    done = subprocess.run(command, stdin=terminal, stdout=subprocess.PIPE, stderr=errors, env=plain)
    shown = (done.stderr or b"").decode()
    while not piped and "ended with" not in shown:  # what a terminal has got can be read in parts
        shown += os.read(leader, 65536).decode()
    os.close(leader)
    os.close(terminal)
    assert done.returncode == 1
    told = "please log in.*NoConfigError: the credentials plugin .* ended with exit code 1"
    assert re.match(told, shown, re.DOTALL)


# Connections


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    made = make_certificate(folder, "test", alternative="DNS:api.test")
    return made.path.read_text(), made.key.read_text()


@pytest.fixture
def tls_server(tmp_path: Path) -> Any:
    """A server with a certificate for api.test that wants a client certificate, and answers with the names of both."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    cert, key = certificate(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            connection: Any = self.connection
            subject = dict(pair[0] for pair in connection.getpeercert()["subject"])
            data = json.dumps({**subject, "server": connection.server}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda connection, name, _: setattr(connection, "server", name)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tmp_path / "tls.crt")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", cert, key
    server.shutdown()
    server.server_close()


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("given", ["data", "lines", "files", "plugin", "insecure"])
def test_client_certificates(use: Any, tls_server: Any, given: str, tmp_path: Path) -> None:
    server, cert, key = tls_server
    cluster = {"server": server, "tls-server-name": "api.test", "certificate-authority": "tls.crt"}
    user: dict[str, Any] = {"client-certificate-data": base64_of(cert), "client-key-data": base64_of(key)}
    if given == "lines":  # of `base64 tls.crt`
        user = {name: base64.encodebytes(base64.b64decode(data)).decode() for name, data in user.items()}
    if given == "files":
        fails = plugin("exit(1)")["users"][0]["user"]  # which is not asked
        user = {"client-certificate": "tls.crt", "client-key": "tls.key", **fails}
        (tmp_path / "ca.crt").write_bytes("# Autorité de la société\n".encode("latin-1") + cert.encode())
        cluster["certificate-authority"] = "ca.crt"
    if given == "plugin":
        version = "client.authentication.k8s.io/v1"
        status = {"clientCertificateData": cert, "clientKeyData": key}
        reply = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
        user = plugin(f"print({reply!r})")["users"][0]["user"]
    if given == "insecure":
        cluster = {"server": server, "tls-server-name": "api.test", "insecure-skip-tls-verify": True}
    use(with_user(**user) | {"clusters": [{"name": "c", "cluster": cluster}]})
    access = connect()
    access.headers()
    told = access.pool.request("GET", server + "/", retries=False).json()
    assert told == {"commonName": "test", "server": "api.test"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[SSL: X] tlsv13 alert certificate required (_ssl.c:2580)", "refuses the connection of context here: "),
        ("EOF occurred in violation of protocol (_ssl.c:2427)", "cannot be reached: EOF occurred"),
    ],
)
def test_server_that_ends_the_connection_is_not_said_to_be_untrusted(use: Any, text: str, said: str) -> None:
    use(config())
    error = urllib3.exceptions.SSLError(ssl.SSLError(1, text))
    assert said in str(error_from_connection(error, load()))


def test_renewal_takes_server_and_impersonation_from_the_new_kubeconfig(use: Any) -> None:
    (path,) = use(with_user(token="old"))
    access = connect()
    refused = access.headers()
    moved = with_user(token="new", **{"as": "ada"}) | {
        "clusters": [{"name": "c", "cluster": {"server": "https://moved"}}]
    }
    path.write_text(yaml.safe_dump(moved))
    access.renew(refused)
    assert access.server == "https://moved"
    assert access.headers() == {"Impersonate-User": "ada", "Authorization": "Bearer new"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"client-certificate-data": "####"}, "Only base64 data is allowed"),
        ({"client-key-data": "####"}, "Only base64 data is allowed"),
        ({"client-certificate-data": "", "client-certificate": "gone.crt"}, "/.*/gone.crt: No such file"),
    ],
)
def test_broken_certificates_are_one_clear_line(use: Any, wrong: dict[str, str], reason: str, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    good = {"client-certificate-data": base64_of(cert), "client-key-data": base64_of(key)}
    use(with_user(**{**good, **wrong}))
    with pytest.raises(NoConfigError, match=f"the certificates of context here cannot be used: {reason}"):
        connect()


@pytest.mark.parametrize(
    ("variables", "proxied"),
    [
        ({}, False),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, True),
        ({"HTTPS_PROXY": "proxy.example:3128"}, True),  # as kubectl, curl and pip take it
        ({"https_proxy": "http://proxy.example:3128", "NO_PROXY": "other.example,.more.example"}, True),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "example"}, False),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "no_proxy": "a, .here.example"}, True),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "no_proxy": "*"}, False),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, False),
    ],
)
def test_proxies_of_the_environment(
    use: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxied: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    use(config())
    proxy = connect().pool.proxy
    assert (proxy.host if proxy else None) == ("proxy.example" if proxied else None)


@pytest.mark.parametrize("server", ["https://[::1:6443", "https://::1]:6443"])
def test_an_address_of_ipv6_that_lacks_a_bracket_is_told_with_the_first_request(use: Any, server: str) -> None:
    use(config() | {"clusters": [{"name": "c", "cluster": {"server": server}}]})
    with pytest.raises(NoConfigError, match=re.escape(f"the server {server!r} of context here is not an address")):
        JobClient.connect().get_job("gpt")


@pytest.mark.parametrize("entry", ["fd00::7", "[fd00::7]", "fd00::/8"])
def test_an_address_of_ipv6_that_gets_no_proxy_may_have_brackets(
    use: Any, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", entry)
    use(config() | {"clusters": [{"name": "c", "cluster": {"server": "https://[fd00::7]:6443"}}]})
    assert connect().pool.proxy is None


def test_proxy_of_the_kubeconfig(use: Any) -> None:
    cluster = {"server": "https://here.example", "proxy-url": "http://anna:a%3Ab@other.example:8080"}
    use(config() | {"clusters": [{"name": "c", "cluster": cluster}]})
    pool: Any = connect().pool
    assert (pool.proxy.host, pool.proxy.port) == ("other.example", 8080)
    assert pool.proxy_headers == {"proxy-authorization": "Basic " + base64_of("anna:a:b")}


def test_proxy_of_the_environment_that_speaks_no_http_is_not_said_to_be_the_kubeconfigs(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
    use(config())
    with pytest.raises(NoConfigError, match="the proxy of the environment is not an address of HTTP") as caught:
        connect()
    assert "$HTTPS_PROXY" in caught.value.hint
