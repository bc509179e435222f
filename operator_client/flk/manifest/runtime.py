"""flk_runtime as it travels with a job: the packages that the job uses, minified and compressed.

Equal sources make equal archives.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import json
import re
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Final

from flk.manifest import minify
from flk.manifest.minify import minified
from flk.shipped import refuse_in_rank
from flk.spec.job import Job
from flk.user_files import cache_folder, write_whole
from flk_runtime import contract
from flk_runtime.contract import user_env
from flk_runtime.contract.sinks import implied_sinks
from flk_runtime.contract.strategies import AUTO, DILOCO

# Packages of flk_runtime that not all jobs use.
# All but the packages are the modules of _ELSEWHERE: "training" is for jobs that train, "records" for those that keep
# records in the cluster or on a volume, "preparation" installs packages or runs a setup command, "check" checks a
# start, "disk" keeps checkpoints on a local disk, "loops" is for loops of scripts, "saves" for `flk.save`,
# `flk.restore` and `flk.must_stop`, "trainers" for clients of Kubeflow Trainer, "trainjobs" for the status of
# TrainJobs, "s3" for checkpoints there, "weights" for files of weights that `export`, `import`, `load_weights` and
# `init=` use, "links" measures the network of three nodes or more, "gpus" is for jobs that request GPUs, and
# "averaging" for scripts with a DistributedOptimizer. "sharding" is FSDP2, for strategies that shard and for
# `precision=`. "average" is `Run.average`, "recompute" and "frozen" are options of `Run.parallelize`, and "slurm" reads
# the variables of srun. "sinks" writes metrics to TensorBoard, MLflow and W&B, and "page" serves them to Prometheus.
OPTIONAL: Final = frozenset(
    {
        "plan", "bench", "diloco", "hosts", "loops", "training", "records", "preparation", "check", "disk", "trainers",
        "trainjobs", "sinks", "page", "mesh", "s3", "weights", "links", "gpus", "averaging",
        "sharding", "average", "recompute", "frozen", "saves", "slurm",
        "profiling",  # which no job ships: `flk profile` sends it
    }
)  # fmt: skip
_MENTIONED: Final = {
    "hosts": (b"flk_runtime.hosts",),
    "loops": (b"flk_runtime.hosts", b"adopt"),
    "s3": (b"s3:",),
    "mesh": (b"mesh", b"tp=", b"tp_plan", b"'tp'", b'"tp"'),
    "sharding": (b"shard", b"Shard", b"SHARD", b"precision", b"flk_runtime.hosts", b"adopt"),
    "sinks": (b"metrics=",),
    "averaging": (b"DistributedOptimizer",),
    "diloco": (b"DiLoCo", b"diloco"),
    "weights": (b"weights", b"export", b"init=", b"init =", b"init:", b"'init'", b'"init"'),
    "average": (b"average",),
    "recompute": (b"recompute",),
    "frozen": (b"save_frozen",),
    "saves": (b"save", b"restore", b"must_stop"),
    "slurm": (b"SLURM",),
    "trainers": (b"Trainer", b"transformers", b"KUBEFLOW"),
}
"""What the code of a job says that uses an OPTIONAL package which no option of the job tells."""
_KEY: Final = rb"""%b(?<!\w%b)["']?(?:\s*[:=]|\Z)"""  # of a setting, or the end of a word such as --tp
_IN_SETTINGS: Final = {
    **{package: re.compile(b"|".join(_MENTIONED[package])) for package in ("s3", "sharding", "recompute", "frozen")},
    "mesh": re.compile(rb"mesh|tp_plan|" + _KEY % (b"tp", b"tp")),
    "weights": re.compile(_KEY % (b"init", b"init")),
}
"""What files that are not Python's, and the command and variables of a job, say that ask for an OPTIONAL package."""
_OF_PLANS: Final = frozenset({"plan", "recompute", "sharding"})
_OF_HOSTS: Final = frozenset({"hosts", "loops", "sharding"})
_OF_DILOCO: Final = frozenset({"diloco", "average"})
# The programs of flk_runtime with the packages that they use. `flk bench` compares its results with predictions.
_OF_PROGRAMS: Final = {
    "": {"training", "check", "weights"},
    "bench": {"bench", *_OF_PLANS},
    "check": {"training", "check"},
    "diloco": {"diloco"},
    "hosts": {"training", *_OF_HOSTS},
    "plan": _OF_PLANS,
}
_OF_MEMORY: Final = ("exchange", "messages", "partner", "room", "service", "store")
_OF_SHARDING: Final = (
    "between_passes", "fsdp2", "full_parameters", "gradients", "lost_changes", "records", "silent_errors", "skipped",
    "step_errors", "unused",
)  # fmt: skip
_OF_TELEMETRY: Final = ("__init__", "history", "idle", "keeper", "meter", "usage")
_OF_WEIGHTS: Final = ("__init__", "export", "safetensors", "weights")
# Modules that only one OPTIONAL package needs, or two, outside of it. A module of another such package needs both.
_ELSEWHERE: Final[dict[str, str | tuple[str, str]]] = {
    "automatic.py": "plan",
    "check.py": "check",
    "checkpoint/gather.py": "training",
    "contract/sinks.py": "sinks",
    "checkpoint/pod_exchange.py": "training",
    "checkpoint/storage/s3.py": "s3",
    "discovery/slurm.py": "slurm",
    "distributed/optimizer.py": "averaging",
    "distributed/reducer.py": "averaging",
    **dict.fromkeys((f"checkpoint/files/{each}.py" for each in _OF_WEIGHTS), "weights"),
    "launcher/cluster_http.py": ("records", "trainjobs"),
    "launcher/gpu_health.py": "gpus",
    "launcher/health.py": "training",
    "launcher/hub.py": "diloco",
    "launcher/ledger.py": "training",
    "launcher/metrics_page.py": "page",
    "launcher/nvml.py": "gpus",
    "launcher/preparation.py": "preparation",
    "launcher/record_archive.py": "records",
    "launcher/record_place.py": "records",
    "launcher/telemetry/gpus.py": "gpus",
    "launcher/trainer_forward.py": "trainjobs",
    **dict.fromkeys((f"parallel/{each}.py" for each in _OF_SHARDING), "sharding"),
    "parallel/average.py": "average",
    "parallel/frozen.py": "frozen",
    "parallel/initialize.py": "weights",
    "parallel/mesh.py": "mesh",
    "parallel/mesh_model.py": "mesh",
    "parallel/recompute.py": "recompute",
    "parallel/step_streams.py": "average",
    "parallel/tensor_parallel.py": "mesh",
    "plan/split.py": "mesh",
    "launcher/trainer_status.py": "trainers",
    **dict.fromkeys((f"launcher/telemetry/{each}.py" for each in _OF_TELEMETRY), "training"),
    "launcher/replication/disk.py": "disk",
    **dict.fromkeys((f"launcher/replication/{each}.py" for each in _OF_MEMORY), "training"),
    "run/adopt.py": "loops",
    "run/curves.py": "sinks",
    "run/links.py": "links",
    "run/loop.py": "loops",
    "run/script.py": "saves",
}
_BOOTSTRAP: Final = "bootstrap.py"
# The symbols of the text that is compressed, in the order of their codes: its characters, and parts of words that are
# frequent in it. The order is part of the gain, since bzip2 sorts by codes: symbols that stand in like places are
# neighbours. A search has found it. The archive is smaller so than without symbols for words, and than with all symbols
# in alphabetical order. Any table works that has all characters of the text.
_MARKS: Final = {"WORD": "\1", "LETTER": "\2", "SPACE": " "}
_NAMES: Final = r"""
WORD LETTER @ __init__ SPACE . = ! : } ] [ ) , * \ ' () ( _ __future__ - > + / 0 < | 2 3 4 1 ^ 5 6 7 9 8 ` s receive
reduce raise return $ l last class source samples save sion second selector self set c z type str strateg g grad
started stack get group q # ; a args ate able address all age ain and ~ ault environ atch else eader error est
expected except end def o own older optimizer out u b broadcast state bytes block d data describe device slot
checkpoint dict distributed h r replica requires_gra lea lambda found frozen from share signal snapshot socket split
begin backward bucket start status step line length limit answer count list load size m manager memory message
launcher meta model module n now name node none local_ not key " j { join k kind t the trace tensor ted ter property
text tion torch run contract true tuple close com chunk check collec code stor member compute connec context w wait
weight with worker world_size write p port problem par phase number plan pod pre parallel path settings shape
precision process progress user_env use v value ver is_ place info ield import % i ing int item y x ? & shard
parameter f rank read reason record report ange isinstance result full failure orphans false file first flk_runtime
float attempt e enumerat each ent time for flight
"""
_SYMBOLS: Final = [_MARKS.get(name, name) for name in _NAMES.split()]
_CODES: Final = {symbol: code for code, symbol in enumerate(_SYMBOLS)}
_SYMBOL: Final = re.compile("|".join(map(re.escape, sorted(_SYMBOLS, key=len, reverse=True))))
_PARSING: Final = threading.Lock()  # before Python 3.12, ast fails in two threads at once
_DIGEST: Final = hashlib.sha256().digest_size


def used_by(job: Job) -> frozenset[str]:
    """Return which OPTIONAL packages a job uses, as far as its options tell."""
    used = {"preparation"} if job.pip or job.requirements or job.setup else set()
    if job.records or (job.checkpoint and not job.checkpoint.address):
        used.add("records")
    if job.most_pods > 2:
        used.add("links")
    if job.resources.gpu:
        used.add("gpus")
    if job.accelerate_config:
        used |= _OF_HOSTS
    if job.target_or_default in (AUTO, "trainjob"):
        used.add("trainjobs")
    if job.memory_path:
        used.add("disk")
    if job.secrets or job.patch:  # they may hold an address, or a strategy that the script reads
        used |= {"s3", "sharding"}
    used.update(*(_asked(text.encode(errors="replace")) for text in _texts(job)))
    if job.metrics or implied_sinks(job.env | job.secrets):
        used.add("sinks")
    if user_env.METRICS_PORT in job.env.keys() | job.secrets.keys() or user_env.METRICS_PORT in str(job.patch):
        used.add("page")
    module = job.command[1].split(".") if job.command[0] == "-m" else []
    if module[:1] == ["flk_runtime"]:
        return frozenset(used.union(_OF_PROGRAMS.get(".".join(module[1:2]), {"training"})))
    strategies = {job.strategy, job.diloco.inner if job.diloco else ""} - {"no_shard"}  # which is ddp
    used.update(*(_asked(strategy.encode()) for strategy in strategies))
    return frozenset(used.union({"training"}, {AUTO: _OF_PLANS, DILOCO: _OF_DILOCO}.get(job.strategy, ())))


def _texts(job: Job) -> Iterator[str]:
    """Yield what a job says to its ranks, in which the address of checkpoints and options can stand."""
    yield str(job.patch or "")
    yield from job.command
    yield from job.env.values()
    yield from (job.on_restart or "").split()
    yield job.setup or ""
    yield (job.checkpoint.address if job.checkpoint else None) or ""


def used_by_code(files: Iterable[tuple[str, bytes]] | None) -> frozenset[str]:
    """Return which OPTIONAL packages the code of a job may use, from the names and contents of its files.

    None: it may be any code, which uses DiLoCo only if the job's strategy says so. Files that are not Python's may hold
    settings: the address of checkpoints, and options.
    """
    if files is None:
        return frozenset(_MENTIONED) - {"diloco"}
    found: set[str] = set()
    for name, content in files:
        found |= _mentioned(content) if name.endswith((".py", ".ipynb")) else _asked(content)
    return frozenset(found)


def _mentioned(code: bytes) -> set[str]:
    """Return which OPTIONAL packages Python code may use. A notebook has a backslash before each quote."""
    plain = code.replace(rb"\"", b'"')
    return {package for package, words in _MENTIONED.items() if any(word in plain for word in words)}


def _asked(settings: bytes) -> set[str]:
    """Return which OPTIONAL packages settings ask for: a file of them, or a text of the job."""
    plain = settings.replace(rb"\"", b'"')
    return {package for package, words in _IN_SETTINGS.items() if words.search(plain)}


def runtime_archive(optional: Set[str] = OPTIONAL) -> bytes:
    """Return flk_runtime and these OPTIONAL packages as an archive that Python can run: `python3 flk_runtime.zip`.

    It is a zip with the bootstrap and, compressed, the modules, which the bootstrap unpacks. It is kept in the user's
    cache folder with a hash of its bytes and of all that it is made from, and packed anew where that differs.
    """
    refuse_in_rank("a job's part of the runtime")
    folder = Path(contract.__file__).parents[1]
    modules = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    kept = cache_folder() / "-".join(["runtime", *sorted(optional)])
    own = [Path(file).read_bytes() for file in (__file__, minify.__file__)]
    made_from = repr((kept.name, own, sorted(modules.items()))).encode()
    with contextlib.suppress(OSError):
        content = kept.read_bytes()
        digest, archive = content[:_DIGEST], content[_DIGEST:]
        if digest == hashlib.sha256(made_from + archive).digest():
            return archive
    archive = _packed(modules, OPTIONAL - optional)
    with contextlib.suppress(OSError):  # the home may be read-only
        write_whole(kept, hashlib.sha256(made_from + archive).digest() + archive)
    return archive


def module_source(name: str) -> str:
    """Return the source of a module of flk_runtime, by its path in the package, as an archive has it."""
    with _PARSING:
        return minified((Path(contract.__file__).parents[1] / name).read_text())


def _packed(modules: Mapping[str, bytes], left_out: Set[str]) -> bytes:
    """Return modules, by their paths, as an archive without some of the OPTIONAL packages."""
    sources = {
        f"flk_runtime/{name}": _relative(minified(source.decode()))
        for name, source in sorted(modules.items())
        if name != _BOOTSTRAP and _is_shipped(name, left_out)
    }
    symbols = zlib.compress("\n".join(_SYMBOLS).encode(), 9)
    members = {
        "__main__.py": minified(modules[_BOOTSTRAP].decode()).encode(),
        "flk_runtime.packed": symbols + bz2.compress(_coded(json.dumps(sources, separators=(",", ":")))),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            kind = zipfile.ZIP_DEFLATED if name == "__main__.py" else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), data, kind, 9)  # its date is 1980
    return buffer.getvalue()


def _is_shipped(name: str, left_out: Set[str]) -> bool:
    """Whether a module, by its path, ships without these OPTIONAL packages."""
    only = _ELSEWHERE.get(name)
    lacks_all = left_out >= set(only if isinstance(only, tuple) else (only,))
    return not (lacks_all or name.partition("/")[0] in left_out)


def _coded(text: str) -> bytes:
    """Return a text in the form that `flk_runtime.bootstrap.decoded` reads: codes of _SYMBOLS, without capitals."""
    text = re.sub("[A-Z][A-Z_]+(?![A-Za-z_])", lambda match: _MARKS["WORD"] + match[0].lower(), text)
    text = re.sub("[A-Z]", lambda match: _MARKS["LETTER"] + match[0].lower(), text)
    return bytes(_CODES[match[0]] for match in _SYMBOL.finditer(text))


def _relative(source: str) -> str:
    """Return the source of a module in the form that `flk_runtime.bootstrap.indented` reads."""
    lines, level = [], 0
    for line in source.split("\n"):
        if line:
            text = line.lstrip(" ")
            before, level = level, len(line) - len(text)
            line = chr(58 + level - before) + text
        lines.append(line)
    return "\n".join(lines)
