"""`draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`: the command line."""

import sys

from .recipes.session.launch import end_with_launcher


def main() -> None:
    """Run the command line."""
    end_with_launcher()
    if sys.argv[1:2] == ["train"]:  # which may count a table
        from .recipes.session.restart import restart_where_sorting_is_slow

        restart_where_sorting_is_slow()
    from .recipes.commands.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
