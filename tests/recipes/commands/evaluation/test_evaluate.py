"""Evaluation of heads of every kind and of artifacts without a recipe; prompts, and printed messages."""

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import tokenizer_fingerprint
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import SkippedPrompts, load_prompts
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.decode.methods import METHODS, method_config
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import open_case, open_recipe
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe
from draftsmith.recipes.report.page import report_path
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.results import load_results
from transformers import LlamaForCausalLM

ROWS = [{"method": "autoregressive"}, {"method": "medusa", "options": {"tree": "2x1"}}, {"method": "bpd"}]
FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "before": {"states": "before-norm"},
    "target": {"projection": "target"},
    "low-rank": {"projection": "low-rank", "rank": 4, "states": "before-norm"},
}


@pytest.fixture
def target(tmp_path: Path, save_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """Return a random model, which is saved to tmp_path/target with the tokenizer of the corpus."""
    return save_llama(tmp_path / "target")


def recipe(heads: PredictionHeads, corpus: Path, folder: Path) -> EvaluateRecipe:
    """Save heads as an artifact and return a recipe that evaluates them."""
    save_artifact(
        folder / "heads",
        kind="heads",
        write=lambda out: save_heads(heads, out, "target"),
        vocab_size=heads.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(str(corpus / "tokenizer"))),
        **{name: {} for name in ("target", "shapes", "recipe", "data", "training")},
    )
    places = {"out": str(folder / "results.json"), "target": str(folder / "target"), "heads": str(folder / "heads")}
    settings = {"prompts": str(corpus / "rows.json"), "template": "chatml", "limit": 3, "max_new_tokens": 12}
    settings |= {"kind": "evaluate", "device": "cpu", "methods": ROWS}
    return EvaluateRecipe(**(places | settings))


@pytest.mark.parametrize("form", FORMS)
def test_heads_of_every_kind_are_measured(target: LlamaForCausalLM, corpus: Path, tmp_path: Path, form: str) -> None:
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), 3, 1, **FORMS[form]).to(torch.bfloat16)
    evaluation = recipe(heads, corpus, tmp_path)
    case = open_recipe(evaluation)
    loaded: Any = case.parts.heads
    assert case.target.states == loaded.states == FORMS[form].get("states", "after-norm")
    assert case.target.dtype == next(loaded.parameters()).dtype == loaded.projection(0).dtype == torch.float32
    results = run_evaluate(evaluation)
    assert results["errors"] == []
    for row in results["methods"]:
        assert row["identical_to_greedy"] == [3, 3]


def test_heads_of_another_size_are_refused(target: LlamaForCausalLM, corpus: Path, tmp_path: Path) -> None:
    weight_VD = target.lm_head.weight.detach()
    wider = PredictionHeads.from_lm_head(torch.zeros(320, 24), 3, 1)
    with pytest.raises(ValueError, match=r"24.*16"):
        open_recipe(recipe(wider, corpus, tmp_path))
    fewer = PredictionHeads.from_lm_head(weight_VD[:310].clone(), 3, 1, projection="target")
    with pytest.raises(ValueError, match=r"310.*320"):
        open_recipe(recipe(fewer, corpus, tmp_path))


