"""What a script imports first, and what of it a fork may have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.launcher import imports

HEAVY = "from heavy import a"
IS_MAIN = "if __name__ == '__main__':"
MAIN = f'def main():\n    """The training."""\n    {HEAVY}\n    run()\n    import deep\n'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages on the path of modules: ``heavy``, and ``deep`` with modules."""
    folder = tmp_path / "site-packages"
    (folder / "deep").mkdir(parents=True)
    (folder / "heavy.py").touch()
    (folder / "deep" / "__init__.py").touch()
    (folder / "deep" / "train.py").write_text("import heavy\nfrom . import part\nfrom .part import one\nprint()\n")
    (folder / "deep" / "__main__.py").write_text("from deep.train import heavy\nheavy\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import heavy\n", ["import heavy"]),
        (
            '"""A script."""\nfrom __future__ import annotations\nimport os\nfrom heavy import a\nrun()\nimport deep',
            ["import os", "from heavy import a"],
        ),
        ("import os\nos.environ['A'] = 'b'\nimport heavy", ["import os", "os.environ['A'] = 'b'", "import heavy"]),
        ("os.environ.setdefault('A', 'b')\nimport heavy", ["os.environ.setdefault('A', 'b')", "import heavy"]),
        ("os.environ['A'] = str(1)\nimport heavy", []),
        ("a = 1\nimport heavy", []),
        ("import model\nimport heavy", []),  # the user's own may do anything
        ("import heavy\nimport model\nimport deep", ["import heavy"]),
        ("import missing\nimport heavy", []),
        ("import os, json\nimport flk_runtime as flk", []),  # imported already, or Python's own
        ("import heavy(", []),
        ('"""A text with \\d."""\nimport heavy', ["import heavy"]),  # of which Python would warn
        (
            f"{MAIN}import os\nif __name__ == '__main__':\n    import deep\n    main(1, os.sep)",
            ["import os", "import deep", HEAVY],
        ),
        (f"class A: pass\n{MAIN}import sys\nsys.exit(main())", ["import sys", HEAVY]),
        (f"{MAIN}main()\nimport deep", [HEAVY]),  # what follows in the function is unknown
        (f"{MAIN}main(parse())", []),
        (f"@record\n{MAIN}main()", []),
        (f"{MAIN}if True:\n    main()", []),
        ("def main():\n    main()\nmain()\nimport heavy", []),
    ],
)
def test_the_first_statements_that_only_import_installed_packages(
    installed: Path, tmp_path: Path, script: str, expected: list[str]
) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "model.py").touch()
    assert imports.leading(["train.py", "--lr", "1"], tmp_path) == expected


def test_a_module_beside_the_script_is_the_users_whatever_its_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "heavy.py").touch()
    (tmp_path / "train.py").write_text("import heavy")
    assert imports.leading(["train.py"], tmp_path) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deep.train", ["import deep", "import heavy", "from . import part", "from .part import one"]),
        ("deep", ["import deep", "from deep.train import heavy"]),
        ("own.train", []),
        ("train", ["import heavy"]),
        ("missing", []),
    ],
)
def test_a_module_that_is_run(installed: Path, tmp_path: Path, name: str, expected: list[str]) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("import heavy")
    (tmp_path / "train.py").write_text("import heavy")
    assert imports.leading(["-m", name], tmp_path) == expected


# Modules, and why a fork must not have imported them.
UNSAFE = {
    "reads": ("import os\nos.environ.get('RANK')", "reads RANK, which differs between ranks or attempts"),
    "opens": ("import socket\ns = socket.socket()", "opens socket:"),
    "handles": ("import signal\nsignal.signal(signal.SIGUSR2, print)", "handles signals"),
    "shadowed": ("import beside", "imports beside of the script's folder"),
    "fails": ("raise ValueError('no')", "raises ValueError: no"),
    "leaves": ("import builtins\nbuiltins.THREADS = 'has threads'", "has threads"),
    "starts": ("import subprocess\nchild = subprocess.Popen(['sleep', '0'])", "starts a process"),
}
SAFE = "import os, sys\nassert os.environ['SAME'] == '1' and 'OTHER' not in os.environ\nassert sys.argv[1:] == ['x']\n"


def test_a_statement_is_executed_where_a_fork_may_have_what_it_leaves(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "safe.py").write_text(SAFE)
    (tmp_path / "beside.py").touch()
    for name, (source, _) in UNSAFE.items():
        (site / f"{name}.py").write_text(source)
    (tmp_path / "look.py").write_text(
        "import builtins, json, os, sys\n"
        "from flk_runtime.launcher import imports\n"
        "folder, *names = sys.argv[1:]\n"
        "def tried(name):\n"
        "    statements, of_rank = ['import safe', f'import {name}', 'import safe'], {'RANK': '1', 'SAME': '1'}\n"
        "    unsafe = lambda: vars(builtins).pop('THREADS', None)\n"
        "    return imports.execute(statements, ['train.py', 'x'], folder, of_rank, unsafe)\n"
        "print(json.dumps({name: tried(name) for name in ['safe', *names]}))\n"
    )
    done = subprocess.run(
        [sys.executable, "look.py", str(tmp_path), *UNSAFE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "SAME": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.pop("safe") == [3, ""]
    assert {name: count for name, (count, _) in found.items()} == dict.fromkeys(UNSAFE, 1)
    for name, (_, why) in UNSAFE.items():
        assert f"`import {name}`" in found[name][1]
        assert why in found[name][1]
