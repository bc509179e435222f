"""Which values are secrets, and texts without them."""

from __future__ import annotations

import pytest

from flk_runtime.contract.secrets import REDACTED, hidden, hidden_in_shell_command, in_command, secrets_in

CANARY = "canary-7f3b"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WANDB_API_KEY": CANARY}, []),
        ({"MLFLOW_TRACKING_URI": f"https://me:{CANARY}@mlflow.example"}, []),
        ({}, ["train.py", "--hub-token", CANARY]),
        ({}, ["train.py", f"--api-key={CANARY}", "--lr=0.1"]),
        ({}, ["train.py", f"HF_TOKEN={CANARY}"]),
        ({}, ["train.py", "--token", f"API_TOKEN={CANARY}"]),
        ({}, ["train.py", "--token", f"--api-key={CANARY}"]),
        ({}, ["bash", "-c", f"cd /x && export HF_TOKEN={CANARY}\n./train.py"]),
        ({}, ["train.py", f"--cache=redis://:{CANARY}@cache.example"]),
        ({"FLK_SETUP": f"HF_TOKEN={CANARY} ./get.sh"}, []),
        ({"FLK_ON_RESTART": f"--resume --api-token={CANARY}"}, []),
        ({"FLK_SETUP": f"echo it's; ./get.sh --token {CANARY}"}, []),
        ({"FLK_SETUP": f"export HF_TOKEN={CANARY}; ./get.sh"}, []),
        ({"FLK_SETUP": f"API_KEY='{CANARY}'&&./get.sh"}, []),
    ],
)
def test_secrets_of_variables_and_commands(variables: dict[str, str], words: list[str]) -> None:
    assert secrets_in({"LR": "0.1", **variables}, words) == [CANARY]


def test_a_token_in_an_address_is_hidden_everywhere_and_the_name_of_a_user_in_addresses() -> None:
    token = "ghp_0123456789abcdef"
    for address in (f"https://{token}@host/x", f"https://{token}:@host/x", f"https://{token}:x-oauth-basic@host/x"):
        assert secrets_in({"FLK_PIP": f"git+{address}"}, []) == [token]
        assert hidden(address, []) == "https://***@host/x"
    assert secrets_in({"STORE": "postgresql://mlflow@host/x"}, []) == []
    assert hidden("postgresql://mlflow@host/x of mlflow", []) == "postgresql://***@host/x of mlflow"
    assert hidden("https://host/@a", []) == "https://host/@a"


def test_a_secret_of_several_lines_is_hidden_line_by_line() -> None:
    found = secrets_in({"SSH_PRIVATE_KEY": "-----BEGIN-----\nAAAAB3\nQQ\n-----END-----\n"}, [])
    assert found == ["-----BEGIN-----", "-----END-----", "AAAAB3"]


@pytest.mark.parametrize(
    "value", ["", "abc", "true", "None", "auto", "12.5", "<pad>", "</s>", "<|endoftext|>", "[CLS]"]
)
def test_values_that_stand_in_other_places_too_stay(value: str) -> None:
    assert secrets_in({"USE_AUTH": value}, ["--token", value]) == []


def test_of_words_of_a_command_the_secret_is_known() -> None:
    words = ["train.py", "--token", "API_TOKEN=abcd", "--auth", "user=me", "--password", "--lr", "0.1"]
    assert [secret for _, secret in in_command(words)] == ["", "", "abcd", "", "user=me", "", "", ""]


@pytest.mark.parametrize("piece", ["://", "://a:", "://:", "://a:b@", "a", ":", "@", "/"])
def test_passwords_in_a_hostile_text_are_hidden_in_linear_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    assert hidden(text, []).count(REDACTED) == text.count("://a:b@")
    assert hidden(text.encode(), []) == hidden(text, []).encode()


def test_the_longest_secret_is_hidden_first() -> None:
    known = secrets_in({"A_TOKEN": "four", "B_TOKEN": "four-and-more"}, [])
    assert hidden("four-and-more, four, ftp://me:pw@host", known) == "***, ***, ftp://me:***@host"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (f"export HF_TOKEN={CANARY}; ./get.sh", "***"),
        (r"TOKEN=ab\$cd ./get.sh", "***"),
        ("make data --lr=0.1", "make data --lr=0.1"),
    ],
)
def test_a_shell_command_is_shown_without_its_secrets(command: str, shown: str) -> None:
    assert hidden_in_shell_command(command) == shown
