"""Which files hold secrets, by their names, and by the private keys that they contain: `flk submit` ships none."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from flk_runtime.contract.secrets import names_secret

_FILES: Final = (
    *("*.env", ".env.*", ".envrc", "env.sh", "[._]netrc", ".pgpass", ".npmrc", ".yarnrc", ".pypirc", "pip.conf"),
    *(".condarc", ".gitconfig", ".git-credentials", ".htpasswd", ".my.cnf", "my.cnf", ".s3cfg", ".boto", "rclone.conf"),
    *(".databrickscfg", "databricks.cfg", ".snowsql.cfg", "snowflake.toml", ".terraformrc", "terraform.rc"),
    *(".*_history", "kubeconfig*", "kube[-_]config*", "*.kubeconfig", "k8s[-_]config", "admin.conf", "kubeadm.conf"),
    *(".dockercfg", ".dockerconfigjson", "dockerconfig.json", "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json"),
    *("*.pem", "*.key", "*.key.enc", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.gpg", "*.asc"),
    *("*_rsa", "*.rsa", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "wallet.dat", "cookies.txt", "sops.yaml"),
    *("kaggle.json", "adc.json", "azureauth.json", "google-services.json", "firebase-adminsdk*.json"),
    *("service[-_]account*.json", "google-service.json", "accesskeys.csv", "rootkey.csv", "jwt.txt", "*webhook.txt"),
    *("key.json", "keys.json", *(f"*[-_]key{end}" for end in ("", ".json", ".txt", ".yaml", ".yml"))),
    *("*[-_]pass", "*[-_]pass.txt", "hf_token*", "*[-_]secret", "*[-_]secret.*", "client_secret*.json"),
)
# Names of the list that code and data have too.
_PLAIN: Final = ("*.py", "primary_key*", "public_key*", "sort_key*", "foreign_key*")
_PLACES: Final = (
    ".kube/config",
    ".docker/config.json",
    ".aws/config",
    ".config/gh/hosts.yml",
    ".streamlit/secrets.toml",
)  # ends of paths
_FOLDERS: Final = (".ssh", ".gnupg", ".azure", ".config/gcloud")  # all files below them
# A key of a service account of Google's cloud, whose default name is ``PROJECT-ID``, and private keys in PEM.
_CONTENT: Final = re.compile(
    rb'"type"\s{0,9}:\s{0,9}"service_account"|^-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY( BLOCK)?-----', re.M
)
KEY_SIZE: Final = 1 << 16  # bytes of a file that is looked into; a key has a few thousand
_DATA: Final = ("", ".cfg", ".conf", ".csv", ".ini", ".json", ".toml", ".txt", ".yaml", ".yml")  # not code: secrets.py


def file_names_secret(name: str) -> bool:
    """Return whether the file at a path, by its name and its last folders, is taken for a key or a password."""
    path = PurePosixPath(name)
    in_data = path.suffix.lower() in _DATA and names_secret(path.stem)
    named = not _matches(path.name, _PLAIN) and _matches(path.name, _FILES)  # of code, few patterns are tried
    placed = any(path.match(place) for place in _PLACES) or any(f"/{folder}/" in f"/{path}" for folder in _FOLDERS)
    return in_data or named or placed


def content_is_secret(content: bytes) -> bool:
    """Return whether a file holds a private key: in PEM, or of a service account."""
    # To look for a text first takes an eighth of the time, and a job may have thousands of files.
    return any(text in content for text in (b"service_account", b"PRIVATE KEY")) and bool(_CONTENT.search(content))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # Compiling a pattern takes longer than looking for the texts that it has, which are in few names.
    name = name.lower()
    return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in patterns if all(text in name for text in _texts(pattern))
    )


@functools.cache
def _texts(pattern: str) -> list[str]:
    return re.split(r"\*|\[.*?\]", pattern)
