"""The diagnosis names planted faults, and reports no findings for correct artifacts.

Shape letters: V vocabulary, D hidden, S states.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import sample_texts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.data import Prepared, prepare_data
from draftsmith.recipes.commands.diagnosis.measure import measure_pair
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.schema.data import DataSection
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.teachers.teacher import ModelTeacher
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HEADS = 320, 3
BLOCK = 96


def random_model(seed: int) -> Any:
    """Return a model whose distributions are neither flat nor one-hot."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=256)).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.6 * parameter.shape[1] ** -0.5)
    return model


def noisy(model: Any, noise: float = 0.02) -> Any:
    """Return a copy of a model with noise, as a drafter that mostly agrees with it."""
    drafter = copy.deepcopy(model)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter += noise * parameter.std() * torch.randn_like(parameter)
    return drafter


@dataclass(frozen=True)
class Workshop:
    """Target on disk, with functions that write artifacts for it."""

    folder: Path
    corpus: Path
    template: str = "chatml"

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.corpus / "tokenizer"))

    @cached_property
    def model(self) -> Any:
        return random_model(3)

    @property
    def target(self) -> Path:
        """Path of the target, which is written on first use."""
        path = self.folder / "target"
        if not path.is_dir():
            self.model.save_pretrained(path)
            self.tokenizer.save_pretrained(path)
        return path

    @cached_property
    def section(self) -> DataSection:
        return DataSection(
            source=str(self.corpus / "rows.json"), template=self.template, block_tokens=BLOCK, heldout_share=0.2,
            cache=str(self.folder / "prepared"),
        )  # fmt: skip

    @cached_property
    def prepared(self) -> Prepared:
        return prepare_data(self.section, self.tokenizer, quiet=True)

    def drafter(self, model: Any, out: Path, change: Callable[[Any], None] | None = None) -> Path:
        """Write a drafter artifact as training does; `change` modifies the model after its metrics were measured."""
        task = DrafterTask(model, self.prepared.heldout, eval_teacher=ModelTeacher(self.model), evaluate_blocks=64)
        metrics = task.evaluate(task.module)
        if change is not None:
            with torch.no_grad():
                change(model)
        recipe = {"model": {"dtype": "float32"}, "train": {"precision": "no"}, "measure": {"blocks": 64}}
        self.save("drafter", out, model.save_pretrained, recipe, metrics, {"vocab_size": VOCAB})
        return out

    def save(self, kind: str, out: Path, write: Any, recipe: dict[str, Any], metrics: Any, shapes: Any) -> None:
        save_artifact(
            out, kind=kind, write=write, vocab_size=VOCAB, tokenizer_fingerprint=tokenizer_fingerprint(self.tokenizer),
            target={"id": str(self.target), "sha256": resolve_model(str(self.target)).sha256}, shapes=shapes,
            recipe=recipe | {"data": self.section.model_dump(mode="json")}, data=self.prepared.summary(),
            training={"metrics": metrics},
        )  # fmt: skip

    def recipe(self, **changes: Any) -> EvaluateRecipe:
        """Return an evaluation recipe for the target."""
        values: dict[str, Any] = {
            "kind": "evaluate", "out": str(self.folder / "results.json"), "target": str(self.target),
            "prompts": str(self.corpus / "rows.json"), "template": "chatml", "limit": 16, "max_prompt_tokens": 80,
            "max_new_tokens": 24, "temperature": 1.0, "device": "cpu",
            "methods": [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 3}}],
        }  # fmt: skip
        return EvaluateRecipe(**(values | changes))


@pytest.fixture(scope="module")
def workshop(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), corpus)


def diagnosed(recipe: EvaluateRecipe) -> dict[str, Any]:
    findings, part = measure_pair(recipe)
    json.dumps(part, allow_nan=False)
    return part | {"findings": findings}


def causes(part: dict[str, Any]) -> list[str]:
    return [each.check for each in part["findings"] if each.is_fault]


def stage(part: dict[str, Any], key: str) -> dict[str, Any]:
    return next(each for each in part["stages"] if each["key"] == key)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_correct_drafter_has_no_findings(workshop: Workshop, tmp_path: Path, temperature: float) -> None:
    drafter = workshop.drafter(noisy(workshop.model), tmp_path / "drafter")
    part = diagnosed(workshop.recipe(drafter=str(drafter), temperature=temperature))
    assert causes(part) == []
    assert part["skipped"] == []
    assert [each["key"] for each in part["stages"]] == ["record", "files", "own", "decoding"]
    trained = part["training"]["overlap" if temperature else "top1_agreement"]
    assert stage(part, "record")["value"] == trained
    assert stage(part, "files")["value"] == pytest.approx(trained, abs=1e-6)


