from typing import Any

import pytest

from flk.errors import UsageError
from flk.kube import check_selector

GOOD = [
    *("team=nlp", "team==nlp", "team!=nlp", "team", "!team", "! team", "team=", "a=b,c=d", " a = b , !c ", "n>3"),
    *("team in (nlp)", "team in (nlp, vision)", "team notin(a,b),x", "flk.dev/job=gpt", "in in (in)", "team in ()"),
]
BAD = [
    *("a=b=c", "a in (", "=x", "a b", "a=b,", ",", "a in nlp", "a=b c", "-a=b", "a=-b", "a>x", "a!b", "a/b/c"),
    f"a={'x' * 64}",
]


@pytest.mark.parametrize("selector", GOOD)
def test_a_selector_of_kubernetes(selector: str) -> None:
    check_selector(selector)


@pytest.mark.parametrize("selector", BAD)
def test_a_malformed_selector(selector: str) -> None:
    with pytest.raises(UsageError, match="--selector: must be labels"):
        check_selector(selector)


@pytest.mark.parametrize("command", ["list", "status", "wait", "delete", "suspend", "resume", "restart", "logs"])
def test_a_malformed_selector_is_refused_before_anything_is_asked(fake: Any, run: Any, command: str) -> None:
    code, stdout, stderr = run(command, "-l", "team=nlp=x")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: --selector: must be labels as kubectl takes them (is 'team=nlp=x')\n")
    assert fake.requests == []
