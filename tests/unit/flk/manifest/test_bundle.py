"""Which files travel: what a user expects, never a secret unasked, and the same bytes for the same files."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.errors import UsageError
from flk.manifest.bundle import SIZE_LIMIT, Bundle, make_bundle
from flk.manifest.pod import pod_template
from flk.manifest.render import CHUNK, render
from flk.spec.job import Job, validated
from flk_runtime.contract import pod_layout

Write = Callable[..., None]
Render = Callable[..., tuple[int, str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*names: str, content: str = "") -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    return git


def job(command: str = "train.py", **fields: Any) -> Job:
    return validated({"command": command, "name": "j"} | fields)


def error_of(a_job: Job, root: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        make_bundle(a_job, root)
    return caught.value


def test_outside_git_all_files_travel_but_hidden_ones_and_what_tools_put_there(tmp_path: Path, write: Write) -> None:
    write("train.py", "package/model.py", "config.json", "data/words.txt")
    write(".hidden/x.py", ".cache", "__pycache__/a.pyc", "node_modules/a.js", "env/pyvenv.cfg", "env/lib/a.py", "a.pyc")
    assert make_bundle(job(), tmp_path).files == ("config.json", "data/words.txt", "package/model.py", "train.py")


def test_what_flk_has_written_beside_the_code_does_not_change_the_next_job(tmp_path: Path, write: Write) -> None:
    write("train.py", "data.json.gz", "page.html")
    before = make_bundle(job(), tmp_path)
    own = ["gpt-rank0.pt.trace.json.gz", "gpt-rank12.pt.trace.json.gz", "gpt.report.html"]
    write(*own)
    bundle = make_bundle(job(), tmp_path)
    said = f"what flk report and flk profile write: {', '.join(own)} (--ship PATTERN adds it)"
    assert bundle == replace(before, left_out=(said,))
    assert {*own} <= {*make_bundle(job(ship=["gpt*"]), tmp_path).files}


def test_in_git_tracked_files_travel_as_they_are_and_new_python_files(tmp_path: Path, write: Write, git: Any) -> None:
    write("train.py", "config.json", "deleted.py", "package/model.py")
    write(".gitignore", content="ignored*\n")
    git("init", "-q")
    git("add", "-A")
    (tmp_path / "deleted.py").unlink()
    write("config.json", content="changed")
    write("new.py", "new.json", "flk.yaml", "ignored.py", "venv/pyvenv.cfg", "venv/lib/a.py")
    bundle = make_bundle(job(), tmp_path)
    assert bundle.files == (".gitignore", "config.json", "new.py", "package/model.py", "train.py")
    assert bundle.left_out == (
        "untracked files that are not Python: new.json (--ship PATTERN adds them)",
        "Python files that git ignores: ignored.py (--ship PATTERN adds them)",
    )
    assert contents(bundle)["config.json"] == b"changed"


def test_a_package_that_git_does_not_list_is_said(tmp_path: Path, write: Write, git: Any) -> None:
    write(
        "train.py", "src/__init__.py", "src/data/__init__.py", "src/data/load.py", "build/lib/a.py", "venv/pyvenv.cfg"
    )
    write("venv/a.py", "nested/a.py", "src/data/big.bin", ".tool/a.py")
    write(".gitignore", content="data/\nbuild/\nvenv/\n.tool/\n")
    for repository in ("nested", ".hidden"):
        git("init", "-q", repository)
    git("init", "-q")
    git("add", "train.py", "src", ".gitignore")
    ignored, nested = make_bundle(job(), tmp_path).left_out
    assert ignored == (
        "Python files that git ignores: src/data/__init__.py, src/data/load.py (--ship PATTERN adds them)"
    )
    assert nested == "repositories that are no submodules: nested (--ship NAME adds their files)"
    assert make_bundle(job(ship=["src/data", "nested"]), tmp_path).left_out == ()


def test_a_folder_that_its_checkout_ignores_is_no_part_of_it(tmp_path: Path, write: Write, git: Any) -> None:
    write("out/train.py", "out/a.txt")
    write(".gitignore", content="out\n")
    git("init", "-q")
    assert make_bundle(job(), tmp_path / "out").files == ("a.txt", "train.py")


@pytest.mark.parametrize("in_git", [False, True])
def test_what_flkignore_excludes_does_not_travel(tmp_path: Path, write: Write, git: Any, in_git: bool) -> None:
    write(
        ":(odd) [name].txt",
        "train.py",
        "data/a.txt",
        "data/sub/b.txt",
        "notes.md",
        "docs/data/keep.txt",
        "old.py",
        "keep/old.py",
    )
    write(".gitignore", content="train.py\n")  # git's own patterns are no business of .flkignore
    write(".flkignore", content="# comment\n/data/\n*.md\nold.py\n!keep/old.py\n")
    if in_git:
        git("init", "-q")
        git("add", "-f", ".")
    bundle = make_bundle(job(ship=["notes.md"]), tmp_path)
    assert {file for file in bundle.files if not file.startswith(".")} == {
        *("train.py", "docs/data/keep.txt", "keep/old.py", "notes.md", ":(odd) [name].txt")
    }
    assert bundle.left_out == ()


def test_flkignore_without_git_is_refused(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("train.py", ".flkignore")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ".flkignore needs git" in str(error_of(job(), tmp_path))


@pytest.mark.parametrize("in_git", [False, True])
def test_nothing_walks_the_home_folder(
    tmp_path: Path, write: Write, git: Any, monkeypatch: pytest.MonkeyPatch, in_git: bool
) -> None:
    write("train.py", "helper.py", "notes.txt", "Documents/a.py", "code/model.py")
    if in_git:  # as people keep their settings
        git("init", "-q")
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    for home in (tmp_path, tmp_path / "Documents", link):
        monkeypatch.setenv("HOME", str(home))
        bundle = make_bundle(job(ship=["code"]), tmp_path)
        assert bundle.files == ("code/model.py", "helper.py", "train.py")
        assert "--ship NAME adds" in bundle.left_out[0]


def test_a_user_without_a_home_ships_the_whole_folder(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an arbitrary number in a container."""
    write("train.py", "code/model.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert make_bundle(job(), tmp_path).files == ("code/model.py", "train.py")


def test_too_many_files_are_not_looked_at(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flk.manifest.files.WALK_LIMIT", 3)
    write("train.py", "a", "b")
    assert len(make_bundle(job(), tmp_path).files) == 3
    write("c")
    assert "more than 3 files" in str(error_of(job(), tmp_path))


def test_patterns_add_files(tmp_path: Path, write: Write, git: Any) -> None:
    write("train.py")
    git("init", "-q")
    git("add", "-A")
    write("data/a.json", "data/b.txt", "data/deep/c.json", "other.json", "a[1].txt")
    added = {
        "data/*.json": ["data/a.json"],
        "data/**/*.json": ["data/a.json", "data/deep/c.json"],
        "data/": ["data/a.json", "data/b.txt", "data/deep/c.json"],
        "a[1].txt": ["a[1].txt"],
        "./": ["a[1].txt", "data/a.json", "data/b.txt", "data/deep/c.json", "other.json"],
    }
    for pattern, files in added.items():
        assert make_bundle(job(ship=[pattern]), tmp_path).files == (*files, "train.py")


@pytest.mark.parametrize("pattern", ["", "/etc/passwd", "../x", "nothing*", "a/../../b", "broken"])
def test_a_pattern_that_is_none_or_names_nothing_is_refused(tmp_path: Path, write: Write, pattern: str) -> None:
    write("train.py")
    (tmp_path / "broken").symlink_to("nowhere")
    assert str(error_of(job(ship=[pattern]), tmp_path)).startswith("ship: ")


def test_secrets_travel_only_when_listed_by_name(tmp_path: Path, write: Write, git: Any) -> None:
    write("train.py", ".env", "server.pem", "keys/id_rsa", "keys/note.txt")
    bundle = make_bundle(job(), tmp_path)
    assert bundle.files == ("keys/note.txt", "train.py")
    said = "files that look like secrets: .env, keys/id_rsa, server.pem (--ship with the whole name adds them)"
    assert bundle.left_out == (said,)
    assert make_bundle(job(ship=["*", "keys"]), tmp_path).files == ("keys/note.txt", "train.py")
    assert make_bundle(job(ship=[".env"]), tmp_path).files == (".env", "keys/note.txt", "train.py")
    git("init", "-q")
    git("add", "-A")
    assert make_bundle(job(), tmp_path).files == ("keys/note.txt", "train.py")


def test_equal_files_make_equal_archives(tmp_path: Path, write: Write) -> None:
    write("train.py", "b.py", content="print(1)\n")
    first = make_bundle(job(), tmp_path)
    os.utime(tmp_path / "train.py", (1, 1))
    (tmp_path / "train.py").chmod(0o600)
    second = make_bundle(job(), tmp_path)
    assert (first.sha256, first.code, first.runtime) == (second.sha256, second.code, second.runtime)
    write("b.py", content="print(2)\n")
    assert make_bundle(job(), tmp_path).sha256 != first.sha256


def test_the_archive_holds_the_files(tmp_path: Path, write: Write) -> None:
    write("train.py", content="print(1)\n")
    write("ä b/ü.txt", content="ö")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    bundle = make_bundle(job(), tmp_path)
    assert contents(bundle) == {
        "run.sh": b"#!/bin/sh\n",
        "train.py": b"print(1)\n",
        "ä b/ü.txt": "ö".encode(),
    }
    with tarfile.open(fileobj=io.BytesIO(bundle.code or b"")) as archive:
        assert [oct(member.mode) for member in archive] == ["0o755", "0o644", "0o644"]


def test_a_link_to_a_file_that_travels_stays_a_link(tmp_path: Path, write: Write) -> None:
    write("recipes/train.py", "recipes/helper.py", "elsewhere/kept.txt")
    write(".flkignore", content="elsewhere\n")
    (tmp_path / "train.py").symlink_to("recipes/train.py")
    (tmp_path / "recipes" / "above.py").symlink_to("../train.py")
    (tmp_path / "kept.txt").symlink_to("elsewhere/kept.txt")
    with tarfile.open(fileobj=io.BytesIO(make_bundle(job(), tmp_path).code or b"")) as archive:
        assert {member.name: member.linkname for member in archive} == {
            "kept.txt": "",  # its target does not travel
            "recipes/above.py": "train.py",
            "recipes/helper.py": "",
            "recipes/train.py": "",
            "train.py": "recipes/train.py",
        }


@pytest.mark.parametrize("in_git", [False, True])
def test_links_to_folders_are_left_out_and_said(tmp_path: Path, write: Write, git: Any, in_git: bool) -> None:
    write("train.py", "real/a.py")
    (tmp_path / "link").symlink_to("real")
    if in_git:
        git("init", "-q")
        git("add", "-A")
    bundle = make_bundle(job(), tmp_path)
    assert bundle.files == ("real/a.py", "train.py")
    assert bundle.left_out == ("links to folders: link (--ship NAME adds their files)",)
    assert make_bundle(job(ship=["link"]), tmp_path).files == ("link/a.py", "real/a.py", "train.py")


def test_links_that_lead_in_a_circle_are_no_files(tmp_path: Path, write: Write) -> None:
    write("train.py")
    for name in ("loop", "loop.py"):
        (tmp_path / name).symlink_to(name)
    assert make_bundle(job(), tmp_path).files == ("train.py",)
    assert "there is no script loop/train.py" in str(error_of(job("loop/train.py"), tmp_path))


@pytest.mark.parametrize("in_git", [False, True])
def test_links_to_files_elsewhere_travel_only_when_listed_by_name(
    tmp_path: Path, write: Write, git: Any, in_git: bool
) -> None:
    write("elsewhere.txt", "folder/train.py", "folder/inside.txt")
    root = tmp_path / "folder"
    (root / "outside.txt").symlink_to("../elsewhere.txt")
    (root / "alias.txt").symlink_to("inside.txt")
    if in_git:
        git("init", "-q")
        git("add", "-A")
    bundle = make_bundle(job(), root)
    assert bundle.files == ("alias.txt", "inside.txt", "train.py")
    assert bundle.left_out == (f"links to files outside of {root}: outside.txt (--ship with the whole name adds them)",)
    assert "outside.txt" not in make_bundle(job(ship=["*.txt"]), root).files
    assert "outside.txt" in make_bundle(job(ship=["outside.txt"]), root).files


@pytest.fixture
def lock(tmp_path: Path, write: Write) -> Iterator[Callable[[int], Render]]:
    """Sets the mode of the folders `locked` and `data/locked`, and returns `flk render` without root's rights."""
    rights = "--bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search"
    unprivileged = ["setpriv", *rights.split()] if os.geteuid() == 0 else []
    write("train.py", "locked/a.txt", "data/locked/a.txt", "data/b.txt")
    folders = [tmp_path / "locked", tmp_path / "data" / "locked"]

    def render(*words: str) -> tuple[int, str]:
        command = [*unprivileged, sys.executable, "-m", "flk", "render", "--no-runtime", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr

    def lock(mode: int) -> Render:
        for folder in folders:
            folder.chmod(mode)
        return render

    yield lock
    lock(0o755)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_folders_that_the_user_may_not_read_are_left_out_and_said(
    tmp_path: Path, lock: Callable[[int], Render], mode: int
) -> None:
    render = lock(mode)
    said = "flk: not shipped: folders that cannot be read: data/locked, locked\n"
    assert render("train.py") == (0, said)
    assert render("train.py", "--ship", "data") == (0, said)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_file_of_the_job_that_the_user_may_not_read_is_told_in_a_line(
    tmp_path: Path, git: Any, lock: Callable[[int], Render], mode: int
) -> None:
    refused = (2, f"error: cannot read {tmp_path}/locked/a.txt: permission denied\n")
    assert lock(mode)("locked/a.txt") == refused
    lock(0o755)
    git("init", "-q")
    git("add", "train.py", "locked")
    assert lock(mode)("train.py") == refused


def test_a_link_to_a_secret_is_a_secret(tmp_path: Path, write: Write) -> None:
    write("train.py", ".env")
    (tmp_path / "settings.txt").symlink_to(".env")
    bundle = make_bundle(job(), tmp_path)
    assert bundle.files == ("train.py",)
    assert bundle.left_out == (
        "files that look like secrets: .env, settings.txt (--ship with the whole name adds them)",
    )


def test_nothing_travels_where_the_code_is_in_the_image(tmp_path: Path) -> None:
    assert make_bundle(job("/opt/train.py", ship=False), tmp_path) == Bundle()


def test_the_runtime_alone_travels_to_an_image_that_has_only_the_code(tmp_path: Path) -> None:
    in_image = job("/opt/train.py", ship="runtime")
    bundle = make_bundle(in_image, tmp_path)
    assert (*bundle.archives,) == ("runtime",)
    (container,) = pod_template(in_image, bundle, ["j-runtime-0"])["spec"]["containers"]
    archive = f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"
    assert container["command"][-3:] == [archive, "--", "/opt/train.py"]


def test_scripts_that_cannot_travel(tmp_path: Path, write: Write) -> None:
    write("part/train.py", "other.py")
    assert str(error_of(job(), tmp_path)) == f"there is no script train.py in {tmp_path}"
    assert str(error_of(job("part"), tmp_path)) == "part is a folder, not a script"
    write("large.yaml", "train.sh", "train.pyc", "train.ipynb")
    assert str(error_of(job("large.yaml"), tmp_path)) == "large.yaml is a YAML file, not a Python script"
    assert error_of(job("large.yaml"), tmp_path).hint == "a job file follows -f: -f large.yaml"
    assert str(error_of(job("train.sh"), tmp_path)) == "train.sh is a shell script, not a Python script"
    assert str(error_of(job("train.pyc"), tmp_path)).startswith("train.pyc is bytecode of one version of Python, not")
    assert str(error_of(job("train.ipynb"), tmp_path)) == "train.ipynb is a notebook, not a Python script"
    assert error_of(job("train.ipynb"), tmp_path).hint.endswith("jupyter nbconvert --to script train.ipynb")
    outside = error_of(job("../other.py"), tmp_path / "part")
    assert str(outside) == f"the script ../other.py is outside of {tmp_path / 'part'}, whose code is shipped"
    assert outside.hint == f"run flk in the script's folder: cd {tmp_path}"


def test_modules(tmp_path: Path, write: Write) -> None:
    write("package/__init__.py", "package/train.py", "package/sub/__main__.py", "package/data/x.txt", "single.py")
    for module in ("package.train", "package.sub", "single", "elsewhere.train", "flk_runtime.check"):
        bundle = make_bundle(job(f"-m {module}"), tmp_path)
        assert bundle.script is None
        assert bool(bundle.left_out) is (module == "elsewhere.train")
    assert str(error_of(job("-m package.trian"), tmp_path)).startswith("there is no module package.trian in ")
    assert "has no __main__.py" in str(error_of(job("-m package.data"), tmp_path))


def test_code_that_is_too_large_names_the_largest_files(tmp_path: Path, write: Write) -> None:
    write("train.py")
    (tmp_path / "weights.bin").write_bytes(os.urandom(SIZE_LIMIT))
    (tmp_path / "small.bin").write_bytes(os.urandom(2**20))
    error = error_of(job(), tmp_path)
    assert str(error).startswith("the code is too large to ship: 9 MiB compressed, the limit is 8 MiB")
    assert error.hint.startswith("largest: weights.bin (8 MiB), small.bin (1 MiB), train.py (")
    os.truncate(tmp_path / "weights.bin", 200 * 2**20)
    assert str(error_of(job(), tmp_path)).startswith("the code is too large to ship: 201 MiB, the limit")


def test_code_is_cut_into_config_maps(tmp_path: Path, write: Write) -> None:
    write("train.py")
    (tmp_path / "data.bin").write_bytes(os.urandom(2 * CHUNK))
    bundle = make_bundle(job(), tmp_path)
    configs = render(job(), bundle)[1:]
    assert [config["metadata"]["name"] for config in configs] == ["j-runtime-0", "j-code-0", "j-code-1", "j-code-2"]
    import base64

    pieces = {}
    for config in configs:
        data = {key: base64.b64decode(value) for key, value in config["binaryData"].items()}
        assert sum(map(len, data.values())) <= CHUNK
        pieces |= data
    assert pieces.pop(pod_layout.RUNTIME_ARCHIVE) == bundle.runtime
    assert sorted(pieces) == [f"{pod_layout.CODE_ARCHIVE}.{number:03}" for number in range(3)]
    assert b"".join(pieces[key] for key in sorted(pieces)) == bundle.code


def contents(bundle: Bundle) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(bundle.code or b"")) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
