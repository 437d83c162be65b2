"""Errors of the recipe schema: each message names the key, both values, and the nearest valid name."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.recipes.schema.loading import RECIPES as SCHEMAS
from draftsmith.recipes.schema.loading import load_recipe, read_extended

DATA = {"source": "rows.json"}
RECIPES: dict[str, dict[str, Any]] = {
    "drafter": {"out": "x", "model": {"source": "base"}, "data": DATA},
    "heads": {"out": "x", "target": "base", "data": DATA},
    "table": {"out": "x", "tokenizer": "base", "data": DATA},
    "evaluate": {"out": "x.json", "target": "t", "prompts": "p", "methods": [{"method": "autoregressive"}]},
    "regenerate": {"out": "x.jsonl", "source": "s", "target": "t"},
}
KINDS = list(RECIPES)
# kind of recipe, overrides, parts of the message
REFUSED: dict[str, tuple[str, list[str], list[str]]] = {
    "unknown key": ("drafter", ["train.learning_rat=1e-3"], ["'train.learning_rat'", "'train.learning_rate'"]),
    "a key of another place": ("drafter", ["train.top_k=2"], ["'train.top_k'", "'teacher.top_k'"]),
    "no number": ("drafter", ["train.steps=many"], ["'train.steps'", "'many'"]),
    "too large": ("drafter", ["train.warmup=2"], ["'train.warmup'", "1", "2"]),
    "unknown word": ("drafter", ["train.schedule=cosin"], ["'train.schedule'", "'cosine'", "'cosin'"]),
    "two models": ("drafter", ["model.config={model_type: llama}"], ["`source`", "`config`"]),
    "layers of no model": ("drafter", ["model={config: {model_type: llama}, layers: [0]}"], ["`layers`", "[0]"]),
    "a vocabulary of all": ("drafter", ["model.vocabulary={}"], ["tokens"]),
    "no tokenizer": ("drafter", ["model={config: {model_type: llama}}"], ["`tokenizer`"]),
    "no teacher": ("drafter", ["objective={forward-kl: 1.0}"], ["'forward-kl'", "`target`"]),
    "cache of everything": ("drafter", ["teacher.cache=c"], ["`cache`", "`top_k`"]),
    "more than is proposed": ("drafter", ["teacher.top_k=64", "model.vocabulary={tokens: 32}"], ["64", "at most 32"]),
    "warm bucket": ("drafter", ["teacher={top_k: 4, temperature: 2.0}"], ["2.0", "`top_k`"]),
    "on policy, no teacher": ("drafter", ["on_policy={share: 0.5}"], ["`on_policy`"]),
    "flash in 32 bits": ("drafter", ["model.attention=flash_attention_2"], ["flash_attention_2", "bf16"]),
    "no corpus": ("drafter", ["data={}"], ["'data'", "`source`", "`mixture`"]),
    "two corpora": ("drafter", ["data.mixture=[{source: rows.json}]"], ["`source`", "`mixture`"]),
    "limit of a mixture": ("drafter", ["data={mixture: [{source: rows.json}], limit: 3}"], ["`mixture`", "limit"]),
    "unknown way with HTML": ("drafter", ["data.clean={html: kep}"], ["'keep'"]),
    "all faults": ("drafter", ["train.epochs=-1", "train.micro_batch=0"], ["'train.epochs'", "'train.micro_batch'"]),
    "rank alone": ("heads", ["rank=4"], ["`rank`", "4", "low-rank"]),
    "low rank without": ("heads", ["projection=low-rank"], ["`rank`", "0"]),
    "nothing to train": ("heads", ["projection=target", "num_layers=0"], ["`projection: target`", "`num_layers: 0`"]),
    "a vocabulary for others": ("heads", ["vocabulary.tokens=9"], ["`vocabulary`", "`projection: target`"]),
    "rows of a target that moves": (
        "heads", ["projection=target", "vocabulary.tokens=9", "base={}"], ["`vocabulary`", "`base`"]
    ),
    "states of no head": ("heads", ["projection=target", "states=before-norm"], ["`states`", "before-norm"]),
    "too many heads cached": ("heads", ["hidden.cache=c", "num_heads=16"], ["`hidden.cache`", "15", "16"]),
    "cached and trained": ("heads", ["hidden.cache=c", "base={}"], ["`hidden.cache`", "`base`"]),
    "unanchored": ("heads", ["base={label_weight: 0, kl_weight: 0}"], ["`label_weight`", "`kl_weight`"]),
    "too long a warm-up": ("heads", ["base={heads_only: 0.9, warmup: 0.5}"], ["0.9", "0.5"]),
    "no baseline": ("evaluate", ["methods=[{method: speculative}]"], ["`autoregressive`", "0"]),
    "no baseline there": ("evaluate", ["methods=[{method: autoregressive}, {method: mjsd, temperature: 1}]"], ["1"]),
    "one label twice": ("evaluate", ["methods=[{method: autoregressive}, {method: autoregressive}]"], ["`label`"]),
    "the reference's name": ("evaluate", ["methods.0.label=transformers"], ["'transformers'"]),
    "two who answer": ("regenerate", ["server={url: http://x, model: m}"], ["`target`", "`server`"]),
    "no cleaning": ("regenerate", ["clean={dupplicates: []}"], ["'clean.dupplicates'", "'clean.duplicates'"]),
    "unknown kind": ("drafter", ["kind=draftr"], ["'draftr'", "'drafter'"]),
    "no assignment": ("drafter", ["train"], ["'train'", "key.path=value"]),
    "no YAML": ("drafter", ["train.steps=[1"], ["'train.steps=[1'"]),
    "below a value": ("drafter", ["train.betas=[0.9, 0.9]", "train.betas.0.x=1"], ["'train.betas.0'"]),
    "with a key": ("drafter", ["server.api_key=[correct-horse"], ["api_key=<redacted>"]),
    "with a password": ("regenerate", ["server=https://me:correct-ho" + "rse@h"], ["'server'", "https://<redacted>@h"]),
    "beyond a list": ("evaluate", ["methods.3.method=mjsd"], ["'3'", "1"]),
}  # fmt: skip
FILES: dict[str, tuple[bytes, list[str]]] = {
    "no YAML": (b"a: [1", ["recipe.yaml:1"]),
    "a list": (b"- 1", ["list"]),
    "a key twice": (b"a: 1\na: 2", ["recipe.yaml:2", "'a'"]),
    "no text": (b"\xff\xfe\x00", ["recipe.yaml"]),
    "too large a number": (b"a: " + b"9" * 5000, ["recipe.yaml", "4300"]),
    "no date": (b"a: 2024-13-45", ["recipe.yaml", "month"]),
    "nothing in it": (b"kind: quickstart", ["recipe.yaml", "'corpus'", "'target'"]),
    "a target's key": (
        b"kind: quickstart\ntarget: {train: {stepz: 3}}",
        ["'target.train.stepz'", "'target.train.steps'"],
    ),
    "extends itself": (b"extends: recipe.yaml", ["recipe.yaml", "extends"]),
    "extends nothing": (b"extends: drafter/vicuna-68n", ["'drafter/vicuna-68n'", "'drafter/vicuna-68m'"]),
}


def holding(parts: list[str]) -> str:
    """Return a pattern that matches messages with all these parts in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


@pytest.mark.parametrize(("kind", "overrides", "parts"), REFUSED.values(), ids=REFUSED)
def test_recipe_is_refused(kind: str, overrides: list[str], parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"kind": kind} | RECIPES[kind]))
    with pytest.raises(ValueError, match=holding(parts)) as refused:
        load_recipe(str(file), overrides)
    assert "horse" not in str(refused.value)


@pytest.mark.parametrize("kind", RECIPES)
def test_recipe_is_accepted_without_overrides(kind: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"kind": kind} | RECIPES[kind]))
    assert load_recipe(str(tmp_path / "recipe.yaml"), kinds=[SCHEMAS[kind]])
    others = [other for other in KINDS if other != kind]
    with pytest.raises(ValueError, match=holding([kind, *others])):
        load_recipe(str(tmp_path / "recipe.yaml"), kinds=[SCHEMAS[other] for other in others])


@pytest.mark.parametrize(("content", "parts"), FILES.values(), ids=FILES)
def test_file_is_refused(content: bytes, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=holding(parts)):
        load_recipe(str(tmp_path / "recipe.yaml"))


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {other}.yaml")
    with pytest.raises(ValueError, match=r"a\.yaml.*b\.yaml"):
        read_extended(tmp_path / "a.yaml")
