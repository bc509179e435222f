"""Which modules are imported before the ranks are forked."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.errors import SetupError
from flk_runtime.launcher.processes import preload


def test_preload_skips_modules_that_are_not_installed_except_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def import_module(name: str) -> None:
        asked.append(name)
        assert not gc.isenabled()
        if name in missing:
            raise ImportError(name)

    monkeypatch.setattr(preload.importlib, "import_module", import_module)
    missing = ["numpy"]
    preload.preload(None, tmp_path)
    assert tuple(asked) == preload.TORCH + preload.FOR_OPTIMIZERS
    missing = ["torch"]
    with pytest.raises(ImportError):
        preload.preload(None, tmp_path)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("script", "strategy", "optimizers", "sharding"),
    [
        ("import torch", "", False, False),
        ("torch.optim.SGD(…)", "ddp", True, False),
        ("init(strategy='full_shard')", "", False, True),
        ("torch.optim.SGD(…)", "hybrid_shard", True, True),
        ("import torch", "no_shard", False, False),
        ("import torch", "auto", False, True),
        ("import flk_runtime", "", False, False),
        ("from flk_hosts.accelerate import adopt", "", False, False),
    ],
)
def test_preload_imports_what_the_script_and_the_strategy_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, strategy: str, optimizers: bool, sharding: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(preload.importlib, "import_module", asked.append)
    path = tmp_path / "train.py"
    path.write_text(script)
    preload.preload(path, tmp_path, strategy=strategy)
    assert set(preload.TORCH) <= set(asked)
    assert (set(preload.FOR_OPTIMIZERS) <= set(asked)) == optimizers
    assert (set(preload.FOR_SHARDING) <= set(asked)) == sharding
    assert (set(preload.FOR_LIBRARY) <= set(asked)) == ("flk_" in script)


def test_preload_imports_torch_alone_for_ranks_that_make_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(preload.importlib, "import_module", asked.append)
    preload.preload(None, tmp_path, strategy="full_shard", makes_steps=False)
    assert tuple(asked) == preload.TORCH


HEAVY = "from transformers import Trainer"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (HEAVY, ["transformers.Trainer"]),
        (
            f'"""A script."""\nfrom __future__ import annotations\nimport os, torch\n{HEAVY}\nimport timm.data as d',
            ["torch", "transformers.Trainer", "timm.data"],
        ),
        ("import yaml\nimport unknown", []),
        (f"import os\nos.environ['HF_HOME'] = '/data'\n{HEAVY}", []),  # what it reads is set before
        (f"try:\n    {HEAVY}\nexcept ImportError:\n    pass", []),
        (f"def main():\n    {HEAVY}\nimport timm", []),
        (f"import timm\nimport model\n{HEAVY}", ["timm"]),  # the user's own may set variables, too
        (f"from . import model\n{HEAVY}", []),
        (f"import datasets\n{HEAVY}", []),  # the folder beside the script, and not the package
        (f"import numpy\n{HEAVY}", ["numpy", "transformers.Trainer"]),  # the package, and not a folder of data
        (f"import numpy\nimport parts.model\n{HEAVY}", ["numpy"]),
        ("import timm(", []),
        (f"import timm\nimport unsloth\n{HEAVY}", ["timm"]),  # it has to be imported before transformers
    ],
)
def test_packages_that_the_script_imports_at_its_top_are_imported(
    tmp_path: Path, script: str, expected: list[str]
) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    for folder in ("numpy", "parts"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "train.py"
    path.write_text(script)
    imports = list(preload.leading_imports(path, tmp_path, tmp_path))
    assert [".".join((module, *names)) for module, names in imports] == expected


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("src", ["torch"]), (".venv/lib/python3.12/site-packages", ["torch", "datasets", "timm"])],
)
def test_a_package_of_the_work_folder_is_left_to_the_ranks_unless_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, expected: list[str]
) -> None:
    (tmp_path / folder / "datasets").mkdir(parents=True)
    (tmp_path / folder / "datasets" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / folder))  # as with PYTHONPATH=src
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text("import os\nimport torch\nimport datasets\nimport timm\n")
    assert [module for module, _ in preload.leading_imports(path, path.parent, tmp_path)] == expected


def test_python_in_the_work_folder_is_not_the_users_code(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import json, xml.dom\nimport torch\n")
    assert list(preload.leading_imports(path, tmp_path, Path("/"))) == [("torch", [])]


def test_a_name_that_a_package_imports_when_it_is_taken_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "timm").mkdir(parents=True)
    (site / "timm" / "__init__.py").write_text(
        "def __getattr__(name):\n    import timm.heavy\n    return timm.heavy if name == 'Trainer' else exit(name)\n"
    )
    (site / "timm" / "heavy.py").touch()
    monkeypatch.syspath_prepend(str(site))
    path = tmp_path / "train.py"
    path.write_text("import missing\nfrom timm import Trainer\nfrom timm import broken\n")
    preload.preload(path, tmp_path / "work")
    assert sys.modules.pop("timm.heavy")
    del sys.modules["timm"]


def test_a_job_names_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named", "named.part", "timm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    site = tmp_path / "site"
    (site / "named").mkdir(parents=True)
    for file in ("named/__init__.py", "named/part.py", "timm.py"):
        (site / file).touch()
    monkeypatch.syspath_prepend(str(site))
    path = tmp_path / "train.py"
    path.write_text("import timm\n")
    preload.preload(path, tmp_path, ["named.part"])
    assert sys.modules.pop("named.part")
    assert sys.modules.pop("named")
    assert "timm" not in sys.modules


def test_a_name_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    with pytest.raises(SetupError, match=r"FLK_PRELOAD names nosuch, which .* cannot import: ModuleNotFoundError"):
        preload.preload(path, tmp_path, ["nosuch"])
    (tmp_path / "model.py").touch()
    with pytest.raises(SetupError, match=r"FLK_PRELOAD names model.part, which is in the script's folder"):
        preload.preload(path, tmp_path, ["model.part"])


def test_a_rank_has_its_own_values_of_what_was_imported_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning, torchmetrics, generator = SimpleNamespace(rank=0), SimpleNamespace(rank=0), random.Random(0)
    before = generator.getstate()
    for name, module in {
        "lightning_utilities.core.rank_zero": SimpleNamespace(rank_zero_only=lightning),
        "torchmetrics.utilities.prints": SimpleNamespace(rank_zero_only=torchmetrics),
        "datasets.fingerprint": SimpleNamespace(fingerprint_rng=generator),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    preload.become_own()
    assert (lightning.rank, torchmetrics.rank) == (3, 1)
    assert generator.getstate() != before


def test_what_cannot_be_set_again_after_the_fork_is_told_and_ends_no_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another release of a package may keep it elsewhere."""
    generator = random.Random(0)
    before = generator.getstate()
    monkeypatch.setitem(sys.modules, "datasets.fingerprint", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", SimpleNamespace(default_rng=generator))
    preload.become_own()
    assert generator.getstate() != before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("flk: what datasets.fingerprint took for its process could not be set again")


def test_what_a_module_of_a_package_imports_at_its_top_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``-m torchtitan.train``. The user's package, or a checkout in the work folder, is left to ranks."""
    site, work, checkout = tmp_path / "site", tmp_path / "work", tmp_path / "checkout"
    asked: list[str] = []
    for package in (site / "torchtitan", site / "mine", checkout / "torchtitan"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "train.py").write_text("import torch\nfrom torchtitan import trainer\n")
    (site / "torchtitan" / "trainer.py").touch()
    monkeypatch.syspath_prepend(str(site))
    try:
        assert preload.module_file("mine.train", work) is None
        assert preload.module_file("torchtitan.missing.train", work) is None
        file = preload.module_file("torchtitan.train", work)
        monkeypatch.setattr(preload.importlib, "import_module", asked.append)
        preload.preload(None, work, module=file)
        assert asked == [*preload.TORCH, *preload.FOR_OPTIMIZERS]
        assert "torchtitan.trainer" in sys.modules
        assert not {"mine", "torchtitan.train"} & set(sys.modules)  # runpy warns of a module that is there
        assert preload.module_file("torchtitan.train", checkout) is None
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]


