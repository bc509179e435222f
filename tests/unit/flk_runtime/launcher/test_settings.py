"""Settings of a launcher from its environment and its command line, and the errors for wrong ones."""

from __future__ import annotations

import math

import pytest

from flk_runtime.launcher.settings import Settings, SetupError

POD = {
    "FLK_JOB": "gpt",
    "FLK_PODS": "4",
    "FLK_PROCESSES": "2",
    "FLK_POD_INDEX": "3",
    "FLK_RDZV_ENDPOINT": "gpt-worker-0:29400",
}


def test_settings_of_a_pod() -> None:
    settings = Settings.from_environment(["--", "train.py", "--lr", "1"], POD)
    assert settings.command == ("train.py", "--lr", "1")
    assert (settings.pod, settings.pods, settings.processes, settings.world_size) == (3, 4, 2, 8)
    assert (settings.rendezvous_host, settings.rendezvous_port) == ("gpt-worker-0", 29400)


@pytest.mark.parametrize(
    ("command", "trains", "makes_steps"),
    [
        (["train.py"], True, True),
        (["-m", "package.train"], True, True),
        (["-m", "flk_runtime.check"], True, False),
        (["-m", "flk_plan.bench", "{}", "train.py"], False, False),
        (["-m", "flk_diloco"], False, False),
    ],
)
def test_programs_of_flk_make_no_steps_of_training(command: list[str], trains: bool, makes_steps: bool) -> None:
    settings = Settings.from_environment(command, {})
    assert (settings.trains, settings.makes_steps) == (trains, makes_steps)


def test_without_checks_the_gpus_of_the_pod_are_known_still() -> None:
    settings = Settings.from_environment(["t.py"], POD | {"FLK_GPUS": "8", "FLK_PREFLIGHT": "off"})
    assert (settings.gpus, settings.health) == (8, False)


def test_the_deadline_counts_from_the_start_of_the_job() -> None:
    def left(**variables: str) -> float:
        return Settings.from_environment(["t.py"], POD | variables).seconds_left(1060.0)

    assert left(FLK_DEADLINE="100") == left(FLK_DEADLINE="100", FLK_STARTED="") == 100.0  # not told: from now
    assert left(FLK_DEADLINE="100", FLK_STARTED="1000") == 40.0
    assert left(FLK_DEADLINE="100", FLK_STARTED="1070") == 100.0  # clocks differ
    assert left(FLK_STARTED="1000") == math.inf


@pytest.mark.parametrize(
    ("deadline", "join", "expected"), [("60", "", 60), ("", "90", 90), ("60", "10", 10), ("0", "", 1800)]
)
def test_the_join_timeout_ends_with_the_deadline(deadline: str, join: str, expected: float) -> None:
    settings = Settings.from_environment(["t.py"], POD | {"FLK_DEADLINE": deadline, "FLK_JOIN_TIMEOUT": join})
    assert settings.join_timeout == expected


def test_the_launcher_removes_only_the_first_double_dash() -> None:
    assert Settings.from_environment(["--", "t.py", "--", "-x"], {}).command == ("t.py", "--", "-x")
    assert Settings.from_environment(["-m", "a.b", "-m"], {}).command == ("-m", "a.b", "-m")


def test_ipv6_addresses_are_in_brackets() -> None:
    settings = Settings.from_environment(["t.py"], POD | {"FLK_RDZV_ENDPOINT": "[fd00::1]:29400"})
    assert (settings.rendezvous_host, settings.rendezvous_port) == ("fd00::1", 29400)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"FLK_POD_INDEX": "4"}, ["FLK_POD_INDEX is 4", "4 pods"]),
        ({"FLK_POD_INDEX": "-1"}, ["FLK_POD_INDEX", "-1"]),
        ({"FLK_PODS": "0"}, ["FLK_PODS"]),
        ({"FLK_PODS": "1.5"}, ["FLK_PODS=1.5: expected an integer"]),
        ({"FLK_PROCESSES": "nan"}, ["FLK_PROCESSES"]),
        ({"FLK_PROCESSES": "auto"}, ["FLK_PROCESSES=auto: expected an integer"]),
        ({"FLK_RDZV_ENDPOINT": ""}, ["FLK_RDZV_ENDPOINT must be host:port"]),
        ({"FLK_RDZV_ENDPOINT": "gpt-worker-0"}, ["FLK_RDZV_ENDPOINT"]),
        ({"FLK_RDZV_ENDPOINT": "gpt-worker-0:70000"}, ["FLK_RDZV_ENDPOINT"]),
        ({"FLK_RESTARTS": "-2"}, ["FLK_RESTARTS=-2: expected an integer, 0 or more"]),
        (
            {"FLK_ON_RESTART": "--a 'b"},
            ["FLK_ON_RESTART=--a 'b: expected words as a shell reads them: no closing quotation"],
        ),
        ({"FLK_START": "forkserver"}, ["FLK_START=forkserver: expected fork or spawn"]),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], names: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        Settings.from_environment(["train.py"], POD | variables)
    for name in names:
        assert name in str(caught.value)


def test_the_variables_of_an_operator_are_refused_where_flk_has_not_made_the_job() -> None:
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
    with pytest.raises(SetupError, match="PET_NNODES here, which flk's launcher does not read"):
        Settings.from_environment(["t.py"], variables)
    settings = Settings.from_environment(["t.py"], POD | variables)  # the operator sets them in jobs of flk too
    assert (settings.pods, settings.processes) == (4, 2)


@pytest.mark.parametrize("arguments", [[], ["--"], ["-m"], ["--nproc", "2", "t.py"]])
def test_a_command_line_without_a_script_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SetupError):
        Settings.from_environment(arguments, {})
