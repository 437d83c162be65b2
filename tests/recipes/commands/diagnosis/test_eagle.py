"""Faults in the training or the files of EAGLE-3 heads are diagnosed.

The heads overfit the answers of the target to a few prompts, so that every fault strongly reduces acceptance.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.checkpoints.heads.eagle import EagleHeads, save_eagle
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.diagnose.agreement import Passage, target_states
from draftsmith.decode.evaluation.measure import sample_texts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.evaluation import prompts_of
from draftsmith.recipes.commands.diagnosis.measure import measure_pair
from draftsmith.recipes.commands.diagnosis.pair import check_pair
from draftsmith.recipes.commands.evaluation.recipe import template_of
from draftsmith.recipes.schema.data import DataSection
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.train.tasks.heads import EagleTask
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

VOCAB, LAYERS = 320, (1, 3, 5)
KEPT = torch.arange(VOCAB - 10)
Change = Callable[[EagleHeads], Any]


@dataclass(frozen=True)
class Lesson:
    """Target, tokenizer and prompts, with methods that write recipes and train heads for this target."""

    folder: Path
    prompts: Path
    model: Any
    tokenizer: Any

    def recipe(self, **changes: Any) -> EvaluateRecipe:
        values: dict[str, Any] = {
            "kind": "evaluate", "out": str(self.folder / "results.json"), "target": str(self.folder / "target"),
            "prompts": str(self.prompts), "template": template_of(str(self.folder / "target")), "limit": 8,
            "max_prompt_tokens": 80,
            "max_new_tokens": 48, "device": "cpu",
            "methods": [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 2}}],
        }  # fmt: skip
        return EvaluateRecipe(**(values | changes))

    def heads(self, steps: int = 2, behind: bool = False) -> EagleHeads:
        """Train heads with `steps` TTT steps; `behind` wrongly delays their input tokens by one position."""
        torch.manual_seed(0)
        heads = EagleHeads.for_target(self.model.config, LAYERS, KEPT, num_heads=steps)
        heads.attach(self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight)
        target, lessons = wrap_model(self.model, aux_layers=LAYERS), []
        prompts = [ids for _, ids in prompts_of(self.recipe(), self.tokenizer)]
        for prompt, text in zip(prompts, sample_texts(target, prompts, Limits(48), Sampling()), strict=True):
            input_1TG, last_1TD, ids_1T = (each.clone() for each in target_states(target, Passage(prompt, text)))
            lessons.append((input_1TG, ids_1T, target.logits(last_1TD).argmax(-1)[0]))
        optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-3)
        for _ in range(150):
            losses = []
            for input_1TG, ids_1T, next_T in lessons:
                count = ids_1T.shape[1]
                read_1T = F.pad(ids_1T[:, :-1], (1, 0)) if behind else ids_1T
                mask_11TT = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
                feature_TKD = heads.features(input_1TG, read_1T, torch.arange(count)[None], mask_11TT)[0]
                for step in range(steps):  # step k at position t learns the output of the target at t + 1 + k
                    logits_TR = feature_TKD[: count - 1 - step, step] @ heads.projection().T
                    losses.append(F.cross_entropy(logits_TR, next_T[1 + step :].clamp(max=len(KEPT) - 1)))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
        return heads.eval()

    def check(self, heads: Path, file: Path) -> bool:
        changes = ["limit=4", "max_prompt_tokens=80", "max_new_tokens=32", "device=cpu"]
        return check_pair(
            str(self.folder / "target"), str(heads), prompts=str(self.prompts), out=file, overrides=changes
        )

    def saved(self, heads: EagleHeads, out: Path, changed: Callable[[Path], None] | None = None, **known: Any) -> Path:
        def write(folder: Path) -> None:
            save_eagle(heads, folder)
            if changed is not None:
                changed(folder)

        save_artifact(
            out, kind="heads", write=write, vocab_size=VOCAB, shapes={"num_heads": heads.num_heads},
            target={"id": str(self.folder / "target"), "sha256": resolve_model(str(self.folder / "target")).sha256},
            tokenizer_fingerprint=tokenizer_fingerprint(self.tokenizer),
            **({"recipe": {}, "data": {}, "training": {}} | known),
        )  # fmt: skip
        return out


@pytest.fixture(scope="module")
def lesson(
    corpus: Path, make_llama: Callable[..., LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Lesson:
    folder = tmp_path_factory.mktemp("lesson")
    model = make_llama(VOCAB, seed=3, sharpness=1.6, num_hidden_layers=8)
    model.generation_config.eos_token_id = None
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    for each in (model, tokenizer):
        each.save_pretrained(folder / "target")
    rows = json.loads((corpus / "rows.json").read_text())
    (folder / "rows.json").write_text(json.dumps(rows[:8]))
    return Lesson(folder, folder / "rows.json", model.requires_grad_(False), tokenizer)


@pytest.fixture(scope="module")
def sound(lesson: Lesson) -> EagleHeads:
    return lesson.heads()


def later(heads: EagleHeads) -> None:
    heads.layers = tuple(layer + 1 for layer in LAYERS)


def normed(heads: EagleHeads) -> None:
    heads.normed = True


def slower(heads: EagleHeads) -> None:
    heads.config.rope_parameters = {**heads.config.rope_parameters, "rope_theta": 20.0}


def other_ids(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"d2t": stored["d2t"] + 1}, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS: dict[str, tuple[Change | None, Callable[[Path], None] | None, dict[str, Any], list[str], str]] = {
    "sound": (None, None, {}, [], ""),
    "layers": (later, None, {}, ["config"], "layer_ids: [1, 3, 5]"),
    "norm": (normed, None, {}, ["config", "norm"], "norm_before_residual: false"),
    "rotary": (slower, None, {}, ["config", "rotary positions"], "rope_theta: 10000.0"),
    "ids": (None, other_ids, {}, ["config", "draft vocabulary"], "t2d lists different tokens"),
    "shift": (None, None, {"behind": True}, ["inputs"], "unshifted tokens"),
    "one step": (None, None, {"steps": 1}, ["steps"], "in the second"),
}
"""By name: change of the heads, change of their files, training options, expected findings and their text."""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(
    name: str, lesson: Lesson, sound: EagleHeads, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, changed, training, expected, message = FAULTS[name]
    original = (sound.layers, sound.normed, sound.config.rope_parameters)
    heads = lesson.heads(**training) if training else sound
    if change is not None:
        change(heads)
    out = lesson.saved(heads, tmp_path / "heads", changed)
    sound.layers, sound.normed, sound.config.rope_parameters = original
    file = tmp_path / "found.json"
    sound_pair = lesson.check(out, file)
    part = json.loads(file.read_text())
    result = {each["check"]: each for each in part["findings"] if each["check"] not in ("text", "drafting")}
    assert sorted(result) == expected
    assert sound_pair == ({*expected} <= {"rotary positions"})
    texts = [each["what"] + each["drafter"] for each in result.values()]
    assert not expected or message in "".join(texts)
    assert part["variants"][0]["change"] == "as stored"
    assert "acceptance length by config" in capsys.readouterr().out


def test_heads_without_a_manifest_are_not_decoded(lesson: Lesson, sound: EagleHeads, tmp_path: Path) -> None:
    save_eagle(sound, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"is not an artifact.*draftsmith import"):
        lesson.check(tmp_path / "plain", tmp_path / "found.json")


def test_scores_equal_decoding(lesson: Lesson, sound: EagleHeads, tmp_path: Path) -> None:
    out = lesson.saved(sound, tmp_path / "heads")
    _, part = measure_pair(lesson.recipe(drafter=str(out)))
    own, decoding = part["stages"][-2:]
    assert own["by_depth"][0] > 0.8
    assert decoding["value"] > 0.8


def test_files_reproduce_the_training_metrics(lesson: Lesson, sound: EagleHeads, corpus: Path, tmp_path: Path) -> None:
    """Only tokens of the draft vocabulary count. A higher training metric is reported as a fault of the files."""
    section = DataSection(
        source=str(corpus / "rows.json"), template="chatml", block_tokens=96, heldout_share=0.2,
        cache=str(tmp_path / "prepared"),
    )  # fmt: skip
    prepared = prepare_data(section, lesson.tokenizer, quiet=True)
    few = EagleHeads.for_target(lesson.model.config, LAYERS, torch.arange(0, VOCAB, 4), num_heads=2)
    few.load_state_dict(sound.state_dict())
    few.attach(lesson.model.get_input_embeddings().weight, lesson.model.get_output_embeddings().weight)
    task = EagleTask(lesson.model, few, prepared.heldout, [1.0, 1.0], evaluate_blocks=64)
    metrics = task.evaluate(task.module)
    recipe = {"train": {"precision": "no"}, "measure": {"blocks": 64}, "data": section.model_dump(mode="json")}
    for gamma, shift in ((2, 0.0), (1, 0.0), (2, 0.1), (1, 0.1)):
        reported = {key: value + shift * key.endswith("top1") for key, value in metrics.items()}
        out = tmp_path / f"heads-{gamma}-{shift}"
        lesson.saved(few.eval(), out, recipe=recipe, data=prepared.summary(), training={"metrics": reported})
        methods = [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": gamma}}]
        findings, part = measure_pair(lesson.recipe(drafter=str(out), methods=methods))
        keys = [stage["key"] for stage in part["stages"]]
        assert keys == ["record", "files", "own", "decoding"]
        if not shift:
            assert part["stages"][0]["value"] == pytest.approx(part["stages"][1]["value"], abs=1e-6)
        assert ("export" in {each.check for each in findings}) == bool(shift)
