"""Decoding with models of many families: chains equal `generate` of transformers, and refusals name what works."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.auxiliary import input_embeddings
from draftsmith.checkpoints.heads.dflash import DFlashHeads
from draftsmith.checkpoints.heads.eagle import EagleHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.dflash import block_drafter
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.pool import Pool
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling

FAST = ("qwen3_next", "deepseek_v3", "gemma2")
SLOW = (
    *("qwen3", "qwen3_moe", "qwen3_5_text", "gemma3_text", "mistral", "gpt_oss", "glm4_moe", "granitemoehybrid"),
    *("cohere2", "falcon_h1", "lfm2", "nemotron_h", "bloom", "gpt_neo", "mamba"),
)
FAMILIES = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
VOCAB, NEW = 120, 40


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_equal_generate_and_refusals_name_methods_that_work(
    family: str, build_family: Callable[..., Any], make_heads: Callable[..., Any]
) -> None:
    model = build_family(family)
    target, draws = wrap_model(model, aux_layers=[1]), torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, VOCAB, (count,), generator=draws).tolist() for count in (20, 9, 3)]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    noisy = copy.deepcopy(model)
    for weight in noisy.parameters():
        weight.add_(torch.randn(weight.shape, generator=draws) * 0.01)
    weights = (input_embeddings(model), model.get_output_embeddings().weight)
    eagle: Any = EagleHeads.for_target(model.config, [1]).attach(*weights).begin_as(model)
    block: Any = DFlashHeads.for_target(model.config, 3, 5, layers=[1]).attach(*weights).begin_as(model)
    plain = wrap_model(noisy)
    drafters = [plain, EagleDrafter(eagle.requires_grad_(False)), block_drafter(block.requires_grad_(False))]
    documents = np.random.default_rng(0).integers(0, VOCAB, (20, 60)).tolist()
    table, heads = BigramTable.from_documents(documents, VOCAB), make_heads(3, target.hidden_size, VOCAB)
    refused = copy.copy(target)
    refused.tree_fault = target.tree_fault or f"'{family}' is refused"
    with pytest.raises(ValueError, match=f"medusa requires tree attention, but .*{family}") as refusal:
        refused.check_trees("medusa")
    named = re.findall(r"[a-z-]+", str(refusal.value).partition("drafts chains: ")[2])
    works = [name for name in dict.fromkeys(named) if name in METHODS]
    assert len(works) == 7
    for name in works:
        for drafter in drafters if "drafter" in METHODS[name].requires else [None]:
            method = build_method(name, Parts(drafter, heads, table), Sampling())
            texts = decode_texts(target, *method, prompts, Limits(NEW), Sampling(), Rng.for_rows(0, len(prompts)))
            assert texts == expected, (name, type(drafter).__name__)
    if target.tree_fault is not None:
        method = build_method("medusa", Parts(None, heads, table), Sampling())
        with pytest.raises(ValueError, match=f"'{family}'.*drafts chains"):
            decode_texts(target, *method, prompts, Limits(NEW), Sampling(), Rng.for_rows(0, len(prompts)))
    pool = Pool(target, 2, Limits(NEW), Sampling())
    tickets = [pool.add(ids, 0) for ids in prompts]
    found = dict(each for _ in range(3 * NEW) if pool.busy for each in pool.step())
    assert [found[ticket] for ticket in tickets] == expected


@pytest.mark.slow
def test_families_equal_generate_or_are_refused() -> None:
    bench = Path(__file__).parents[2] / "bench" / "families.py"
    process = subprocess.run([sys.executable, str(bench)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    fewest = {"families": 165, "trains": 123, "trees": 92, "exports": 123}
    assert all(counts[name] >= number for name, number in fewest.items()), process.stdout
    assert counts["chains"] == counts["loads"] >= 123, "a loaded family does not decode the same tokens as generate"
