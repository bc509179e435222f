"""The jobs that tests build share nothing: a test may change its own, whatever tests run after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.flk.cli.outputs import jobs


@pytest.mark.parametrize("which", jobs.JOBS)
def test_two_jobs_of_a_kind_share_no_object(which: str) -> None:
    jobs_of_a_kind = [jobs.JOBS[which]() for _ in range(2)]
    one, other = ([job.job, job.pods, job.events, job.replaced_pods] for job in jobs_of_a_kind)
    found = {id(each) for each in changeable(one)}
    assert len(found) > 5
    assert not [each for each in changeable(other) if id(each) in found]


def changeable(value: Any) -> Iterator[Any]:
    """The lists and dictionaries in a value."""
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from changeable(each)
