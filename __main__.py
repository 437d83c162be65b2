"""Entry point of `draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`."""

import os
import sys

from .recipes.session.launch import end_with_launcher
from .recipes.session.threads import choose_threads


def main() -> None:
    """Run the command line."""
    threads = choose_threads()
    if not sys.stderr.isatty():  # bars of transformers and the hub write a line for each change into a file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end_with_launcher()
    from .recipes.commands.cli import main as command_line
    from .recipes.session.terminal import log

    if threads:
        log(threads)
    command_line()


if __name__ == "__main__":
    main()
