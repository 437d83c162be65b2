"""Command line that the user typed, which is recorded in manifests without secrets."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...checkpoints.storage.redaction import redact_arguments

_PROGRAM = "draftsmith"


def typed_command(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the typed command line, with `accelerate launch` but without secrets, or None in the Python API."""
    program, *arguments_typed = sys.argv if arguments is None else arguments
    environment = os.environ if environment is None else environment
    path = Path(program)
    is_module = path.name == "__main__.py" and path.resolve().parent == Path(__file__).resolve().parents[2]
    if path.name != _PROGRAM and not is_module:
        return None
    processes = environment.get("WORLD_SIZE", "1")
    launch = [] if processes == "1" else ["accelerate", "launch", "--num_processes", processes, "-m"]
    return shlex.join([*launch, _PROGRAM, *redact_arguments(arguments_typed)])
