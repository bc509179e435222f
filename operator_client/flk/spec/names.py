"""Names and words that Kubernetes accepts: one function a kind, which returns its input or raises ValueError.

Checked here, a bad name costs a line before anything exists; unchecked, the API server refuses it in its own words, or
the operator accepts it and then never makes a pod. Only ASCII passes, and always the whole string (a newline at the end
is refused too).
"""

from __future__ import annotations

import posixpath
import re
import secrets
import string
from pathlib import PurePosixPath
from typing import Final

from flk_runtime import contract

LABEL_LIMIT: Final = 63  # characters of a DNS label, of a label's value and of a service's name
SUBDOMAIN_LIMIT: Final = 253
TEXT_LIMIT: Final = 120_000  # bytes; Linux takes 128 KiB, of a variable together with its name
_SUFFIX_LENGTH: Final = 5  # random characters at the end of a default name
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, and nothing easily mistaken for another

_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_QUALIFIED: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][-A-Za-z0-9_.]*", re.ASCII)
_DATA_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+", re.ASCII)
_DOMAIN_PART: Final = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_PATH_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"(?:{_DOMAIN_PART}(?:\.{_DOMAIN_PART})*(?::[0-9]+)?/)?{_PATH_PART}(?:/{_PATH_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,})?",
    re.ASCII,
)
_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def longest(job: str, replicas: int) -> str:
    """The longest name that the operator derives from a job's: its last pod's, and that pod's service's."""
    return f"{job}-worker-{replicas - 1}"


def job_name(name: str, replicas: int) -> str:
    """A job's name, short enough that the names of its pods and services are names too."""
    if not name:
        raise ValueError("must not be empty")
    if not _DNS_1035.fullmatch(name):
        raise ValueError(
            f"must be lower-case letters, digits and '-', from a letter to a letter or digit (is {name!r})"
        )
    if len(longest(name, replicas)) > LABEL_LIMIT:
        room = LABEL_LIMIT - len(longest("", replicas))
        raise ValueError(
            f"is too long: with {replicas} replicas it may have {room} characters, not {len(name)}: its last pod and "
            f"that pod's service are named {longest(name, replicas)!r}, and {LABEL_LIMIT} is the limit"
        )
    return name


def default_name(command: list[str], replicas: int) -> str:
    """A name for a job that has none: what it runs, and five random characters."""
    what = command[1].split(".")[-1] if command[:1] == ["-m"] and len(command) > 1 else PurePosixPath(command[0]).stem
    stem = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-").lstrip(string.digits + "-") or "job"
    room = LABEL_LIMIT - len(longest("", replicas)) - _SUFFIX_LENGTH - 1
    suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(_SUFFIX_LENGTH))
    return f"{stem[:room].rstrip('-')}-{suffix}"


def namespace(name: str) -> str:
    """A namespace's name."""
    if len(name) > LABEL_LIMIT or "." in name or not _SUBDOMAIN.fullmatch(name):
        raise ValueError(f"must be at most {LABEL_LIMIT} lower-case letters, digits and '-' (is {name!r})")
    return name


def object_name(name: str) -> str:
    """The name of a claim or a secret."""
    if len(name) > SUBDOMAIN_LIMIT or not _SUBDOMAIN.fullmatch(name):
        raise ValueError(
            f"must be lower-case letters, digits, '-' and '.', and start and end with a letter or digit (is {name!r})"
        )
    return name


def data_key(key: str) -> str:
    """A key in a secret's data."""
    if len(key) > SUBDOMAIN_LIMIT or not _DATA_KEY.fullmatch(key) or key == "." or key.startswith(".."):
        raise ValueError(f"must be letters, digits, '-', '_' and '.' (is {key!r})")
    return key


def label_key(key: str) -> str:
    """A label's key, with or without a prefix: ``pool``, ``example.com/pool``."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > SUBDOMAIN_LIMIT or not _SUBDOMAIN.fullmatch(prefix)):
        raise ValueError(f"its prefix must be a domain, like example.com/pool (is {key!r})")
    if len(name) > LABEL_LIMIT or not _QUALIFIED.fullmatch(name):
        raise ValueError(
            f"must be at most {LABEL_LIMIT} letters, digits, '-', '_' and '.', "
            f"and start and end with a letter or digit (is {key!r})"
        )
    return key


def label_value(value: str) -> str:
    """A label's value; the empty string is one."""
    if value and (len(value) > LABEL_LIMIT or not _QUALIFIED.fullmatch(value)):
        raise ValueError(
            f"must be at most {LABEL_LIMIT} letters, digits, '-', '_' and '.', "
            f"and start and end with a letter or digit (is {value!r})"
        )
    return value


def queue(name: str) -> str:
    """The name of a queue of Kueue: an object's name that is a label's value too."""
    return label_value(object_name(name))


def variable(name: str) -> str:
    """The name of an environment variable that the user may set."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"must be letters, digits, '_', '-' and '.', and not start with a digit (is {name!r})")
    if contract.is_reserved(name):
        if name.startswith("FLK_"):
            reason = "names that start with FLK_ are flk's own"
        elif name == "PYTHONUNBUFFERED":
            reason = "the training operator sets it to 1"
        else:
            reason = "flk sets it for every rank, and the training operator would overwrite it"
        raise ValueError(f"{name} is reserved: {reason}")
    return name


def text(value: str) -> str:
    """Text that can be a word of a command line or a variable's value: Unicode without NUL, of a length Linux takes."""
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    if size > TEXT_LIMIT:
        raise ValueError(f"must have at most {TEXT_LIMIT:,} bytes, not {size:,}: large values belong into files")
    return value


def image(reference: str) -> str:
    """A container image: ``[host[:port]/]path[:tag][@digest]``."""
    if len(reference) > 512 or not _IMAGE.fullmatch(reference):
        raise ValueError(
            f"must be an image like team/train:1.2, with a lower-case path and no blanks (is {reference!r})"
        )
    return reference


def module(name: str) -> str:
    """The name of a Python module: ``train``, ``package.train``."""
    if not _MODULE.fullmatch(name):
        raise ValueError(f"must be a module's name like package.train (is {name!r})")
    return name


def mount_path(path: str) -> str:
    """An absolute path in the pod where a volume can be mounted, normalised; not one of flk's or the system's own."""
    text(path)
    if not path.startswith("/"):
        raise ValueError(f"must be an absolute path (is {path!r})")
    if ":" in path:
        raise ValueError(f"must not contain ':' (is {path!r})")
    if any(character < " " for character in path):
        raise ValueError(f"must not contain control characters (is {path!r})")
    if ".." in path.split("/"):
        raise ValueError(f"must not contain '..' (is {path!r})")
    clean = "/" + posixpath.normpath(path).strip("/")
    if len(clean) > 1024:
        raise ValueError("must have at most 1,024 characters")
    if clean == "/":
        raise ValueError("must not be the root folder")
    # A mount over one of these, or over a folder that holds one, would hide it from the launcher.
    for own in ("/flk", "/dev", "/proc", "/sys"):
        if clean == own or clean.startswith(own + "/"):
            raise ValueError(f"must not be below {own}, which is used already (is {path!r})")
    return clean
