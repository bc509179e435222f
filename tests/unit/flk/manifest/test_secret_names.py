"""Secrets are known by one table of names: warnings, archives and what is shipped take the same names for secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.manifest.environment import warnings
from flk.manifest.files import select_files
from flk.manifest.secret_names import file_names_secret
from flk.observe.redaction import kept_job
from flk.spec.job import validated
from flk_runtime.contract.secrets import names_secret

SECRET = [
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "DB_PASSWORD", "WANDB_API_KEY", "token", "PGPASSWORD"),
    *("GITHUB_PAT", "DB_PASS", "DB_PWD", "APIKEY", "apiKey", "authToken", "NPM_AUTH", "SSH_PRIVATE_KEY", "OAUTH_ID"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "api-key", "client.secret", "SSL_PASSPHRASE", "MYSQL_PASSWD"),
]
PLAIN = [
    *(
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "SORT_KEY",
        "SECRETARY",
        "LR",
        "AUTHOR",
        "PWD",
        "PASSES",
        "PATH",
        "PATIENCE",
    ),
    *("MONKEY_API", "PRIVATE_SPLIT"),
]
SECRET_FILES = [
    *(".env", ".env.local", ".netrc", "server.pem", "id_rsa", "id_ed25519.pub", "kubeconfig", "credentials.json"),
    *(
        "service-account.json",
        "service_account_prod.json",
        "gcp-key.json",
        "secrets.yaml",
        "token.txt",
        "API_KEY",
        "auth.json",
    ),
    *("credentials.csv", "aws_credentials.csv", "admin.conf", "rclone.conf", "store.jks", "login.ppk", "prod.tfvars"),
    *(".pgpass", ".my.cnf", ".s3cfg", ".boto", ".dockercfg", ".dockerconfigjson", ".vault-token", ".git-credentials"),
]
SECRET_FILES += [
    *(
        "prod.env",
        "secrets.env",
        ".envrc",
        "kaggle.json",
        "kubeconfig.yaml",
        "kube-config.yaml",
        "rootkey.csv",
        "my_rsa",
    ),
    *("terraform.tfstate", "terraform.tfstate.backup", "pip.conf", "openai_key.txt", "wandb_key.txt", "deploy_key"),
    *("github-deploy-key", "key.asc", "pass.gpg", ".databrickscfg", ".bash_history", "vault.kdbx", "server.key.enc"),
    *("adc.json", "keys.json", "client_secret_123.json", "hf_token.txt", "slack_webhook.txt", "prod.auto.tfvars"),
]
SECRET_PLACES = [
    *(".kube/config", "home/.kube/config", ".docker/config.json", ".aws/config", ".ssh/known_hosts"),
    *(".config/gcloud/configurations/config_default", ".azure/msal_token_cache.bin"),
]
PLAIN_FILES = [
    *("secrets.py", "token.py", "tokenizer.json", "special_tokens_map.json", "tokens.txt", "auth.py", "authors.txt"),
    *("monkey.json", "train.py", "config.yaml", "keys.csv", "environment.yml", "keyboard.txt", "primary_key.json"),
    *("api_key.py", "history.json", "settings_secret.py", "monkey.txt", "passes.txt", "config.json", "tls.crt"),
]


def hidden_in_archives(name: str) -> bool:
    """Whether an archive hides the value of a variable, and of an option or a variable in a command."""
    container = {
        "env": [{"name": name, "value": "canary"}],
        "command": ["python", "train.py", f"--{name}=canary", f"--{name}", "canary"],
        "args": [f"{name}=canary"],
    }
    whole = {"metadata": {"name": "gpt"}, "spec": {"template": {"spec": {"containers": [container]}}}}
    found = json.dumps(kept_job(whole)).count("canary")
    assert found in (0, 4)
    return found == 0


def warned_of(name: str) -> bool:
    return any(
        f"env.{name} looks like a secret" in line
        for line in warnings(validated({"command": "a.py", "env": {name: "x"}}))
    )


@pytest.mark.parametrize("name", SECRET)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)
    assert hidden_in_archives(name)
    if name.isidentifier():
        assert warned_of(name)


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_are_like_them(name: str) -> None:
    assert not names_secret(name)
    assert not hidden_in_archives(name)
    assert not warned_of(name)


@pytest.mark.promise("Jobs: Files that look like secrets do not travel")
def test_a_key_of_a_service_account_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "project-1a2b3c.json").write_text('{\n  "type": "service_account",\n  "private_key": "-----BEGIN"}')
    (tmp_path / "model.json").write_text('{"type": "llama"}')
    selection = select_files(validated({"command": "train.py"}), tmp_path)
    assert set(selection.files) == {"train.py", "model.json"}
    assert "project-1a2b3c.json" in selection.left_out[0]
    named = validated({"command": "train.py", "ship": ["project-1a2b3c.json"]})
    assert "project-1a2b3c.json" in select_files(named, tmp_path).files


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "PGP "])
def test_a_private_key_is_known_by_its_content(tmp_path: Path, kind: str) -> None:
    end = " BLOCK" if kind == "PGP " else ""
    key = f"comment\n-----BEGIN {kind}PRIVATE KEY{end}-----\nMIIB\n"
    (tmp_path / "train.py").write_text("")
    (tmp_path / "test_keys.py").write_text(f'KEY = """\n{key}"""\n')  # what is left out of code is missed
    for name in ("deploy", "notes.txt", "conf.yaml"):
        (tmp_path / name).write_text(key)
    (tmp_path / "public.txt").write_text("-----BEGIN PUBLIC KEY-----\nMIIB\n")
    (tmp_path / "large.txt").write_text(key + "x" * (1 << 17))  # data
    selection = select_files(validated({"command": "train.py"}), tmp_path)
    assert set(selection.files) == {"train.py", "test_keys.py", "public.txt", "large.txt"}
    assert "files that look like secrets: conf.yaml, deploy, notes.txt (--ship" in selection.left_out[0]
    named = validated({"command": "train.py", "ship": ["deploy"]})
    assert "deploy" in select_files(named, tmp_path).files


@pytest.mark.promise("Jobs: Files that look like secrets do not travel")
def test_files_with_names_of_secrets_are_not_shipped(tmp_path: Path) -> None:
    for name in ["train.py", *SECRET_FILES, *PLAIN_FILES]:
        (tmp_path / name).write_text("")
    selection = select_files(validated({"command": "train.py"}), tmp_path)
    assert set(selection.files) == {"train.py", *PLAIN_FILES}
    assert {name for name in SECRET_FILES if not file_names_secret(name)} == set()


@pytest.mark.promise("Jobs: Files that look like secrets do not travel")
@pytest.mark.parametrize("tracked", [True, False])
def test_files_in_the_places_of_credentials_travel_only_when_listed_by_name(tmp_path: Path, tracked: bool) -> None:
    for name in ["train.py", "kube/config", "config/docker/config.json", *SECRET_PLACES]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if tracked:
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
    selection = select_files(validated({"command": "train.py"}), tmp_path)
    assert set(selection.files) == {"train.py", "kube/config", "config/docker/config.json"}
    assert not tracked or any("files that look like secrets: .aws/config" in each for each in selection.left_out)
    named = validated({"command": "train.py", "ship": [".kube/config"]})
    assert ".kube/config" in select_files(named, tmp_path).files
    for pattern in (".kube", ".kube/*"):
        with pytest.raises(UsageError, match=r"nothing in .* matches .* but files that look like secrets"):
            select_files(validated({"command": "train.py", "ship": [pattern]}), tmp_path)
