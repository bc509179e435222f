"""A forked rank finds what it would find in the new interpreter that torchrun starts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.launcher.processes import preload
from tests.support.commands import RUN_CLI, Flk

pytestmark = pytest.mark.xdist_group("fresh ranks")  # two tests look at one run
RANKS, ATTEMPTS = 2, 2

# Each rank writes what it sees. In the first attempt one rank kills itself when all have written.
OBSERVE = """
    import os
    paths = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd") if int(each) > 2]
    files = [os.readlink(each) for each in paths if os.path.islink(each)]

    import asyncio, atexit, gc, json, logging, multiprocessing, pathlib, random, secrets, signal, subprocess, sys
    import tempfile, threading, time, uuid
    from multiprocessing import process, resource_tracker, synchronize, util
    import numpy, sympy.core.random, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
    from torch.utils.data import DataLoader
    # Because of this comment, torch.optim and shards, flk imports the modules for both before the fork.

    like_torchrun = {
        "arguments": sys.argv, "command": sys.orig_argv[1:], "flags": str(sys.flags), "paths": sys.path,
        "main": {name: str(globals().get(name)) for name in ("__name__", "__file__", "__spec__", "__package__")},
        "loader": type(__loader__).__name__, "cached": __cached__,
        "names of threads": threading.Thread().name, "names of processes": multiprocessing.Process().name,
        "parent process": multiprocessing.parent_process(), "start method": multiprocessing.get_start_method(True),
        "temporary folder": [tempfile.tempdir, process.current_process()._config.get("tempdir")],
        "finalizers": len(util._finalizer_registry), "after fork": len(util._afterfork_registry),
        "children": [len(subprocess._active), len(multiprocessing.active_children())],
        "resource tracker": resource_tracker._resource_tracker._pid,
        "signals": [getattr(signal.getsignal(each), "__name__", signal.getsignal(each)) for each in range(1, 32)],
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
        "logging": [str(logging.root.handlers), logging.root.level],
        "loop": asyncio.events._get_running_loop(), "exit handlers": atexit._ncallbacks(),
        "collector": [gc.isenabled(), gc.get_threshold()], "umask": os.umask(0o22), "hooks": [
            sys.excepthook.__module__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile()
        ],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "torch's threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch's dtype": str(torch.get_default_dtype()), "CUDA": torch.cuda.is_initialized(),
    }

    def of_worker(item):
        return torch.initial_seed(), torch.rand(()).item()

    unique = {
        "torch.initial_seed": torch.initial_seed(),
        "torch.rand": torch.rand(4, dtype=torch.float64).tolist(),
        "torch.Generator": torch.Generator().seed(),
        "workers of a DataLoader": next(iter(DataLoader([0], num_workers=1, collate_fn=of_worker))),
        "numpy.random.rand": numpy.random.rand(),
        "numpy.random.default_rng": numpy.random.default_rng().random(),
        "random.random": random.random(),
        "sympy.core.random.rng": sympy.core.random.rng.random(),
        "sympy.core.random._assumptions_rng": sympy.core.random._assumptions_rng.random(),
        "names of tempfile": next(tempfile._get_candidate_names()),
        "names of semaphores": next(synchronize.SemLock._rand),
        "uuid1": str(uuid.uuid1()),
        "uuid4": str(uuid.uuid4()),
        "secrets": secrets.token_hex(),
        "key of multiprocessing": bytes(process.current_process().authkey).hex(),
        "process ID": [os.getpid(), multiprocessing.current_process().pid, threading.main_thread().native_id],
    }
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place = os.environ["SEEN"] + str(attempt)
    seen = {"unique": unique, "like torchrun": like_torchrun, "sockets": str(files).count("socket:")}
    pathlib.Path(f"{place}.{rank}.new").write_text(json.dumps(seen))
    os.rename(f"{place}.{rank}.new", f"{place}.{rank}")
    while attempt == 0 and "HOLD" in os.environ:
        if rank == 1 and all(os.path.exists(f"{place}.{each}") for each in range(int(os.environ["WORLD_SIZE"]))):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Seen:
    """What the ranks of a job saw in its attempts, under flk and under torchrun."""

    flk: list[dict[str, Any]]
    torchrun: list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "observe.py").write_text(textwrap.dedent(OBSERVE))
    flk = Flk(folder, home=folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    options = ("--processes", str(RANKS), "--restarts", "1")
    ended = flk("run", *options, "observe.py", "x", env={"SEEN": f"{folder}/flk.", "HOLD": "1"})
    assert ended.code == 0, ended.stderr
    subprocess.run(
        [*torchrun, "observe.py", "x"],
        cwd=folder,
        env=flk.env | {"SEEN": f"{folder}/torchrun."},
        check=True,
        timeout=RUN_CLI,
    )
    found = [
        [json.loads(each.read_text()) for each in sorted(folder.glob(f"{name}.?.?"))] for name in ("flk", "torchrun")
    ]
    assert [len(each) for each in found] == [RANKS * ATTEMPTS, 1]
    return Seen(*found)


def test_ranks_and_attempts_share_nothing_that_is_drawn_at_random(seen: Seen) -> None:
    ranks = [*seen.flk, *seen.torchrun]
    drawn = {name: [json.dumps(each["unique"][name]) for each in ranks] for name in ranks[0]["unique"]}
    assert [name for name, values in drawn.items() if len(set(values)) < len(values)] == []


def test_a_rank_finds_the_state_of_a_new_interpreter(seen: Seen) -> None:
    expected = seen.torchrun[0]["like torchrun"]
    for each in seen.flk:
        assert each["like torchrun"] == expected
        assert each["sockets"] == 1  # of its own, on which it answers the launcher; torchrun's have none
    assert seen.torchrun[0]["sockets"] == 0


# Imports the packages as the fork server does, and forks two processes that set themselves up as ranks. It prints which
# modules read variables meanwhile, what each of the two has of every row, and what each generator draws there.
IMPORT = """
    import gc, importlib, json, os, random, sys, tempfile

    read_by, get = {}, type(os.environ).__getitem__

    def noting_get(environ, name):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in ("os", "collections.abc"):
            frame = frame.f_back
        read_by.setdefault(name, []).append(frame.f_globals["__name__"])
        return get(environ, name)

    type(os.environ).__getitem__ = noting_get
    for name in sys.argv[1:]:
        importlib.import_module(name)
    type(os.environ).__getitem__ = get
    import sympy
    from flk_runtime.launcher.processes.preload import become_own

    # These draw nothing twice: names of tempfile know their process, and Dummy has drawn its one number.
    names = [each for each in gc.get_objects() if type(each) is tempfile._RandomNameSequence]
    known = [*(each.__dict__.get("_rng") for each in names), sympy.Dummy._prng]
    drawn = [each for each in gc.get_objects() if isinstance(each, random.Random) and not any(each is k for k in known)]
    modules = sys.modules
    seen = []
    for number in (1, 2):
        end, write = os.pipe()
        if os.fork() == 0:
            os.environ |= {"RANK": str(number + 2), "LOCAL_RANK": str(number)}
            become_own()
            rows = {
                "torch": lambda module: module.rand(4).tolist(),
                "numpy.random": lambda module: module.rand(4).tolist(),
                "sympy.core.random": lambda module: [module.rng.random(), module._assumptions_rng.random()],
                "multiprocessing.process": lambda module: bytes(module.current_process().authkey).hex(),
                "multiprocess.process": lambda module: bytes(module.current_process().authkey).hex(),
                "lightning_utilities.core.rank_zero": lambda module: module.rank_zero_only.rank,
                "torchmetrics.utilities.prints": lambda module: module.rank_zero_only.rank,
                "datasets.fingerprint": lambda module: module.generate_random_fingerprint(),
                "webdataset.shardlists": lambda module: module.default_rng.random(),
            }
            found = {name: see(modules[name]) if name in modules else None for name, see in rows.items()}
            draws = [(repr(each), each.getrandbits(64)) for each in drawn]
            os.write(write, json.dumps([found, draws]).encode())
            os._exit(0)
        os.close(write)
        seen.append(json.loads(os.fdopen(end).read()))
    print(json.dumps([read_by, *seen]))
"""
OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


@pytest.mark.soak
def test_what_packages_take_for_their_process_at_their_import_is_set_again(tmp_path: Path) -> None:
    """Of every package that is imported before the fork and is installed here, without a list of what each takes."""
    more = ["transformers.trainer", "webdataset", "flk_hosts.transformers", "flk_hosts.lightning"]
    wanted = [*preload.PACKAGES, *preload.FOR_OPTIMIZERS, *more]
    there = [name for name in wanted if importlib.util.find_spec(name.partition(".")[0])]
    (tmp_path / "packages.py").write_text(textwrap.dedent(IMPORT))
    env = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANK)}
    command = [sys.executable, "packages.py", *there]
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True, timeout=RUN_CLI)
    read_by, *seen = json.loads(done.stdout.splitlines()[-1])
    (first, first_draws), (second, second_draws) = seen
    assert set(first) == set(preload.OF_PROCESS)
    ranks = {"lightning_utilities.core.rank_zero": (3, 4), "torchmetrics.utilities.prints": (1, 2)}
    for name, values in {name: (first[name], second[name]) for name in first}.items():
        if importlib.util.find_spec(name.partition(".")[0]):
            assert values == ranks[name] if name in ranks else values[0] != values[1], name
    same = [name for (name, draw), (_, other) in zip(first_draws, second_draws, strict=True) if draw == other]
    assert same == []
    readers = {name: sorted(set(by)) for name, by in read_by.items() if name.startswith(OF_RANK)}
    assert readers == {
        "RANK": ["lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"],
        "LOCAL_RANK": [
            "lightning.fabric.utilities.rank_zero",
            "lightning_fabric.utilities.rank_zero",
            "torchmetrics.utilities.prints",
        ],
    }


LOOP = """
    import sys
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    before = {name.partition(".")[0] for name in sys.modules}
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
    accelerator.end_training()
    print("imported:", sorted({name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names))
"""


@pytest.mark.soak
def test_the_steps_of_a_loop_import_no_package_anew(tmp_path: Path) -> None:
    """With `preload`, as the page on Accelerate says: prepare() imports datasets."""
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    (tmp_path / "train.py").write_text(textwrap.dedent(LOOP))
    ended = Flk(tmp_path, home=tmp_path)("run", "--processes", "2", "--preload", "accelerate datasets", "train.py")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("imported: []") == 2, ended.stdout