@pytest.mark.parametrize("source", ["settings", "template", "added", "stop"])
def test_texts_end_at_every_end_token(
    target: LlamaForCausalLM, corpus: Path, tmp_path: Path, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """End tokens are defined by the generation config of the model, the chat template, or the recipe."""
    folder, prompts = tmp_path / "target", str(corpus / "rows.json")
    values = {"kind": "evaluate", "out": str(tmp_path / "results.json"), "target": str(folder), "prompts": prompts}
    values |= {"template": "plain", "methods": ROWS[:1], "device": "cpu", "limit": 3, "max_new_tokens": 24}
    free = open_case(EvaluateRecipe(**values)).texts(Sampling(0.0))
    end = free[0][2]
    assert [len(text) for text in free] == [24] * 3
    tokenizer = load_tokenizer(str(folder))
    if source == "settings":
        target.generation_config.update(eos_token_id=[tokenizer.eos_token_id, end], repetition_penalty=1.5)
        target.generation_config.update(stop_strings=["x"], cache_implementation="quantized")
        target.save_pretrained(folder)
    elif source == "stop":
        values["stop"] = [tokenizer.decode([end])]
    else:
        word = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 2)
        tokenizer.add_tokens([word])  # not a special token
        name = "<|im_start|>" if source == "template" else word
        end = tokenizer.convert_tokens_to_ids(name)
        tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{name}{{% endfor %}}"
        tokenizer.save_pretrained(folder)
        values["template"] = "tokenizer"
    case = open_case(EvaluateRecipe(**values))
    assert end in case.limits.stop_ids
    assert tokenizer.eos_token_id in case.limits.stop_ids
    expected = [[*itertools.takewhile(lambda token: token != end, text), end][:24] for text in free]
    if source in ("settings", "stop"):
        assert case.texts(Sampling(0.0)) == expected
    results = run_evaluate(case.recipe)
    assert results["greedy_equals_transformers"] == [3, 3]
    ignored = "ignoring repetition_penalty=1.5, stop_strings=['x'], cache_implementation=quantized"
    assert (ignored in " ".join(capfd.readouterr().err.split())) == (source == "settings")


def test_later_turns_follow_recorded_or_generated_answers(
    target: LlamaForCausalLM, corpus: Path, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"},
                          {"role": "user", "content": "two?"}]},
            {"category": "math", "turns": ["hello", "and then?", "why?"]}]  # fmt: skip
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"kind": "evaluate", "out": str(tmp_path / "results.json"), "target": str(tmp_path / "target")}
    values |= {"prompts": str(tmp_path / "asked.jsonl"), "template": "chatml", "methods": ROWS[:1], "device": "cpu"}
    loaded = EvaluateRecipe(**values, max_new_tokens=12)
    assert not loaded.asks_every_turn()
    assert EvaluateRecipe(**values | {"prompts": "chatalpaca"}).asks_every_turn()
    case = open_case(loaded.model_copy(update={"turns": "all", "max_prompt_tokens": 80}), skipped := SkippedPrompts())
    whole, other = [prompt.id for prompt in open_case(loaded).questions]
    assert [prompt.id for prompt in case.questions] == [whole, other, f"{whole}#2", f"{other}#2"]
    assert skipped.too_long == [f"{other}#3"]
    assert [turn.text for turn in case.questions[2].turns] == ["one?", "1", "two?"]
    own = case.texts(Sampling(0.0))[1]
    question, answer, later = case.questions[3].turns
    assert (question.text, later.text) == ("hello", "and then?")
    assert answer.text == case.pair.tokenizer.decode(own, skip_special_tokens=True) != ""


@pytest.fixture
def artifacts(evaluation: dict[str, Any], corpus: Path, tmp_path: Path) -> Path:
    """Save a target, drafter, heads and table."""
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    about: dict[str, Any] = {"vocab_size": 320, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    about |= {name: {} for name in ("target", "shapes", "recipe", "data", "training")}
    heads = PredictionHeads.from_lm_head(torch.randn(320, 16), 3, 1)
    save_artifact(tmp_path / "heads", kind="heads", write=lambda out: save_heads(heads, out, "target"), **about)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 320, 60).tolist() for _ in range(20)]
    table = BigramTable.from_documents(documents, 320)
    save_artifact(tmp_path / "table", kind="table", write=table.save, **about)
    return tmp_path


