"""Secrets: which variables and options hold them, by their names, and texts without their values.

Client and pods take the same names for secrets. Launchers hide the values in what ranks print, the client in archives
and reports.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import AnyStr, Final

from flk_runtime.contract.pod_env import ON_RESTART, SETUP

REDACTED: Final = "***"
_LEAST: Final = 4  # characters of a value that is hidden wherever it stands: shorter ones are parts of other words
# Values of variables with such names that tell nobody anything, and that stand in other places too: among them the
# special tokens of a vocabulary, such as <pad> and [CLS].
_PLAIN: Final = (
    r"(?i)true|false|none|null|auto|default|enabled|disabled|required|optional|[\d.]+|<[^\s<>]{1,20}>|\[[a-z]{1,10}\]"
)
# A word begins and ends where no letter is beside it, so that AUTHOR, SECRETARY and TOKENIZERS name no secrets.
_WORDS: Final = (
    r"(?:passwords?|passwd|passphrase|secrets?|credentials?|token|oauth2?|(?<![a-z])auth|authorization)(?![a-z])"
    r"|(?:api|access|account|auth|encryption|private|secret|signing|ssh)[-_.]?keys?(?![a-z])"
    r"|(?<![a-z])(?:pass|pat)$|(?<=[a-z0-9])[-_.]pwd$"
)
_ASSIGNMENT: Final = r"(?s)(?P<name>-{0,2}[\w.-]+)=(?P<value>.+)"
# The password in an address: scheme://user:password@host, or the token: scheme://token@host. A long text takes linear
# time, however hostile it is.
_IN_ADDRESS: Final = r"(://(?:[^\s/:@]*:(?!x-oauth-basic@))?)([^\s/@]+)@"
_IN_BYTES: Final = _IN_ADDRESS.encode()
_TOKEN: Final = 16  # characters of a token in an address that is hidden wherever it stands: names of users are shorter


def names_secret(name: str) -> bool:
    """Return whether the value of a variable or of an option with this name is taken for a secret."""
    return bool(re.search(_WORDS, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def is_secret(name: str, value: str) -> bool:
    """Return whether this value of a variable or of an option is taken for a secret."""
    return names_secret(name) and not re.fullmatch(_PLAIN, value)


def secrets_in(variables: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the secrets among the values of variables and the words of a command, the longest first.

    A value of several lines is one secret for each line, since logs are written in lines.
    """
    values = [value for name, value in variables.items() if names_secret(name)]
    values += [secret for _, secret in in_command(words) if secret]
    commands = [
        *(variables.get(name, "") for name in (SETUP, ON_RESTART)),
        *(word for word in words if not word.startswith("-")),  # one of them may be the script of `bash -c`
    ]
    values += [secret for command in commands for secret in in_shell_command(command)]
    for match in (match for text in (*variables.values(), *words) for match in re.finditer(_IN_ADDRESS, text)):
        value = match[2] if match[1].endswith(":") else match[2].partition(":")[0]
        if match[1].endswith(":") or len(value) >= _TOKEN:
            values.append(value)
    lines = {line.strip() for value in values for line in value.splitlines()}
    found = {line for line in lines if len(line) >= _LEAST and not re.fullmatch(_PLAIN, line)}
    return sorted(found, key=lambda value: (-len(value), value))


def hidden(text: AnyStr, secrets: Sequence[AnyStr]) -> AnyStr:
    """Return a text, or its bytes, with ``***`` in place of the secrets, and of passwords and tokens in addresses."""
    for secret in secrets:
        text = text.replace(secret, REDACTED if isinstance(secret, str) else REDACTED.encode())
    return without_password(text)


def without_password(text: AnyStr) -> AnyStr:
    """Return a text, or its bytes, with ``***`` in place of the passwords and tokens in its addresses."""
    if isinstance(text, str):
        return re.sub(_IN_ADDRESS, rf"\1{REDACTED}@", text)
    return re.sub(_IN_BYTES, rf"\1{REDACTED}@".encode(), text)


def hidden_in_shell_command(command: str) -> str:
    """Return a shell command without the passwords in its addresses; ``***`` alone if it has another secret."""
    return REDACTED if in_shell_command(command) else without_password(command)


def in_shell_command(command: str) -> list[str]:
    """Return the secrets in a shell command."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quotation mark without another one
        words = re.split(r"[\s;&|()<>]+", command)
    return [secret for _, secret in in_command(words) if secret]


def in_command(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word of a command, and the secret with which it ends; empty if it has none.

    These are the values of ``--api-token=x``, ``--api-token x`` and ``API_TOKEN=x``; of ``--token API_TOKEN=x`` only x.
    """
    follows = False  # the word before is an option whose value is a secret
    for word in words:
        assigned = re.fullmatch(_ASSIGNMENT, word)
        if assigned and names_secret(assigned["name"]):
            yield word, assigned["value"]
        else:
            yield word, word if follows and not word.startswith("-") else ""
        follows = assigned is None and word.startswith("-") and names_secret(word)
