"""Which cluster a command talks to, and what is said where that is not to be found out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import NoConfigError
from flk.kube.credentials import load

SECRET = "a-very-secret-token"


def config(name: str = "here", **context: Any) -> dict[str, Any]:
    return {
        "current-context": name,
        "clusters": [{"name": "c", "cluster": {"server": f"https://{name}.example:6443"}}],
        "users": [{"name": "u", "user": {"token": SECRET}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u", **context}}],
    }


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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


def test_credentials_are_in_the_headers(use: Any) -> None:
    use(config())
    assert load().headers() == {"authorization": f"Bearer {SECRET}"}


def test_first_of_several_files_wins(use: Any, tmp_path: Path) -> None:
    use(config("one"), config("two"))
    assert load().server == "https://one.example:6443"
    assert load("two").context == "two"


def test_files_that_are_not_there_are_passed_over(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = use(config())
    monkeypatch.setenv("KUBECONFIG", f"/nowhere/config:{path}")
    assert load().context == "here"


def test_no_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoConfigError, match="/nowhere/config does not exist") as caught:
        load()
    assert "KUBECONFIG" in caught.value.hint


def test_in_a_pod_without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
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
        "",
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
    user = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", script]}
    }
    user["exec"] |= more
    return config() | {"users": [{"name": "u", "user": user}]}


def test_credentials_plugin(use: Any) -> None:
    reply = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"from-plugin"}}'
    use(plugin(f"print({reply!r})"))
    assert load().headers() == {"authorization": "Bearer from-plugin"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('please log in: sso login')", "please log in: sso login"),
        ("print('junk')", "failed to decode"),
        ("print('{}')", "malformed response"),
    ],
)
def test_credentials_plugin_that_fails(use: Any, script: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    use(plugin(script))
    with pytest.raises(NoConfigError, match=r"the credentials plugin .* of context here failed") as caught:
        load()
    assert said in str(caught.value)
    assert capfd.readouterr().err == ""


def test_credentials_plugin_that_is_not_there(use: Any) -> None:
    use(plugin("", command="no-such-plugin", installHint="get it from https://example.com"))
    with pytest.raises(NoConfigError, match="no-such-plugin") as caught:
        load()
    assert caught.value.hint == "get it from https://example.com"