def test_a_drafter_for_a_different_template_is_reported(workshop: Workshop, tmp_path: Path) -> None:
    """The embedding of the chatml turn token is random, as if the drafter was trained with a different template."""
    other = replace(workshop, template="plain")
    drafter = noisy(workshop.model)
    begin = workshop.tokenizer.convert_tokens_to_ids("<|im_start|>")
    with torch.no_grad():
        drafter.get_input_embeddings().weight[begin].normal_(0.0, 3.0)
    out = other.drafter(drafter, tmp_path / "drafter")
    part = diagnosed(workshop.recipe(drafter=str(out)))
    assert causes(part) == ["template"]
    worst = part["findings"][0]
    assert stage(part, "files")["value"] - stage(part, "own")["value"] == pytest.approx(worst.lost)


def test_changed_weights_of_an_export_are_reported(workshop: Workshop, tmp_path: Path) -> None:
    def perturb(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)

    drafter = workshop.drafter(noisy(workshop.model), tmp_path / "drafter", perturb)
    part = diagnosed(workshop.recipe(drafter=str(drafter)))
    assert causes(part) == ["export"]
    worst = part["findings"][0]
    assert worst.lost == pytest.approx(stage(part, "record")["value"] - stage(part, "files")["value"])
    assert worst.lost > 0.05


def test_heads_are_measured_separately(workshop: Workshop, tmp_path: Path) -> None:
    heads = PredictionHeads.from_lm_head(workshop.model.lm_head.weight.detach(), HEADS, 1).eval()
    task = HeadsTask(workshop.model, heads, workshop.prepared.heldout, [1.0] * HEADS, evaluate_blocks=64)
    recipe = {"train": {"precision": "no"}, "measure": {"blocks": 64}}
    shapes = {"states": "after-norm", "num_heads": HEADS}
    metrics, out = task.evaluate(task.module), tmp_path / "heads"
    workshop.save("heads", out, lambda folder: save_heads(heads, folder, "t"), recipe, metrics, shapes)
    methods = [{"method": "autoregressive"}, {"method": "bpd"}]
    part = diagnosed(workshop.recipe(heads=str(out), temperature=0.0, methods=methods))
    trained = [metrics[f"head{head}_top1"] for head in range(HEADS)]
    assert stage(part, "record")["by_depth"] == trained
    assert all(len(each["by_depth"]) == HEADS for each in part["stages"])
    assert causes(part) == []
    assert stage(part, "files")["by_depth"] == pytest.approx(trained, abs=1e-6)


def test_tables_have_no_training_metrics(workshop: Workshop, tmp_path: Path) -> None:
    texts = sample_texts(wrap_model(workshop.model), [[5, 6], [7]], Limits(60), Sampling())
    table = BigramTable.from_documents(iter(map(np.array, texts)), VOCAB)
    workshop.save("table", tmp_path / "table", table.save, {"count": {"pairs": "answers"}}, {}, {})
    part = diagnosed(workshop.recipe(table=str(tmp_path / "table"), temperature=0.0))
    assert [each["key"] for each in part["stages"]] == ["own", "decoding"]
    assert causes(part) == []


def test_the_command_needs_no_recipe_and_no_manifest(corpus: Path, tmp_path: Path, cli: Any) -> None:
    shop = Workshop(tmp_path, corpus)
    noisy(shop.model).save_pretrained(tmp_path / "plain")
    few = ("limit=3", "max_new_tokens=8", "template=chatml", "device=cpu")
    options = ("--prompts", str(corpus / "rows.json"), *(word for change in few for word in ("--set", change)))
    done = cli("doctor", str(shop.target), str(tmp_path / "plain"), *options, "--out", "found.json", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "verdicts" in done.stdout
    assert "acceptance by stage" in done.stdout
    part = json.loads((tmp_path / "found.json").read_text())
    assert [each["key"] for each in part["stages"]] == ["own", "decoding"]
    assert "not in a manifest" in part["skipped"][0]


@pytest.mark.parametrize(
    ("recipe", "named"),
    [({}, "heads, table, got none"), ({"drafter": "d", "table": "t"}, "got drafter, table")],
)
def test_a_diagnosis_has_one_artifact(workshop: Workshop, recipe: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        measure_pair(workshop.recipe(**recipe))


def test_the_output_file_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found\.txt"):
        check_pair("t", str(tmp_path), prompts="spec-bench", out=tmp_path / "found.txt")
