"""Drafters, EAGLE-3.1 heads and DFlash drafters for targets of many model families: train, resume, export, doctor.

Shape letters: B batch, T tokens, D hidden, G auxiliary hidden states.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.heads.auxiliary import input_embeddings
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.data.blocks.packing import Batch
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.commands.training.train import make_run, run_train
from draftsmith.recipes.schema.loading import parse_recipe
from draftsmith.train.forward.packed import PackedForward
from draftsmith.train.parallel.accelerate import make_accelerator
from safetensors.torch import load_file

FAST = ("gemma3_text", "qwen3_next", "deepseek_v3")
SLOW = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gemma2", "mistral", "mixtral", "gpt_oss", "glm4"),
    *("glm4_moe", "granite", "granitemoehybrid", "phi3", "olmo2", "smollm3", "cohere2", "falcon_h1", "lfm2"),
    *("nemotron_h", "bloom"),
)
FAMILIES = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "drafter": ("transformers", {"objective": {"forward-kl": 1.0}}),
    "eagle3.1": ("eagle3", {"architecture": "eagle3", "num_heads": 2, "norms": ["fc_norm", "norm_output"]}),
    "dflash": ("dflash", {"architecture": "dflash", "num_heads": 3, "anchors": 8, "mask_token": 5}),
}
"""Export format of each kind of draft, and what its recipe changes."""


@pytest.fixture(scope="session")
def save_target(
    build_family: Callable[..., Any], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that saves a tiny target of a model type with a tokenizer, once per session."""

    @functools.cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        build_family(kind, vocab_size=320).save_pretrained(folder)
        load_tokenizer(str(corpus / "tokenizer")).save_pretrained(folder)
        return folder

    return save


def recipe_of(kind: str, values: dict[str, Any], target: Path) -> Any:
    changes = {"target": str(target), "measure": {"prompts": 2, "new_tokens": 4}} | KINDS[kind][1]
    if kind != "drafter":
        changes |= {"kind": "heads", "layers": [1], "objective": {"forward-kl": 1.0}}
        values = {name: values[name] for name in ("data", "train", "out")}
    values["train"] |= {"steps": 3, "save_every": 1, "keep_checkpoints": 3}
    return parse_recipe(values | changes, "the test's recipe")


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_trained_resumed_exported_and_checked(
    family: str,
    draft: str,
    save_target: Callable[[str], Path],
    tiny_drafter: Callable[[Path], dict[str, Any]],
    logged: Callable[..., list[Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that resumes after its second step writes the weights of an uninterrupted run."""
    target, accelerator = save_target(family), make_accelerator("no")
    recipe = recipe_of(draft, tiny_drafter(tmp_path), target)
    make_run(recipe, accelerator).fit(accelerator)
    out, last = Path(recipe.out), Path(f"{recipe.out}.state") / "checkpoints" / "step-000003"
    uninterrupted = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    assert make_run(recipe, accelerator).fit(accelerator).resumed_from == 2
    resumed = load_file(last / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in uninterrupted.items())
    run_train(recipe)
    assert find_faults(out)[1] == []
    assert logged(out, "evaluation")[-1]["tokens_per_step"] >= 1
    if draft == "dflash":
        changes = {"start": str(out), "train": recipe.train.model_copy(update={"steps": 0}), "out": f"{out}-start"}
        started = load_manifest(run_train(recipe.model_copy(update=changes)))
        assert started.evaluation == pytest.approx(load_manifest(out).evaluation)
    assert export_artifact(out, KINDS[draft][0], tmp_path / "export", FORMATS)
    capsys.readouterr()
    check_pair(str(target), str(out), as_json=True)
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["verdicts"]["draftsmith"]["outcome"] != "refused"
    assert not any(finding["is_fault"] for finding in diagnosis["findings"])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_those_of_transformers(family: str, build_family: Callable[..., Any]) -> None:
    """States of packed documents equal those of separate documents. Embeddings equal those of the target's module."""
    model = build_family(family)
    tokens_BT = torch.randint(5, 120, (2, 12), generator=torch.Generator().manual_seed(1))
    positions_BT = torch.tensor([[*range(5), *range(7)], [*range(3), *range(9)]])
    documents_BT = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 9])
    states_BTG = PackedForward(model, "layers-0-1").hidden(Batch(tokens_BT, tokens_BT, positions_BT, documents_BT))
    for row, first in enumerate((5, 3)):
        for span in (slice(first), slice(first, None)):
            output = model(tokens_BT[row, span][None], output_hidden_states=True, use_cache=False)
            expected_1TG = torch.cat([output.hidden_states[layer] for layer in (0, 1, -1)], -1)
            torch.testing.assert_close(states_BTG[row, span], expected_1TG[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(input_embeddings(model)[tokens_BT], model.get_input_embeddings()(tokens_BT))
