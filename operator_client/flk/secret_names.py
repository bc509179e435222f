"""Which variables, options and files hold secrets, by their names, and by what a key of Google's cloud contains.

`flk submit` warns of such variables and does not ship such files. Archives hide the values of such variables and
options.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import PurePosixPath
from typing import Final

# A word begins and ends where no letter is beside it, so that AUTHOR, SECRETARY and TOKENIZERS name no secrets.
_WORDS: Final = re.compile(
    r"(?:passwords?|passwd|passphrase|secrets?|credentials?|token|oauth2?|(?<![a-z])auth|authorization)(?![a-z])"
    r"|(?:api|access|account|auth|encryption|private|secret|signing|ssh)[-_.]?keys?(?![a-z])"
    r"|(?<![a-z])(?:pass|pat)$|(?<=[a-z0-9])[-_.]pwd$"
)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FILES: Final = (
    *(".env", ".env.*", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("*[-_]key.json", "service[-_]account*.json", "admin.conf", "rclone.conf", "*.jks", "*.ppk"),
    *("*.tfvars", "*.tfvars.json"),
)
_SERVICE_ACCOUNT: Final = re.compile(rb'"type"\s*:\s*"service_account"')
KEY_SIZE: Final = 1 << 14  # bytes; a key of a service account has about 2,400
_DATA: Final = ("", ".cfg", ".conf", ".csv", ".ini", ".json", ".toml", ".txt", ".yaml", ".yml")  # not code: secrets.py


def names_secret(name: str) -> bool:
    """Return whether the value of a variable or of an option with this name is taken for a secret."""
    return bool(_WORDS.search(_HUMP.sub("_", name).lower()))


def file_names_secret(name: str) -> bool:
    """Return whether a file with this name, without its folders, is taken for a key or a password."""
    path = PurePosixPath(name)
    in_data = path.suffix.lower() in _DATA and names_secret(path.stem)
    return in_data or any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _FILES)


def content_is_secret(content: bytes) -> bool:
    """Return whether the content of a JSON file is a key of a service account, whose default name is ``PROJECT-ID``."""
    return bool(_SERVICE_ACCOUNT.search(content))
