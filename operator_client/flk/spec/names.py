"""Names that Kubernetes accepts: one function for each kind, which returns its argument or raises ValueError.

A wrong name is reported before anything is created. Otherwise the API server would refuse it, or the operator would
accept it and then fail to create pods. Only ASCII is accepted, and patterns match the whole string, so that a newline
at the end is refused.
"""

from __future__ import annotations

import posixpath
import re
import secrets
import string
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Final

from flk.spec import labels
from flk_runtime.contract import user_env
from flk_runtime.contract.quantities import plural

LABEL_LIMIT: Final = 63  # characters of a DNS label, of a label's value and of a service's name
SUBDOMAIN_LIMIT: Final = 253
TEXT_LIMIT: Final = 120_000  # bytes; Linux takes 128 KiB, of a variable together with its name
_SUFFIX_LENGTH: Final = 5  # random characters at the end of a default name
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, and no letters that look alike

DNS_1035: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
QUALIFIED: Final = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"  # of others, the shell of most images hands on nothing
DATA_KEY: Final = r"[-._a-zA-Z0-9]+"
_BUCKET: Final = r"[a-z0-9]([-a-z0-9.]{1,61})[a-z0-9]"
S3_ADDRESS: Final = rf"s3://{_BUCKET}(/[-A-Za-z0-9_.=]+)*/*"
_DOMAIN_PART: Final = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_PATH_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE: Final = (
    rf"(?:{_DOMAIN_PART}(?:\.{_DOMAIN_PART})*(?::[0-9]+)?/)?{_PATH_PART}(?:/{_PATH_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)
OWN_KEYS: Final = (*labels.MANAGED_BY, labels.QUEUE, labels.QUEUE_PRIORITY)
_KUEUE: Final = "kueue.x-k8s.io/"
OWN_PREFIXES: Final = ("flk.dev/", "training.kubeflow.org/")
DEFAULT_TARGET: Final = "pytorchjob"
# PyTorch's own image, which every cluster with a way to Docker Hub can pull, and which runs without GPUs too. A release
# that publishes flk's own images names one of them here.
DEFAULT_IMAGE: Final = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
IMAGE_ARCHITECTURE: Final = {"kubernetes.io/arch": "amd64"}  # the only one of the default image, as nodes' label
NO_GANG: Final = "none"
# What a job can become, and the text that each target puts between the name of the job and the index of a pod.
TARGETS: Final = {"pytorchjob": "-worker-", "trainjob": "-node-0-", "jobset": "-worker-0-", "job": "-"}
_SUFFIXES: Final = {"trainjob": "-xxxxx", "jobset": "-xxxxx"}  # which JobSet's checks count as part of the name
_MODULE: Final = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
# Two packages in place of one.
_TWO_NAMES: Final = r"[A-Za-z0-9][\w.-]*(\[[^]]*\])?\s+[A-Za-z0-9].*"
STRENGTHS: Final = ("required", "preferred")


def pod_name(target: str, job: str, index: int | str) -> str:
    """Return the name of a pod of a job with this target, without the random suffix that some controllers add."""
    return f"{job}{TARGETS[target]}{index}"


def longest(job: str, replicas: int, target: str = DEFAULT_TARGET) -> str:
    """Return the longest name that is derived from a job's name: the name of its last pod, and of its Service."""
    return pod_name(target, job, replicas - 1) + _SUFFIXES.get(target, "")


def job_name(name: str, replicas: int, target: str = DEFAULT_TARGET) -> str:
    """Check the name of a job. The names of its pods and Services must not be too long either."""
    if not name:
        raise ValueError("must not be empty")
    if not re.fullmatch(DNS_1035, name):
        raise ValueError(
            f"must be lower-case letters, digits and '-', starting with a letter and not ending with '-' (is {name!r})"
        )
    if len(longest(name, replicas, target)) > LABEL_LIMIT:
        room = LABEL_LIMIT - len(longest("", replicas, target))
        raise ValueError(
            f"is too long: with {plural(replicas, 'replica')} it may have {room} characters, not "
            f"{len(name)}: the last pod and its Service are named {longest(name, replicas, target)!r}, "
            f"and {LABEL_LIMIT} is the limit"
        )
    return name


def default_name(command: list[str], replicas: int, target: str = DEFAULT_TARGET) -> str:
    """Return a name for a job that has none: the name of its script or module, and five random characters."""
    what = command[1].split(".")[-1] if command[:1] == ["-m"] and len(command) > 1 else PurePosixPath(command[0]).stem
    stem = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-").lstrip(string.digits + "-") or "job"
    room = LABEL_LIMIT - len(longest("", replicas, target)) - _SUFFIX_LENGTH - 1
    suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(_SUFFIX_LENGTH))
    return f"{stem[:room].rstrip('-')}-{suffix}"


def _matching(pattern: str, form: str, limit: int = SUBDOMAIN_LIMIT) -> Callable[[str], str]:
    """Return the check of a name that is matched by ``pattern`` whole. ``form`` says what it must be."""

    def check(name: str) -> str:
        if len(name) > limit or not re.fullmatch(pattern, name):
            raise ValueError(f"must be {form} (is {name!r})")
        return name

    return check


