"""Launchers of several pods as real processes on this machine: attempts, faults, signals and exit codes."""

from __future__ import annotations

import gzip
import os
import re
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import ExitCode, log_format, pod_env
from tests.support.collection import often
from tests.support.pods import END, TRAIN, Pods
from tests.support.processes import alive, checked


@pytest.mark.promise("Jobs: A script for torchrun runs unchanged, on this machine and in a cluster")
@pytest.mark.parametrize("start", often((0,), ["fork", "spawn"]))
def test_ranks_of_two_pods_form_one_process_group(pods: Callable[..., Pods], start: str) -> None:
    script = TRAIN + '    print("in ps:", pathlib.Path("/proc/self/comm").read_text(), end="")\n'
    job = pods(2, 2, script=script, FLK_START=start)
    job.start("train.py", "1")
    assert job.wait() == [0, 0], job.logs_of_all()
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4 done in attempt 0\n" in job.log(rank // 2)
        assert f"[rank {rank}] in ps: rank {rank}\n" in job.log(rank // 2)
    assert job.record().outcome == "succeeded"


def test_a_missing_torch_is_named_before_any_rank_starts(pods: Callable[..., Pods]) -> None:
    job = pods(script="print('started')", FLK_START="spawn")
    hidden = "find = util.find_spec\nutil.find_spec = lambda name: name != 'torch' and find(name)\n"
    (job.folder / "site").mkdir()
    (job.folder / "site" / "sitecustomize.py").write_text(f"from importlib import util\n{hidden}")
    (job.folder / "site" / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
    job.variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(job.folder / "site"), os.getenv("PYTHONPATH")]))
    job.start("train.py")
    assert job.wait() == [ExitCode.USAGE], job.log()
    assert job.log() == f"[pod 0] error: {sys.executable} cannot import torch: No module named 'torch'\n"


def test_later_attempts_have_what_the_script_imports_first(pods: Callable[..., Pods]) -> None:
    """A package that is known to be safe is imported once for the ranks of all attempts; others are not."""
    script = """
        import timm
        import other
        import os, signal

        assert timm.PID != os.getpid() == other.PID
        print("imported by", timm.PID)
        if os.environ["FLK_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    job = pods(1, 2, script=script, FLK_RESTARTS="1")
    site = job.folder / "site-packages"
    site.mkdir()
    for name in ("timm", "other"):
        (site / f"{name}.py").write_text("import os\nPID = os.getpid()\n")
    job.variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.getenv("PYTHONPATH")]))
    job.start("train.py")
    assert job.wait() == [0], job.log()
    lines = [line.partition("imported by ")[2] for line in job.log().splitlines() if "imported by" in line]
    assert len(lines) >= 3
    assert len(set(lines)) == 1


SEES = """
    import sys
    from pathlib import Path
    main = sys.modules["__main__"]
    seen = [__name__, sys.argv, sys.orig_argv[1:], sys.path[0], Path.cwd()]
    if __name__ == "__main__":
        seen += [__file__, __package__, __spec__.name, __spec__.origin, __cached__, type(__loader__).__name__]
    print("sees", *seen)