def test_one_command_measures_all_artifacts(artifacts: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(artifacts)
    overrides = ["template=chatml", "limit=5", "max_new_tokens=6", "compare_with_transformers=false"]
    named = {"target": "target", "prompts": str(corpus / "rows.json")}
    for parts, needed in ((("drafter",), {"drafter"}), ((), set()), (("heads", "table"), {"heads", "table"})):
        loaded = evaluate_recipe("methods=all", overrides, named | {part: part for part in parts})
        rows = {row.method for row in loaded.methods}
        assert rows == {name for name in METHODS if set(method_config(name, {}).needs) <= needed}
    whole = named | {part: part for part in ("drafter", "heads", "table")}
    loaded = evaluate_recipe("methods=all", overrides, whole)
    greedy = [row for row in loaded.methods if row.temperature is None]
    loaded = loaded.model_copy(update={"methods": greedy})
    assert loaded.out == "runs/evaluate/target/results.json"
    assert {row.method for row in loaded.methods} == set(METHODS)
    results = run_evaluate(loaded)
    assert results["errors"] == []
    assert {row["method"] for row in results["methods"]} == set(METHODS)
    assert {row["method"] for row in results["methods"] if not row["lossless"]} >= {"beam", "mjsd", "bild"}
    assert all(row["identical_to_greedy"] in (None, [5, 5]) for row in results["methods"] if row["lossless"])
    assert load_results(Path(loaded.out)) == json.loads(json.dumps(results))
    assert load_recipe(str(Path(loaded.out).with_suffix(".recipe.yaml"))) == loaded, "the written recipe differs"


def test_a_drafter_with_another_tokenizer_drafts_by_text(
    artifacts: Path,
    corpus: Path,
    cli: Callable[..., subprocess.CompletedProcess[str]],
    make_llama: Callable[..., LlamaForCausalLM],
) -> None:
    other_tokenizer = train_bpe(["what another family reads", "and how it cuts it"], 280, ["<unk>", "<s>"])
    make_llama(280).save_pretrained(artifacts / "other")
    other_tokenizer.save_pretrained(artifacts / "other")
    flags = ["--target", "target", "--drafter", "other", "--prompts", str(corpus / "rows.json"), "--out", "other.json"]
    few = ["template=chatml", "limit=3", "max_new_tokens=12"]
    done = cli("evaluate", *flags, *few, cwd=artifacts)
    assert done.returncode == 0, done.stderr
    row = load_results(artifacts / "other.json")["methods"][1]
    assert (row["method"], row["identical_to_greedy"]) == ("speculative", [3, 3])
    assert "evaluate: autoregressive, speculative; prompt template 'chatml'" in done.stderr
    assert "yes 3/3" in done.stdout
    refused = cli("evaluate", *flags, *few, "--method", "bild", cwd=artifacts)
    assert refused.returncode == 2
    assert "speculative" in refused.stderr
    assert "doctor" in refused.stderr


def test_options_change_a_recipe(artifacts: Path) -> None:
    loaded = evaluate_recipe("evaluate/all-methods", ["limit=2"], {"target": "a: b, [c]", "drafter": None})
    assert (loaded.target, loaded.drafter, loaded.limit) == ("a: b, [c]", "runs/quickstart/drafter", 2)
    assert evaluate_recipe("all-methods", ["limit=2"], {}) == evaluate_recipe("evaluate/all-methods", ["limit=2"], {})
    assert evaluate_recipe("slim/heads.yaml", [], {}) == load_recipe("evaluate/slim/heads")


def test_prompts_are_reproducible_and_skipped_ones_are_named(corpus: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    rows = json.loads((corpus / "rows.json").read_text())[:30]
    rows[4]["conversations"][0]["value"] = "the tree " * 200
    rows[7]["conversations"] = [{"from": "gpt", "value": "nothing was asked"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    skipped = SkippedPrompts()
    first = load_prompts(str(tmp_path / "rows.json"), get_template("chatml"), tokenizer, 10, 100, skipped=skipped)
    assert first == load_prompts(str(tmp_path / "rows.json"), get_template("chatml"), tokenizer, 10, 100)
    assert [prompt.id for prompt, _ in first] == [f"row{number}" for number in range(12) if number not in (4, 7)]
    assert skipped.as_dict() == {"counts": {"too long": 1, "no question": 1}, "too_long": ["row4"]}
    assert skipped.summary() == "1 prompts (too long), 1 prompts (no question)"
    assert not SkippedPrompts()
    for text, reason in (("[]", "the source is empty"), (json.dumps([rows[7]]), r"1 prompts \(no question\)")):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(ValueError, match=f"no prompt in .*none.json: {reason}"):
            load_prompts(str(tmp_path / "none.json"), get_template("chatml"), tokenizer, 10, 100)


def test_rows_use_the_drafter_of_their_options(evaluation: dict[str, Any], tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path / "other", seed=9)
    values = evaluation | {"drafter": evaluation["target"], "more_drafters": [str(tmp_path / "other")]}
    values |= {"max_new_tokens": 16, "limit": 3, "energy": "off", "compare_with_transformers": False}
    rows = [{"method": "autoregressive"}]
    rows += [{"method": "speculative", "label": f"{n}", "options": {"gamma": 3, "drafter": n}} for n in (1, 2)]
    loaded = EvaluateRecipe.model_validate(values | {"methods": rows})
    _, first, second = run_evaluate(loaded)["methods"]
    changes = {"drafter": loaded.more_drafters[0], "more_drafters": [], "methods": loaded.methods[:2]}
    _, expected = run_evaluate(loaded.model_copy(update=changes | {"out": str(tmp_path / "alone.json")}))["methods"]
    assert first["tokens_per_step"] > 3 > 2 > second["tokens_per_step"] == expected["tokens_per_step"]
    rows[2]["options"] = {"drafter": 3}
    with pytest.raises(ValueError, match="`drafter` of method 'speculative' is 3, but the number of drafters is 2"):
        run_evaluate(loaded.model_copy(update={"methods": [type(loaded.methods[0])(**row) for row in rows]}))


@pytest.mark.parametrize(("positions", "most"), [((80, 256), 70), ((256, 70), 60)])
def test_too_long_prompts_are_named_before_decoding(
    evaluation: dict[str, Any], tmp_path: Path, save_llama: Any, positions: tuple[int, int], most: int, capfd: Any
) -> None:
    for name, count in zip(("target", "drafter", "other"), (*positions, 16), strict=True):
        save_llama(tmp_path / name, positions=count)
    rows = json.loads(Path(evaluation["prompts"]).read_text())[:3]
    rows[2]["conversations"][0]["value"] = "the tree " * 60
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    values = evaluation | {"prompts": str(tmp_path / "rows.json"), "more_drafters": [str(tmp_path / "other")]}
    values |= {"max_new_tokens": 8, "max_prompt_tokens": 512, "energy": "off", "compare_with_transformers": False}
    methods = [{"method": "autoregressive"}, {"method": "speculative", "options": {"gamma": 3}}]
    loaded = EvaluateRecipe.model_validate(values | {"methods": methods})
    with pytest.raises(ValueError, match=rf"row2 .* speculative .* {min(positions)} .*`max_prompt_tokens={most}`"):
        run_evaluate(loaded)
    which = "target" if positions[0] < positions[1] else "drafter"
    with pytest.raises(ValueError, match=rf"the {which}'s {min(positions)} positions: .*reduce `max_new_tokens`"):
        run_evaluate(loaded.model_copy(update={"max_new_tokens": 90}))
    results = run_evaluate(loaded.model_copy(update={"max_prompt_tokens": most}))
    assert results["passed_over"] == {"counts": {"too long": 1}, "too_long": ["row2"]}
    assert "skipped: 1 too long" in " ".join(capfd.readouterr().out.split())
    page = report_path(Path(loaded.out)).read_text(encoding="utf-8")
    assert "skipped: 1 too long" in " ".join(page.split())