namespace: Final = _matching(
    rf"(?!.*\.){SUBDOMAIN}", f"at most {LABEL_LIMIT} lower-case letters, digits and '-'", LABEL_LIMIT
)
# Of a PersistentVolumeClaim, a Secret or another object.
object_name: Final = _matching(
    SUBDOMAIN, "lower-case letters, digits, '-' and '.', and start and end with a letter or digit"
)
# A key in the data of a Secret.
data_key: Final = _matching(rf"(?!\.\.|\.\Z){DATA_KEY}", "letters, digits, '-', '_' and '.'")
# The value of a label, which may be empty.
label_value: Final = _matching(
    rf"({QUALIFIED})?",
    f"at most {LABEL_LIMIT} letters, digits, '-', '_' and '.', and start and end with a letter or digit",
    LABEL_LIMIT,
)
# The reference of a container image: [host[:port]/]path[:tag][@digest].
image: Final = _matching(IMAGE, "an image like team/train:1.2, with a lower-case path and no spaces", 512)
# Of Python: train, package.train.
module: Final = _matching(_MODULE, "the name of a module, like package.train", TEXT_LIMIT)


def extended_resource(name: str) -> str:
    """Check the name of a resource that a device plugin offers: ``amd.com/gpu``."""
    domain = label_key(name).rpartition("/")[0]
    if not domain or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        raise ValueError(f"must be the name of a device plugin's resource, like amd.com/gpu (is {name!r})")
    if name == "nvidia.com/gpu":
        raise ValueError("nvidia.com/gpu is requested by gpu")
    return name


def own_key(key: str) -> str:
    """Check the key of a label or an annotation that a user may set: not one of flk, the operator or Kueue's queue."""
    if key in OWN_KEYS or key.startswith(OWN_PREFIXES):
        raise ValueError("queue sets it" if key.startswith(_KUEUE) else f"flk or the training operator sets {key}")
    return label_key(key)


def label_key(key: str) -> str:
    """Check the key of a label, with or without a prefix: ``pool``, ``example.com/pool``."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > SUBDOMAIN_LIMIT or not re.fullmatch(SUBDOMAIN, prefix)):
        raise ValueError(f"its prefix must be a domain, like example.com/pool (is {key!r})")
    if len(name) > LABEL_LIMIT or not re.fullmatch(QUALIFIED, name):
        raise ValueError(
            f"must be at most {LABEL_LIMIT} letters, digits, '-', '_' and '.', "
            f"and start and end with a letter or digit (is {key!r})"
        )
    return key


def queue(name: str) -> str:
    """Check the name of a Kueue queue: the name of an object that is the value of a label too."""
    return label_value(object_name(name))


def variable(name: str) -> str:
    """Check the name of an environment variable, which must not be one that flk or the operator sets."""
    if not re.fullmatch(VARIABLE, name):
        raise ValueError(f"must be letters, digits and '_', and not start with a digit (is {name!r})")
    if user_env.is_reserved(name):
        if name.startswith("FLK_"):
            reason = "flk uses the names that start with FLK_"
        elif name == "PYTHONUNBUFFERED":
            reason = "the training operator sets it to 1"
        else:
            reason = "flk sets it for every rank, and the training operator would overwrite it"
        raise ValueError(f"{name} is reserved: {reason}")
    return name


def text(value: str) -> str:
    """Check a word of a command line or the value of a variable: no NUL, and not longer than Linux accepts."""
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    if size > TEXT_LIMIT:
        raise ValueError(f"must have at most {TEXT_LIMIT:,} bytes, not {size:,}: put large values in a file")
    return value


def s3_address(address: str) -> str:
    """Return an address ``s3://BUCKET/PREFIX`` without a slash at its end. Raises ValueError for anything else."""
    if not re.fullmatch(S3_ADDRESS, address) or {".", ".."} & {*address.split("/")}:
        raise ValueError(
            "must be s3://BUCKET/PREFIX, where the prefix is names of letters, digits, '-', '_', '.' and '=' "
            f"(is {address!r})"
        )
    return address.rstrip("/")


def folder(path: str) -> str:
    """Return the normalised path of a folder in a pod, on a node or on a server. Raises ValueError for others."""
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
    return clean


def mount_path(path: str) -> str:
    """Return the normalised path at which a volume is mounted in a pod. Paths that hide others are refused."""
    clean = folder(path)
    if clean == "/":
        raise ValueError("must not be the root folder")
    # A volume mounted over one of these would hide it from the launcher.
    for own in ("/flk", "/dev", "/proc", "/sys"):
        if clean == own or clean.startswith(own + "/"):
            raise ValueError(f"must not be below {own}, which flk or the system uses (is {path!r})")
    return clean


def package(word: str) -> str:
    """Check a package for pip: a name with versions, an address or a path, not an option."""
    text(word)
    if not word.strip() or word != word.strip() or any(character < " " for character in word):
        raise ValueError(f"must be a package for pip, like torchmetrics>=1.4 (is {word!r})")
    if word.startswith("-"):
        raise ValueError(f"must be a package for pip; options like {word!r} go into a file of --requirements")
    if re.fullmatch(_TWO_NAMES, word):
        raise ValueError(f"must be one package each time (is {word!r})")
    return word


def requirements_path(path: str) -> str:
    """Return the normalised path of a file of requirements: among the code, or an absolute one in the pods."""
    clean = folder(path if path.startswith("/") else f"/{path}")
    if clean == "/":
        raise ValueError(f"must be the path of a file (is {path!r})")
    return clean if path.startswith("/") else clean[1:]


def split_topology(value: str) -> tuple[str, str]:
    """Split ``KEY[:required|preferred]`` into the label of nodes and the strength, required if it is left out."""
    key, colon, strength = value.partition(":")
    if colon and strength not in STRENGTHS:
        raise ValueError(f"must be KEY, KEY:required or KEY:preferred (is {value!r})")
    return label_key(key), strength or STRENGTHS[0]


def checked(what: str, check: Callable[[str], str], value: str) -> str:
    """Return what ``check`` returns for ``value``. Its ValueError begins with ``what``."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None
