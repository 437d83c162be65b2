"""`draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`: the command line."""

import os
import sys

from .recipes.session.launch import end_with_launcher

_SPINS = "1000"


def main() -> None:
    """Run the command line.

    Threads of OpenMP that wait at a barrier spin for `GOMP_SPINCOUNT` rounds before they sleep. The default, billions,
    takes the processor from the thread that they wait for when other processes are busy (`tests/bench/contention.py`).
    It is read when torch is loaded, so it is set before, unless the user has set a policy.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    if not sys.stderr.isatty():  # bars of transformers and the hub write a line for each change into a file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end_with_launcher()
    from .recipes.commands.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
