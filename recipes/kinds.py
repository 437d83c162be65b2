"""The kinds of recipes."""

from __future__ import annotations

from .config import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from .data_sections import Section
from .papers_config import PaperRecipe
from .training import DrafterRecipe, HeadsRecipe, TableRecipe

Recipe = DrafterRecipe | HeadsRecipe | TableRecipe | EvaluateRecipe | RegenerateRecipe | QuickstartRecipe | PaperRecipe
RECIPES: dict[str, type[Section]] = {
    "drafter": DrafterRecipe,
    "heads": HeadsRecipe,
    "table": TableRecipe,
    "evaluate": EvaluateRecipe,
    "regenerate": RegenerateRecipe,
    "quickstart": QuickstartRecipe,
    "paper": PaperRecipe,
}
