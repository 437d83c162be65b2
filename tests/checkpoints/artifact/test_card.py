"""The model card: its contents, and the escaping of untrusted text."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.artifact.card import Evidence, base_model, data_sources, model_card
from draftsmith.checkpoints.artifact.manifest import Manifest
from draftsmith.checkpoints.artifact.markdown import public, text
from draftsmith.data.tokenizers import train_bpe
from markdown_it import MarkdownIt
from markdown_it.token import Token
from transformers import T5Config, T5ForConditionalGeneration

ODD = ("<b>x</b> ![x](http://a.example/b.png)", "a | b | `c` *d* _e_ ~~f~~ $g$", "---\n# heading\n```\n", "x" * 5000)
ROW = {
    "label": "speculative", "method": "speculative", "temperature": 0.0, "tokens_per_step": 2.5,
    "tokens_per_step_interval": [2.25, 2.75], "acceptance_rate": 0.5, "speedup": 1.75, "speedup_interval": [1.5, 2.0],
    "tokens_per_second": 123.4, "lossless": True,
}  # fmt: skip


def make_manifest(**changes: Any) -> Manifest:
    data = {
        "source": {
            "options": {"source": "sharegpt-v3", "mixture": [], "path": None},
            "cleaning": {"contamination": ["mt-bench", "spec-bench"]},
            "sources": [{"hub": "sharegpt-v3"}],
        },
        "rows": 90, "tokens": 1234567, "sha256": {"tokens": "ab" * 32},
        "corpus": {"dropped": {"contamination": 7}, "sources": [{"rows": 100, "kept": 90, "dropped": {}}]},
    }  # fmt: skip
    known: dict[str, Any] = {
        "kind": "drafter", "vocab_size": 32000, "tokenizer_fingerprint": "cd" * 32,
        "shapes": {"parameters": 68_000_000},
        "target": {"id": "lmsys/vicuna-7b-v1.3", "revision": "abc123", "sha256": "ef" * 32},
        "recipe": {"model": {"source": "JackFram/llama-68m"}}, "data": data, "training": {"steps": 5},
        "evaluation": {"tokens_per_step": 2.25}, "versions": {"draftsmith": "0.1.0", "torch": "2.13.0", "peft": None},
        "files": {}, "created": "2026-01-02T03:04:05+00:00",
        "command": "draftsmith train drafter data.source=/home/me/secret-place/rows.json",
    }  # fmt: skip
    return Manifest(**(known | changes))


def make_results(**changes: Any) -> dict[str, Any]:
    machine = {"name": "A CPU", "device": "cpu", "threads": 2, "versions": {"torch": "2.13.0"}}
    recipe = {"target": "lmsys/vicuna-7b-v1.3", "prompts": "mt-bench"}
    about: dict[str, Any] = {"methods": [ROW], "machine": machine, "prompts": 80, "recipe": recipe}
    about["created"] = "2026-01-03T00:00:00+00:00"
    about["certificates"] = [
        {"label": "speculative", "verdict": "lossless", "tokens": 10_000, "power": {"detectable_bias_99": 0.0416}}
    ]
    return about | changes


def head_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n", 2)[1])


def rendered(card: str) -> list[Token]:
    """Parse the body of a model card as Markdown with tables, strikethrough and HTML, and return its tokens."""
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return [token for block in reader.parse(card.split("\n---\n", 1)[1]) for token in (block, *(block.children or []))]


def test_a_card_contains_the_known_facts() -> None:
    licences = {"sharegpt-v3": "apache-2.0 (unclear where it is from)"}
    evidence = Evidence("mit", "JackFram/llama-68m", ("anon/ShareGPT",), licences, make_results())
    card = model_card(make_manifest(), "me/drafts", evidence)
    assert head_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "mit",
        "base_model": "JackFram/llama-68m",
        "datasets": ["anon/ShareGPT"],
        "tags": ["speculative-decoding", "draftsmith", "draft-model"],
    }
    for part in (
        "# me/drafts", "parameters: 68,000,000", "target id: lmsys/vicuna-7b-v1.3", "target revision: abc123",
        'drafter="me/drafts"',
        "80 prompts of mt-bench, with the target lmsys/vicuna-7b-v1.3, on A CPU (cpu, 2 threads), 2026-01-03",
        "| speculative | 0 | 2.50 (2.25–2.75) | 0.500 | 1.75 (1.50–2.00) | 123.4 | yes |",
        "| speculative | lossless | 10,000 |", "- tokens per step: 2.25", "- tokens: 1,234,567",
        "| sharegpt-v3 | 100 | 90 | apache-2.0 (unclear where it is from) |",
        "Contamination was checked: 7 rows with texts of mt-bench, spec-bench were dropped.",
        "draftsmith train drafter data.source=rows.json", "torch 2.13.0", "2026-01-02",
    ):  # fmt: skip
        assert part in card, part
    assert "secret-place" not in card
    assert "peft" not in card


@pytest.mark.parametrize(
    ("kind", "part"),
    [("heads", 'method("medusa", heads="me/x")'), ("table", 'method("bigram", table="me/x")'), ("target", "me/x")],
)
def test_each_kind_has_its_usage(kind: str, part: str) -> None:
    card = model_card(make_manifest(kind=kind), "me/x", Evidence(base_model="a/b"))
    assert part in card
    assert head_of(card)["library_name"] == ("transformers" if kind == "target" else "draftsmith")


def test_an_export_links_its_serving_guide() -> None:
    export = {"format": "npz", "readers": "scipy", "native": False, "of": {}}
    card = model_card(make_manifest(kind="table", export=export), "me/x")
    assert "in the format npz for scipy" in card
    assert "[SERVING.md](SERVING.md)" in card
    assert "custom_generate" not in card
    native = model_card(make_manifest(export=export | {"native": True}), "me/x")
    assert "[SERVING.md](SERVING.md)" in native
    assert "custom_generate" in native


def test_unknown_facts_are_stated_or_omitted() -> None:
    bare = make_manifest(target=None, data={}, evaluation=None, training={}, command=None, created=None, recipe={})
    card = model_card(bare, "t")
    assert "## Data" not in card
    assert "## Evaluation" not in card
    assert set(head_of(card)) == {"library_name", "pipeline_tag", "tags"}
    assert "from_pretrained('t')" in card.replace('"', "'")  # without a target, the model itself is loaded
    assert "the-target" in model_card(make_manifest(kind="table", target=None), "t")
    unchecked = make_manifest(data={"rows": 1, "source": {"options": {}, "cleaning": {}}})
    assert "Contamination with evaluation texts was not checked." in model_card(unchecked, "t")


def test_sources_of_mixtures_and_files() -> None:
    mixture = [{"source": "alpaca", "weight": 0.5}, {"source": "/home/me/rows.json", "weight": 2.0}]
    sources = [{"hub": "alpaca"}, {"files": {"rows.json": "ab"}}]
    data = {"source": {"options": {"mixture": mixture}, "sources": sources}}
    result = data_sources(make_manifest(data=data))
    assert [(each["source"], each["hub"], each["files"]) for each in result] == [
        ("alpaca", "alpaca", {}), ("rows.json", None, {"rows.json": "ab"})
    ]  # fmt: skip
    card = model_card(make_manifest(data=data), "t")
    assert "/home/me" not in card
    assert "| alpaca | – | – | unknown |" in card


def test_base_models_on_the_hub_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_model(make_manifest()) == "JackFram/llama-68m"
    assert base_model(make_manifest(kind="heads")) == "lmsys/vicuna-7b-v1.3"
    assert base_model(make_manifest(recipe={}, target={"id": "runs/quickstart/target"})) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lmsys" / "vicuna-7b-v1.3").mkdir(parents=True)
    assert base_model(make_manifest(kind="heads")) is None


@pytest.mark.parametrize("odd", ODD)
def test_names_with_markup_are_shown_as_text(odd: str) -> None:
    """Text with markup in any field renders with the same structure as plain text."""

    def card(word: str) -> str:
        data = {"source": {"options": {"source": word, "path": word}, "sources": [{"files": {word: word}}]}, word: word}
        manifest = make_manifest(
            kind="table", data=data, target={"id": word, "revision": word}, shapes={word: word}, command=word,
            training={"note": word}, evaluation={word: word}, versions={"draftsmith": word},
            export={"format": word, "readers": word, "native": True},
        )  # fmt: skip
        results = make_results(methods=[ROW | {"label": word}], recipe={"target": word, "prompts": word})
        return model_card(manifest, word, Evidence(word, word, (word,), {word: word}, results))

    kinds = [[token.type for token in rendered(card(word)) if token.type != "text"] for word in ("word", odd)]
    assert kinds[0] == kinds[1]
    assert not {"html_block", "html_inline", "image"} & set(kinds[1])
    assert set(head_of(card(odd))) == set(head_of(card("word")))


def test_local_paths_are_omitted() -> None:
    command = "draftsmith train /home/me/x.yaml data.source=/data/in me/rows.jsonl out=runs/a C:\\Users\\me\\t.txt"
    assert public(command) == "draftsmith train x.yaml data.source=in me/rows.jsonl out=runs/a t.txt"
    kept_text = "https://example.org/a/b/c and hub/id and and/or"
    assert public(kept_text) == kept_text
    assert text("~/secret/place") == "place"


def test_the_code_of_a_drafters_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe(["What is a hash table? It is a table."], 270, ("<pad>", "</s>"))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    for name in ("target", "drafter"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=270, pad_token_id=0, eos_token_id=1, **sizes))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    manifest = make_manifest(target={"id": "target"}, shapes={"model_type": "t5"}, vocab_size=270)
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(model_card(manifest, "drafter").partition("```python\n")[2].partition("```")[0], values)
    plain = values["model"].generate(**values["inputs"], max_new_tokens=64, do_sample=False)
    assert values["output"].tolist() == plain.tolist()