"""


@pytest.mark.parametrize("name", often((0,), ["package.train", "package"]))
def test_a_module_and_its_package_see_what_python_shows_them(forked_pods: Callable[..., Pods], name: str) -> None:
    """Also while the package is imported, where a default of its parser may be ``sys.argv[1:]``."""
    job = forked_pods()
    (job.folder / "package").mkdir()
    for module in ("__init__", "__main__", "train"):
        job.write(SEES, f"package/{module}.py")
    python = checked([sys.executable, "-u", "-m", name, "--lr", "1e-3"], cwd=job.folder)
    assert python.startswith("sees package ['-m', '--lr', '1e-3']")
    job.start("-m", name, "--lr", "1e-3")
    assert job.wait() == [0], job.log()
    seen = [line.removeprefix("[rank 0] ") for line in job.log().splitlines() if line.startswith("[rank 0] sees")]
    assert seen == python.splitlines()


def test_a_script_sees_the_same_arguments_path_and_main_as_under_python(forked_pods: Callable[..., Pods]) -> None:
    script = """
        import __main__, os, sys
        seen = [sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd(), __file__, __name__, __main__.__file__]
        seen += [__spec__, __package__, __cached__, type(__loader__).__name__, os.path.basename(__loader__.path)]
        class Options:
            rate: float = 0.1  # dataclasses make the types of arguments of it
        print("sees", *seen, Options.__annotations__)
    """
    job = forked_pods(script=script)
    arguments = ["train.py", "a b", "--x"]
    expected = checked([sys.executable, "-u", *arguments], cwd=job.folder)
    job.start(*arguments)
    assert job.wait() == [0], job.log()
    assert f"[rank 0] {expected}" in job.log()


def test_a_setup_command_may_bring_the_script(pods: Callable[..., Pods], tmp_path: Path) -> None:
    """As that of a converted job, which links the files of the image's WORKDIR: there the launcher starts."""
    job = pods(script="import beside; print('it is', beside.NAME)")
    job.write("NAME = 'there'", "beside.py")
    work = tmp_path / "work"
    work.mkdir()
    job.variables |= {"FLK_WORK": str(work), "FLK_SETUP": 'ln -sf "$(readlink /proc/$PPID/cwd)"/* .'}
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert "[rank 0] it is there" in job.log()


def test_ranks_import_no_more_of_flk_by_the_first_step_that_is_saved(pods: Callable[..., Pods]) -> None:
    """Each rank would import it again after each restart."""
    script = """
        import sys, torch, flk_runtime as flk
        before = {*sys.modules}
        with flk.init(device="cpu", save_every=1) as run:
            layer = torch.nn.Linear(2, 2)
            model, optimizer = run.parallelize(layer, torch.optim.SGD(layer.parameters()))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.step(loss=1.0)
            print("imports", sorted(name for name in {*sys.modules} - before if name.startswith("flk")))
    """
    job = pods(2, 1, script=script)
    job.start("train.py")
    assert job.wait() == [0, 0], job.log()
    assert re.findall(r"imports (.*)", job.log()) == ["[]"]


@pytest.mark.promise("Recovery: A rank or pod that dies costs no result, and no volume is needed")
def test_modules_of_the_script_shadow_those_of_python(forked_pods: Callable[..., Pods]) -> None:
    """Also those that torch has imported before; but none that Python itself finds first."""
    script = """
        import calendar, io, json, statistics, time, torch
        print([getattr(each, "OWN", None) for each in (calendar, io, json, statistics, time)])
    """
    job = forked_pods(script=script)
    (job.folder / "json").mkdir()  # without __init__.py it shadows nothing
    for name in ("calendar", "io", "statistics", "time"):
        job.write("OWN = 1", f"{name}.py")
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert "[rank 0] [1, None, None, 1, None]\n" in job.log()


