"""Unit tests mirror the packages: a folder or module that has moved or gone takes its tests along."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
PACKAGES = {"flk": ROOT / "operator_client"} | {
    path.name: ROOT / "runtime" for path in (ROOT / "runtime").glob("flk_*")
}


def test_each_folder_of_unit_tests_is_that_of_a_package() -> None:
    tests = [
        path for package in PACKAGES for path in (UNIT / package).rglob("test_*.py") if path.parent.name != "outputs"
    ]
    assert len(tests) > 100
    folders = {path.parent.relative_to(UNIT) for path in tests}
    assert [folder for folder in folders if not (PACKAGES[folder.parts[0]] / folder).is_dir()] == []


def test_each_package_has_unit_tests() -> None:
    assert [package for package in PACKAGES if not list((UNIT / package).rglob("test_*.py"))] == []