def test_a_module_that_is_a_package_runs_its_main_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, text in {"timm": "", "datasets": "raise SystemExit(3)"}.items():
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").write_text(text)
        (tmp_path / "site" / package / "__main__.py").touch()
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert preload.module_file("timm", tmp_path / "work") == tmp_path / "site" / "timm" / "__main__.py"
    assert preload.module_file("datasets", tmp_path / "work") is None  # each rank ends as it says
    del sys.modules["timm"]


def test_a_module_finds_packages_in_the_folder_of_its_ranks_and_not_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flk_hosts.accelerate_launch, which has flk_hosts/accelerate.py beside it."""
    asked: list[str] = []
    monkeypatch.delitem(sys.modules, "flk_hosts.accelerate_launch", raising=False)  # else runpy warns
    file = preload.module_file("flk_hosts.accelerate_launch", tmp_path)
    assert file
    assert ("accelerate.commands", ["launch"]) in list(preload.leading_imports(file, tmp_path, tmp_path))
    monkeypatch.setattr(preload, "leading_imports", lambda *_: [])
    monkeypatch.setattr(preload.importlib, "import_module", asked.append)
    preload.preload(None, tmp_path, module=file)
    assert asked == [*preload.TORCH, *preload.FOR_OPTIMIZERS, *preload.FOR_LIBRARY]
