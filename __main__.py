"""`draftsmith`, `python -m draftsmith` and `accelerate launch -m draftsmith`: the command line."""

from .recipes.session.launch import end_with_launcher


def main() -> None:
    """Run the command line."""
    end_with_launcher()
    from .recipes.commands.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
