"""Target/drafter pair of a finished quickstart, shared by several benchmarks."""

from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import end_ids, load_prompts
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.commands.pairs.quickstart import resolve
from draftsmith.recipes.schema.evaluation import EvaluateRecipe, QuickstartRecipe
from draftsmith.recipes.schema.loading import parse_recipe, read_recipe
from transformers import GenerationConfig


def recipe_of_pair(folder: Path) -> QuickstartRecipe:
    """Return the recipe of a finished quickstart, with its paths resolved to the folder."""
    recipe = parse_recipe(read_recipe(folder / "quickstart.yaml"), "quickstart")
    assert isinstance(recipe, QuickstartRecipe)
    return resolve(recipe.model_copy(update={"out": str(folder)}))


def on_pair(recipe: EvaluateRecipe, folder: Path, **changes: Any) -> EvaluateRecipe:
    """Return the evaluation recipe with the models, prompts and template of a pair."""
    evaluation = recipe_of_pair(folder).evaluate
    settings = {part: str(folder / part) for part in ("target", "drafter", "heads", "table")}
    settings |= {"prompts": evaluation.prompts, "template": evaluation.template, "dtype": "auto", "device_map": None}
    settings |= {"more_drafters": [], "prompts_path": None, "groups": []}
    settings["max_prompt_tokens"] = min(recipe.max_prompt_tokens, 512)
    return EvaluateRecipe.model_validate(recipe.model_dump() | settings | changes)


class Pair:
    """Recipes, models, draft artifacts and prompts of a finished quickstart."""

    def __init__(self, folder: Path, prompts: int) -> None:
        if not (folder / "drafter").is_dir():
            raise SystemExit(f"no trained pair at {folder}: run `make quickstart` first")
        self.folder = folder
        self.tokenizer = load_tokenizer(str(folder / "target"))
        evaluation = self.recipes.evaluate
        template = get_template(evaluation.template, self.tokenizer, evaluation.template_options)
        self.stop = end_ids(self.tokenizer, template, GenerationConfig.from_pretrained(folder / "target"))
        sizes = prompts, evaluation.max_prompt_tokens
        self.prompts = [ids for _, ids in load_prompts(evaluation.prompts, template, self.tokenizer, *sizes)]

    @cached_property
    def recipes(self) -> Any:
        return recipe_of_pair(self.folder)

    @cached_property
    def target_model(self) -> Any:
        return load_model(str(self.folder / "target"))

    @cached_property
    def drafter_model(self) -> Any:
        return load_model(str(self.folder / "drafter"))

    @cached_property
    def target(self) -> Any:
        return wrap_model(self.target_model)

    @cached_property
    def parts(self) -> Parts:
        folder = self.folder
        return Parts(wrap_model(self.drafter_model), load_heads(folder / "heads"), BigramTable.load(folder / "table"))
