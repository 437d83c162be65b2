"""The command recorded in artifacts, without secrets."""

from pathlib import Path

import pytest
from draftsmith.recipes.session.typed import typed_command

MODULE = str(Path(__file__).resolve().parents[3] / "__main__.py")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["/usr/bin/draftsmith", "train", "a b", "k=v w"], {}, "draftsmith train 'a b' 'k=v w'"),
        ([MODULE, "train", "x"], {}, "draftsmith train x"),
        (["pytest", "-q"], {}, None),
        (["/elsewhere/__main__.py"], {}, None),
        (
            [MODULE, "train", "x"],
            {"WORLD_SIZE": "4", "RANK": "0"},
            "accelerate launch --num_processes 4 -m draftsmith train x",
        ),
    ],
)  # fmt: skip
def test_the_recorded_command_is_quoted_for_a_shell(
    arguments: list[str], environment: dict[str, str], expected: str | None
) -> None:
    assert typed_command(arguments, environment) == expected


def test_a_secret_that_follows_its_option_is_redacted() -> None:
    typed = typed_command(["draftsmith", "push", "--token", "correct-horse", "--yes", "--password", "-x", "y"], {})
    assert typed == "draftsmith push --token '<redacted>' --yes --password -x y"
