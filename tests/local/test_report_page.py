"""The page of `flk report` in a real Chromium, with the script that draws its charts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flk.report.page import page_of
from flk.report.script import drawing_script
from scripts.documentation import browser
from tests.support.reports import largest, report

DRAWN = "[...document.querySelectorAll('.plot')].every(each => each.querySelector('svg path'))"
OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
REGIONS = "[...document.querySelectorAll('.scroll')].map(each => each.getAttribute('tabindex'))"


@pytest.mark.parametrize("names", [["gpt"], ["gpt", "other"]], ids=["one", "two"])
def test_the_page_is_small_and_its_charts_fit_a_desktop_and_a_phone_light_and_dark(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path, tmp_path: Path, names: list[str]
) -> None:
    chromium = browser.program()
    if chromium is None:
        pytest.skip("no Chromium is installed")
    pytest.importorskip("vl_convert")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    script = drawing_script()
    assert len(page_of([largest(name) for name in names], script).encode()) <= 2_000_000
    file = tmp_path / "report.html"
    file.write_text(page_of([report(name=name) for name in names], script))
    backgrounds = []
    with browser.Browser(chromium) as window:
        for size, dark in itertools.product((browser.DESKTOP, browser.PHONE), (False, True)):
            window.open(file.as_uri(), size, dark=dark)
            window.wait_for(DRAWN)
            assert window.value("document.querySelectorAll('.plot').length") == 8
            window.value(OPEN)
            # Not innerWidth: on a phone it grows with a page that is too wide.
            assert window.value("document.documentElement.scrollWidth") <= size[0], (size, dark)
            regions = window.value(REGIONS)
            assert len(regions) >= 6 * len(names)
            assert set(regions) == {"0"}
            backgrounds.append(window.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"] * 2
