"""Who owns a job: the user who submitted it, from whichever machine."""

from __future__ import annotations

import getpass

import pytest

from flk.jobs.owner import current_owner, is_user, user_name


def test_a_user_owns_the_jobs_that_it_submits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert is_user(user_name(), current_owner())
    assert is_user("ada", "ada@another-machine")
    assert not is_user("ad", "ada@lab")


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert user_name() == ""
    assert current_owner().startswith("unknown@")
