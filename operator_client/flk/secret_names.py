"""Which files hold secrets, by their names, and by what a key of Google's cloud contains: `flk submit` ships none."""

from __future__ import annotations

import fnmatch
import re
from pathlib import PurePosixPath
from typing import Final

from flk_runtime.contract.secrets import names_secret

_FILES: Final = (
    *(".env", ".env.*", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("*[-_]key.json", "service[-_]account*.json", "admin.conf", "rclone.conf", "*.jks", "*.ppk"),
    *("*.tfvars", "*.tfvars.json", ".pgpass", ".my.cnf", ".s3cfg", ".boto", ".dockercfg", ".dockerconfigjson"),
)
_PLACES: Final = (".kube/config", ".docker/config.json", ".aws/config", ".config/gh/hosts.yml")  # ends of paths
_FOLDERS: Final = (".ssh", ".gnupg", ".azure", ".config/gcloud")  # all files below them
_SERVICE_ACCOUNT: Final = re.compile(rb'"type"\s*:\s*"service_account"')
KEY_SIZE: Final = 1 << 14  # bytes; a key of a service account has about 2,400
_DATA: Final = ("", ".cfg", ".conf", ".csv", ".ini", ".json", ".toml", ".txt", ".yaml", ".yml")  # not code: secrets.py


def file_names_secret(name: str) -> bool:
    """Return whether the file at a path, by its name and its last folders, is taken for a key or a password."""
    path = PurePosixPath(name)
    in_data = path.suffix.lower() in _DATA and names_secret(path.stem)
    named = any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in _FILES)
    placed = any(path.match(place) for place in _PLACES) or any(f"/{folder}/" in f"/{path}" for folder in _FOLDERS)
    return in_data or named or placed


def content_is_secret(content: bytes) -> bool:
    """Return whether the content of a JSON file is a key of a service account, whose default name is ``PROJECT-ID``."""
    return bool(_SERVICE_ACCOUNT.search(content))
