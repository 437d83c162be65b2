"""Entry point of `draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`."""

import os
import sys

from .recipes.session.launch import end_with_launcher

_SPINS = "1000"


def main() -> None:
    """Run the command line.

    By default, OpenMP threads that wait at a barrier spin for billions of rounds (`GOMP_SPINCOUNT`), which takes cores
    from other threads on a busy machine (`tests/bench/contention.py`). torch reads the variable when it is loaded, so
    it is set before that, unless the user has set a policy.
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
