"""`python -m draftsmith` and `accelerate launch -m draftsmith`: the command line."""

from .recipes.cli import main

if __name__ == "__main__":
    main()
