"""What a drafter should be: choices of layers, vocabulary and objective, each trained on as many of a pair's answers.

    python tests/bench/choices.py --pair runs/realpair [--steps 600] [--only layers=0,29 objective=cross-entropy]
    python tests/bench/realpair.py --pair runs/realpair --curve runs/realpair/choices/*

One thing at a time differs from the pair's own drafter, and all start from the target's layers. The second command says
what each costs and drafts on Spec-Bench. What is finished is not trained again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import finish, parser_of
from draftsmith.checkpoints.storage.names import MANIFEST_FILE
from draftsmith.recipes.assemble.teacher import prepare_teacher
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.training import DrafterRecipe
from pair import Pair

LAYERS = ([0], [29], [0, 29], [0, 28, 29], [0, 1, 28, 29], [0, 1, 2, 3], [0, 10, 20, 29], [26, 27, 28, 29])
TOKENS = (4096, 8192, 16384, None)
OBJECTIVES = ("forward-kl", "cross-entropy", "total-variation", "lk-lambda")


def choices(own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What differs from a drafter's recipe, by name."""
    model, found = own["model"], {}
    for layers in LAYERS:
        found[f"layers={','.join(map(str, layers))}"] = {"model": model | {"layers": list(layers)}}
    for tokens in TOKENS:
        vocabulary = None if tokens is None else model["vocabulary"] | {"tokens": tokens}
        found[f"vocabulary={tokens}"] = {"model": model | {"vocabulary": vocabulary}}
    for objective in OBJECTIVES:
        found[f"objective={objective}"] = {"objective": {objective: 1.0}}
    seen: list[dict[str, Any]] = []
    distinct = {}
    for name, changes in found.items():  # the pair's own is among each kind
        if own | changes not in seen:
            seen.append(own | changes)
            distinct[name] = changes
    return distinct


def main() -> None:
    parser = parser_of(__doc__, "two steps of each", steps=600)
    parser.add_argument("--pair", type=Path, default=Path("runs/realpair"), help="a finished quickstart's folder")
    parser.add_argument("--only", nargs="+", default=[], help="only these choices, such as layers=0,29")
    args = parser.parse_args()
    recipe = Pair(args.pair, 1).recipes.drafter
    own = recipe.model_dump(mode="json")
    known = choices(own)
    if unknown := set(args.only) - known.keys():
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    made = []
    for name in args.only or known:
        folder = args.pair / "choices" / name
        train = own["train"] | {"steps": 2 if args.quick else args.steps}
        asked = DrafterRecipe.model_validate(own | known[name] | {"out": str(folder), "train": train})
        if not (folder / MANIFEST_FILE).is_file():
            if asked.teacher.cache is not None:
                prepare_teacher(asked)
            run_train(asked)
        made.append(str(folder))
    finish({"choices": made})


if __name__ == "__main__":
    main()
