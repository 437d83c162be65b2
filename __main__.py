"""`python -m draftsmith` and `accelerate launch -m draftsmith`: the command line."""

from .recipes.commands.cli import main

if __name__ == "__main__":
    main()
