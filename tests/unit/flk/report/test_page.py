"""The page of a report: numbers, charts and the script that draws them."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk.report.model import Excerpt, Report
from flk.report.page import drawing_script, facts_of, page_of
from flk_runtime.contract.record import Goodput
from tests.support.jobs import NOW, JobBuilder
from tests.support.reports import largest, report, telemetry

SCRIPT = "window.drawn = 1;"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.headings: list[int] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script" and dict(attrs).get("type") != "application/json"
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def evil() -> Report:
    """A report whose text from elsewhere wants to be markup."""
    made = report()
    assert made.telemetry
    return replace(
        made,
        excerpts=[Excerpt(EVIL, [EVIL])],
        state=replace(made.state, name=EVIL, image=EVIL, message=EVIL),
        submitted=replace(made.submitted, command=EVIL, file=EVIL, variables={EVIL: EVIL}),
        telemetry=replace(made.telemetry, settings={EVIL: EVIL}),
    )


def test_text_from_elsewhere_is_never_markup() -> None:
    page, same = Page(page_of(evil(), SCRIPT)), Page(page_of(report(), SCRIPT))
    assert page.scripts == same.scripts  # and no other
    assert page.of("img") == []
    assert [tag for tag, _ in page.elements if tag == "script"] == [tag for tag, _ in same.elements if tag == "script"]


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else() -> None:
    page = Page(page_of(report(), SCRIPT))
    policy = next(str(each["content"]) for each in page.of("meta") if each.get("http-equiv"))
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in page.scripts}
    assert len(page.scripts) == 2
    assert set(re.findall(r"'sha256-[^']+'", policy)) == hashes
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-eval" not in policy
    assert "connect-src" not in policy


def test_every_section_of_a_full_report_has_data() -> None:
    html = page_of(report(), SCRIPT)
    assert "No data" not in html
    for text in (
        "expected 512 features, got 511",
        "attempt 2",
        "71 GiB of 96 GiB (74%)",
        "changes that were not",
        "76%",
    ):
        assert text in html


def test_a_section_without_data_says_why() -> None:
    untold = "its launchers keep no measurements"
    html = page_of(report(telemetry=None, missing={"ranks": untold}), SCRIPT)
    assert f"No data: {untold}." in html


@pytest.mark.parametrize("name", ["gpt", "chart-data"])  # the second is an ID of the page
def test_headings_go_down_one_level_at_a_time_and_regions_have_names(name: str) -> None:
    page = Page(html := page_of(report(name=name), SCRIPT))
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(below - above <= 1 for above, below in zip(page.headings, page.headings[1:], strict=False))
    assert all(each.get("aria-label") for _, each in page.elements if each.get("role") in ("group", "img"))
    ids = [each["id"] for _, each in page.elements if "id" in each]
    assert len(ids) == len(set(ids))
    labels = [str(each["aria-labelledby"]) for each in page.of("section")]
    assert {word for label in labels for word in label.split()} <= set(ids)
    names = [tuple(re.findall(rf'id="{word}"[^>]*>([^<]*)', html)[0] for word in label.split()) for label in labels]
    assert len(set(names)) == len(names)  # so that landmarks are told apart


def test_without_a_script_the_page_has_the_numbers_in_open_tables() -> None:
    page = Page(page_of(report(), None))
    assert page.scripts == []
    assert not [each for _, each in page.elements if "data-chart" in each]
    assert sum("open" in each for each in page.of("details")) == 2


def test_the_page_of_a_thousand_pods_is_bounded() -> None:
    small, large = (len(page_of(report(pods), None)) for pods in (256, 1000))
    assert large < small * 1.05 + 1000
    assert large < 400_000
    assert len(page_of(largest(), SCRIPT)) < 1_090_000  # beside the script that draws, of 0.85 MB


def test_the_numbers_of_a_job() -> None:
    facts = facts_of(report())
    assert facts["Size"] == "4 pods × 8 ranks"
    assert facts["Steps"] == "1,990 of 20,000"
    assert facts["Goodput"] == "76%"
    assert facts["Restarts"] == "1 of 3"
    assert facts["Newest checkpoint"] == "step 1,980"
    assert facts["Throughput"].endswith(" tokens/s")


def test_steps_of_a_failed_job_are_those_that_it_did_though_none_was_stored() -> None:
    made = report()
    none = Goodput(NOW, {"lost": 6900.0}, 0, 0)
    assert facts_of(replace(made, state=replace(made.state, goodput=none)))["Steps"] == "1,990 of 20,000"


def test_what_is_not_known_is_empty() -> None:
    facts = facts_of(report(telemetry=None, state=JobBuilder().state()))
    assert {name for name, value in facts.items() if value} == {"Size"}


def test_a_loss_that_is_no_number_is_said() -> None:
    found = report(telemetry=replace(telemetry(), diverged=1200))
    assert facts_of(found)["Last loss"] == "infinite or no number since step 1,200"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The calls of a package that stands in for vl-convert, which takes seconds."""
    calls: list[str] = []

    def bundle(snippet: str) -> str:
        calls.append(snippet)
        return 'x = "</script>"'

    package = SimpleNamespace(javascript_bundle=bundle)
    monkeypatch.setattr("importlib.metadata.version", {"vl-convert-python": "1.9"}.__getitem__)
    monkeypatch.setitem(sys.modules, "vl_convert", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_it_is_made_once_and_ends_no_element(made: list[str]) -> None:
    first, second = drawing_script(), drawing_script()
    assert first == second == 'x = "<\\/script>"'
    assert made == ["window.vegaEmbed = vegaEmbed;"]


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert drawing_script() is None