def test_a_killed_rank_restarts_all_ranks(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(2, 2, FLK_RESTARTS="1", HOLD="1")
    job.start("train.py", "2")
    os.kill(job.pid(0, 3), signal.SIGKILL)
    assert job.wait() == [0, 0], job.logs_of_all()
    for rank in range(4):
        assert f"rank {rank} of 4 done in attempt 1" in job.logs_of_all()
    for pod in range(2):
        assert [n for line in job.log(pod).splitlines() if (n := log_format.parse_attempt(line))] == [1, 2]
    assert re.findall(r"attempt 2: 4 ranks on 2 pods, after .*\n", job.log(0))
    failure = job.failure(attempt=0)
    assert (failure.rank, failure.signal, failure.pod_name) == (3, signal.SIGKILL, "test-worker-1")


@pytest.mark.promise("Recovery: A rank or pod that dies costs no result, and no volume is needed")
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_pod_restarts_all_ranks(forked_pods: Callable[..., Pods], victim: int) -> None:
    job = forked_pods(2, 1, FLK_RESTARTS="1", HOLD="1")
    job.start("train.py", "2")
    ranks = [job.pid(0, rank) for rank in range(2)]
    job.running[victim].kill()
    job.running[victim].wait()
    job.until(lambda: not alive(ranks[victim]), "the ranks of a killed launcher end with it")
    job.start("train.py", "2", only=victim)
    assert job.wait() == [0, 0], job.logs_of_all()
    failure = job.failure(attempt=0)
    assert (failure.kind, failure.pod) == ("container_killed", victim)
    assert [attempt.number for attempt in job.record(0).attempts] == [0, 1]


def test_a_pod_that_receives_sigterm_ends_preempted_and_the_others_wait_for_it(
    forked_pods: Callable[..., Pods],
) -> None:
    job = forked_pods(2, 1, FLK_RESTARTS="1", HOLD="1")
    job.start("train.py", "2")
    job.pid(0, 0)
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED
    assert job.record(1).outcome == "preempted"
    job.start("train.py", "2", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()
    failure = job.failure(attempt=0)
    assert (failure.kind, failure.pod, failure.message) == ("preempted", 1, "received SIGTERM")
    lines = job.log(0).splitlines()
    assert "[pod 0] test-worker-1 received SIGTERM; all ranks have to end" in lines
    assert "[pod 0] all ranks get SIGTERM, since not every rank has made a step after which flk could save" in lines


@pytest.mark.promise("Recovery: The rank that failed first is named, in every pod")
def test_the_cause_is_the_rank_that_raised_and_not_its_peers(forked_pods: Callable[..., Pods]) -> None:
    script = TRAIN + "    if rank == 2: raise ValueError('the cause')\n    dist.barrier()\n"
    job = forked_pods(2, 2, script=script)
    job.start("train.py", "1")
    assert job.wait() == [ExitCode.TRAINING] * 2, job.logs_of_all()
    for index in range(2):  # also in the pod whose own ranks only saw a broken connection
        failure = job.failure(index)
        assert (failure.rank, failure.pod_name, failure.type, failure.message) == (
            2,
            "test-worker-1",
            "ValueError",
            "the cause",
        )
        assert "raise ValueError" in failure.traceback
        assert "flk_runtime" not in failure.traceback  # the user's frames only


@pytest.mark.parametrize(("start", "fails"), often((0,), [("fork", ""), ("spawn", ""), ("fork", "yes")]))
def test_a_rank_ends_as_python_does(forked_pods: Callable[..., Pods], start: str, fails: str) -> None:
    """Files that the script has left open are written, and its objects end, but for those of a failure's frames."""
    script = """
        import atexit, ctypes, gzip, os, zipfile
        import torch.distributed as dist

        class Log:
            def __del__(self):
                print("losses", *losses)

        def train():
            packed = gzip.open("left.gz", "wt")
            packed.write("packed")
            text.write("as text")
            ctypes.CDLL(None).puts(b"of C")
            if os.environ["FAILS"]:
                raise ValueError("fails")
            return packed

        dist.init_process_group("gloo")
        log, losses, text, archive = Log(), [3, 2], open("left.txt", "w"), zipfile.ZipFile("left.zip", "w")
        archive.writestr("member", "in an archive")
        atexit.register(text.write, " at the exit")
        packed = train()
    """
    job = forked_pods(script=script, FLK_START=start, FLK_RESTARTS="0", FAILS=fails)
    job.start("train.py")
    assert job.wait() == [ExitCode.TRAINING if fails else 0], job.log()
    assert "[rank 0] of C\n" in job.log()
    assert (job.folder / "left.txt").read_text() == "as text at the exit"
    if not fails:
        assert gzip.decompress((job.folder / "left.gz").read_bytes()) == b"packed"
        assert "[rank 0] losses 3 2\n" in job.log()
        with zipfile.ZipFile(job.folder / "left.zip") as archive:
            assert archive.read("member") == b"in an archive"


def test_a_rank_that_closes_all_descriptors_finds_nothing_in_its_files(forked_pods: Callable[..., Pods]) -> None:
    """One of them gets the number of the pipe on which the rank would report its exception."""
    script = """
        import os
        os.closerange(3, 256)
        files = [open(f"left.{number}", "w") for number in range(20)]
        raise ValueError("fails")
    """
    job = forked_pods(script=script, FLK_RESTARTS="0")
    job.start("train.py")
    assert job.wait() == [ExitCode.TRAINING], job.log()
    assert "ValueError: fails" in job.log()
    assert [path.stat().st_size for path in job.folder.glob("left.*")] == [0] * 20


def test_output_is_prefixed_line_by_line(forked_pods: Callable[..., Pods]) -> None:
    script = """
        import sys
        sys.stdout.write("10%\\r20%\\rdone\\n")
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no newline at the end")
    """
    job = forked_pods(script=script)
    job.start("train.py")
    assert job.wait() == [0]
    lines = job.log().splitlines()
    for line in ("10%", "20%", "done", "to stderr", "no newline at the end"):
        assert f"[rank 0] {line}" in lines


def test_a_stalled_reader_of_the_output_holds_up_the_rank_and_nothing_else(pods: Callable[..., Pods]) -> None:
    """The launchers of both pods stay in touch, and nothing is lost."""
    script = """
        import os, pathlib, time
        pathlib.Path(f"pid.0.{os.environ['RANK']}").write_text(str(os.getpid()))
        if os.environ["RANK"] == "1":
            for line in range(30000):
                print(f"{line:06} " + "x" * 192)
            pathlib.Path("printed").touch()
        while not pathlib.Path("printed").exists():
            time.sleep(0.01)
    """
    job = pods(2, 1, script=script, FLK_LEASE="5", FLK_START="spawn")  # which imports no torch
    read, write = os.pipe()
    job.start("train.py", only=0)
    job.start("train.py", only=1, stdout=write)
    os.close(write)
    job.pid(0, 1)
    time.sleep(7)  # more than a lease
    assert not (job.folder / "printed").exists()
    with open(read, encoding="utf-8") as reader:
        lines = [line for line in reader if line.startswith("[rank 1] ")]
    assert [line[9:15] for line in lines] == [f"{number:06}" for number in range(30000)]
    assert job.wait() == [0, 0], job.logs_of_all()
    assert len(job.record().attempts) == 1


@pytest.mark.parametrize(("number", "code"), often((0,), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]))
def test_a_signal_ends_ranks_and_their_children(forked_pods: Callable[..., Pods], number: int, code: int) -> None:
    script = """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path("child").write_text(str(child.pid))
        pathlib.Path("pid.0.0").write_text(str(os.getpid()))
        time.sleep(600)
    """
    job = forked_pods(script=script)
    job.start("train.py")
    rank = job.pid(0, 0)
    child = int((job.folder / "child").read_text())
    job.running[0].send_signal(number)
    assert job.wait() == [code], job.log()
    assert not alive(rank)
    job.until(lambda: not alive(child), "the child process of the rank ends")


def test_child_processes_that_a_rank_leaves_are_killed(forked_pods: Callable[..., Pods]) -> None:
    script = """
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pathlib.Path("child").write_text(str(child.pid))
    """
    job = forked_pods(script=script)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    child = int((job.folder / "child").read_text())
    job.until(lambda: not alive(child), "the child process that the rank left ends")


@pytest.mark.promise("Recovery: Nothing that a rank leaves outlives its attempt")
def test_processes_that_a_rank_leaves_in_their_own_session_end_before_the_next_attempt(
    forked_pods: Callable[..., Pods],
) -> None:
    """They may hold a GPU or a port. The child has a child, and neither is in the rank's process group."""
    script = """
        import os, pathlib, subprocess, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            subprocess.Popen(["sh", "-c", "sleep 600 & echo $$ $! > left; wait"], start_new_session=True)
            while not (pathlib.Path("left").exists() and pathlib.Path("left").read_text()):
                pass
            sys.exit(3)
        left = [pid for pid in pathlib.Path("left").read_text().split() if pathlib.Path("/proc", pid).exists()]
        print("left:", left)
    """
    job = forked_pods(script=script, FLK_RESTARTS="1")
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert "[rank 0] left: []\n" in job.log()


@pytest.mark.promise("Recovery: Nothing that a rank leaves outlives its attempt")
@pytest.mark.parametrize("end", often((0,), ["os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"]))
def test_shared_memory_of_killed_ranks_is_removed_before_the_next_attempt(
    pods: Callable[..., Pods], tmp_path: Path, end: str
) -> None:
    """Python's resource tracker removes it, when all processes that have used the tracker have ended.

    Here one of them is in a session of its own. A rank that waits is killed with its whole group.
    """
    name = f"flk-test-{os.getpid()}-{tmp_path.name}"
    script = f"""
        import os, pathlib, signal, sys
        from multiprocessing import Semaphore, shared_memory

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            cache = shared_memory.SharedMemory(create=True, size=4096, name="{name}-" + os.environ["RANK"])
            semaphore = Semaphore()
            if os.fork() == 0:
                os.setsid()
                signal.pause()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pathlib.Path("began." + os.environ["RANK"]).touch()
            while len(list(pathlib.Path().glob("began.*"))) < 2:
                pass
            if os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            {end}
        print("left:", [each for each in os.listdir("/dev/shm") if each.startswith("{name}")])
    """
    job = pods(1, 2, script=script, FLK_RESTARTS="1")
    job.start("train.py")
    assert job.wait() == [0], job.log()
    for rank in range(2):
        assert f"[rank {rank}] left: []\n" in job.log()


def test_a_rank_has_the_grace_period_to_end_by_itself(forked_pods: Callable[..., Pods]) -> None:
    script = """
        import os, pathlib, signal, sys, time

        def save(*_):
            pathlib.Path("saving").touch()
            while not pathlib.Path("finish").exists():
                time.sleep(0.01)
            print("saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        pathlib.Path("pid.0.0").write_text(str(os.getpid()))
        time.sleep(600)
    """
    job = forked_pods(script=script, FLK_GRACE="600")
    job.start("train.py")
    job.pid(0, 0)
    job.running[0].terminate()
    job.until((job.folder / "saving").exists, "the rank gets SIGTERM")
    assert job.running[0].poll() is None
    (job.folder / "finish").touch()
    assert job.wait() == [ExitCode.PREEMPTED], job.log()
    assert "[rank 0] saved\n" in job.log()


@pytest.mark.promise("Recovery: Nothing that a rank leaves outlives its attempt")
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(forked_pods: Callable[..., Pods]) -> None:
    script = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("pid.0.0").write_text(str(os.getpid()))
        time.sleep(600)
    """
    job = forked_pods(script=script, FLK_GRACE="0.5")
    job.start("train.py")
    rank = job.pid(0, 0)
    job.running[0].terminate()
    assert job.wait() == [ExitCode.PREEMPTED], job.log()
    assert not alive(rank)


def test_the_deadline_ends_the_job_without_a_restart(forked_pods: Callable[..., Pods]) -> None:
    # The deadline of pod 1 alone is over before it joins, so that it does not matter how long a start takes here.
    job = forked_pods(2, 1, FLK_RESTARTS="5", script="import time; time.sleep(600)")
    job.start("train.py", only=0)
    host, _, port = job.variables[pod_env.RDZV_ENDPOINT].rpartition(":")
    job.until(lambda: listens(host, int(port)), "the launcher of pod 0 serves the store")
    job.variables[pod_env.DEADLINE] = "1"
    job.start("train.py", only=1)
    assert job.wait() == [ExitCode.TIMEOUT] * 2, job.logs_of_all()
    failure = job.failure()
    assert failure.kind == "deadline"
    assert len(job.record().attempts) == 1


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_wrong_settings_are_refused_with_one_line(pods: Callable[..., Pods]) -> None:
    message = "FLK_PROCESSES=two: expected an integer"
    job = pods(FLK_PROCESSES="two")
    job.start("train.py")
    assert job.wait() == [ExitCode.USAGE], job.log()
    (line,) = job.log().splitlines()
    assert message in line
    failure = job.failure()
    assert message in failure.message
