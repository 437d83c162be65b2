"""The papers' experiments that are no plain evaluations: their numbers against enumeration and direct computation.

Shape letters: T positions, V vocabulary or states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import closed_forms as theory
import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.evaluation.replay.recording import HeadDrafts, Recording
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import open_case
from draftsmith.recipes.commands.papers.experiments import EXPERIMENTS
from draftsmith.recipes.commands.papers.tables import corrected
from draftsmith.recipes.schema.claims import NOT_JUDGED, judge, parse_claim
from draftsmith.recipes.schema.experiments import CorrelationSettings
from draftsmith.recipes.schema.papers import PaperRecipe

Row = dict[str, Any]


def recipe_of(experiment: str, evaluate: Row, **settings: Any) -> PaperRecipe:
    about = {"kind": "paper", "out": "runs/unused", "paper": "theory", "where": "nowhere", "experiment": experiment}
    return PaperRecipe.model_validate(about | {"evaluate": evaluate, "settings": settings})


def rows_of(experiment: str, evaluate: Row, folder: Path, **settings: Any) -> dict[str, Row]:
    recipe = recipe_of(experiment, evaluate, **settings)
    rows = EXPERIMENTS[experiment](recipe, folder)
    labels = [row["label"] for row in rows]
    assert len(labels) == len(set(labels))
    for row in rows:
        for metric, columns in row.get("pairs", {}).items():
            if row[metric] is not None:
                assert row[metric] == pytest.approx(sum(columns["over"]) / sum(columns["under"]), rel=1e-6)
    return dict(zip(labels, rows, strict=True))


@pytest.fixture(scope="module")
def known(pair: Row) -> Callable[[float], list[tuple[np.ndarray, np.ndarray, list[int]]]]:
    """Of every prompt the whole distributions of target and drafter, by transformers alone, and the text."""

    def read(temperature: float) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
        bench = open_case(recipe_of("acceptance", pair).evaluate)
        models = [load_model(pair[part]) for part in ("target", "drafter")]
        found = []
        for prompt, text in zip(bench.prompts, bench.texts(Sampling(temperature)), strict=True):
            with torch.inference_mode():
                rows = [
                    model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].double() for model in models
                ]
            whole = [
                (row / temperature).softmax(-1) if temperature else torch.eye(row.shape[-1])[row.argmax(-1)].double()
                for row in rows
            ]
            found.append((whole[0].numpy(), whole[1].numpy(), text))
        return found

    return cache(read)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_is_the_overlap_of_the_distributions(pair: Row, known: Any, tmp_path: Path, temperature: float) -> None:
    found = rows_of("acceptance", pair, tmp_path, sources=["drafters", "unigram", "bigram"], temperatures=[temperature])
    row = found[f"drafter T={temperature:g}"]
    overlaps = [np.minimum(target_TV, draft_TV).sum(1) for target_TV, draft_TV, _ in known(temperature)]
    assert row["alpha"] == pytest.approx(np.concatenate(overlaps).mean(), abs=2e-6)
    assert 0.05 < row["alpha"] < 0.95
    assert row["pairs"]["alpha"]["over"] == pytest.approx([overlap.sum() for overlap in overlaps], abs=1e-5)
    assert row["variation"] == pytest.approx(1 - row["alpha"])
    assert row["acceleration"] == pytest.approx(1 / (1 - row["alpha"]))
    table, bench = BigramTable.load(Path(pair["table"])), open_case(recipe_of("acceptance", pair).evaluate)
    unigram_V = (table.unigram.numpy() + 1) / (table.unigram.numpy() + 1).sum()
    counts_VV = np.zeros((len(unigram_V), len(unigram_V)))
    counts_VV[np.repeat(np.arange(len(unigram_V)), table.row_ptr.diff().numpy()), table.col.numpy()] = table.count
    bigram_VV = (counts_VV + unigram_V) / (counts_VV.sum(1, keepdims=True) + 1)
    if temperature == 0:
        unigram_V, bigram_VV = np.eye(len(unigram_V))[unigram_V.argmax()], np.eye(len(unigram_V))[bigram_VV.argmax(1)]
    by_hand: dict[str, list[np.ndarray]] = {"unigram": [], "bigram": []}
    for prompt, (target_TV, _, text) in zip(bench.prompts, known(temperature), strict=True):
        by_hand["unigram"].append(np.minimum(target_TV, unigram_V).sum(1))
        by_hand["bigram"].append(np.minimum(target_TV, bigram_VV[[prompt[-1], *text[:-1]]]).sum(1))
    for name, shares in by_hand.items():
        assert found[f"{name} T={temperature:g}"]["alpha"] == pytest.approx(np.concatenate(shares).mean(), abs=2e-6)


def test_candidates_with_replacement_are_the_closed_form(pair: Row, known: Any, tmp_path: Path) -> None:
    """What drawing without replacement adds is enumerated in `tests/decode/evaluation/replay/`."""
    more = pair | {"more_drafters": [pair["target"]]}
    found = rows_of("acceptance", more, tmp_path, temperatures=[1.0], candidates=[1, 2])
    assert list(found) == [f"drafter{which} k={k} T=1" for which in ("", " 2") for k in (1, 2)]
    assert found["drafter 2 k=1 T=1"]["alpha"] == pytest.approx(1, abs=1e-5)
    refused = [theory.refusals(target_TV, draft_TV, 2)[0] for target_TV, draft_TV, _ in known(1.0)]
    row = found["drafter k=2 T=1"]
    assert row["with_replacement"] == pytest.approx(1 - np.concatenate(refused).mean(), abs=1e-5)
    assert row["alpha"] > row["with_replacement"] > found["drafter k=1 T=1"]["alpha"]


def test_methods_are_decoded_as_an_evaluation_decodes_them(pair: Row, tmp_path: Path) -> None:
    methods = [{"method": "autoregressive"}, {"method": "speculative", "label": "chain", "options": {"gamma": 3}},
               {"method": "mjsd", "options": {"gamma": 3, "num_beams": 2}}]  # fmt: skip
    evaluate = pair | {"methods": methods, "temperature": 1.0, "top_k": 20, "seed": 5}
    found = rows_of("acceptance", evaluate, tmp_path, sources=[])
    assert list(found) == ["chain", "mjsd"]
    bench = open_case(recipe_of("acceptance", evaluate).evaluate)
    sampling = Sampling(1.0, 20)
    for label, name, options in (
        ("chain", "speculative", {"gamma": 3}),
        ("mjsd", "mjsd", {"gamma": 3, "num_beams": 2}),
    ):
        method = build_method(name, bench.opened.parts, sampling, **options)
        tallies = [
            decode(bench.opened.target, method, sampling, 5 + place, prompt, bench.limits).tally
            for place, prompt in enumerate(bench.prompts)
        ]
        row = found[label]
        assert row["pairs"]["tokens_per_step"]["over"] == [tally.tokens for tally in tallies]
        assert row["pairs"]["accepted_per_step"]["over"] == [tally.accepted for tally in tallies]
        assert row["alpha"] == pytest.approx(sum(t.accepted for t in tallies) / sum(t.examined for t in tallies))


def test_correlation_may_mend_and_spoil() -> None:
    """Against plain loops, on random heads and tables, several texts of different lengths."""
    rng = np.random.default_rng(0)
    vocab, texts = 6, [[1, 2, 3, 4], [5], [0, 0, 2]]
    table = BigramTable.from_documents([rng.integers(0, vocab, 40)], vocab)
    order = np.stack([rng.permutation(vocab)[:3] for _ in range(8 * 2)]).reshape(8, 2, 3)
    logs = np.log(-np.sort(-rng.dirichlet(np.ones(3), (8, 2)), -1))
    roots = rng.integers(0, vocab, 8)
    heads = HeadDrafts(roots.astype(np.int32), order.astype(np.int32), logs.astype(np.float32))
    recording = Recording(Sampling(), [[0]] * 3, texts, heads=heads)
    found = corrected(recording, table, CorrelationSettings(candidates=3, unseen=0.1))
    place, spoiled = 0, 0
    for text in texts:
        for start in range(len(text)):
            for head in range(2):
                inside = start + head < len(text)
                assert found[2][place, head] == inside
                if inside:
                    before = int(roots[place]) if head == 0 else text[start + head - 1]
                    scores = [
                        log
                        + float(table.look_up(torch.tensor(before), torch.tensor(int(token)), torch.tensor(0.1).log()))
                        for log, token in zip(logs[place, head], order[place, head], strict=True)
                    ]
                    right = order[place, head][int(np.argmax(scores))] == text[start + head]
                    assert found[0][place, head] == right
                    assert found[1][place, head] == (order[place, head, 0] == text[start + head])
                    spoiled += found[1][place, head] and not right
            place += 1
    assert spoiled or found[0].sum() != found[1].sum()


def test_correlation_counts_what_it_mends_by_category(pair: Row, tiny_pair: Path, tmp_path: Path) -> None:
    asked = tmp_path / "questions.jsonl"
    lines = [f'{{"category": "{"one" if n % 2 else "two"}", "turns": ["the tree {n}?"]}}\n' for n in range(5)]
    asked.write_text("".join(lines))
    evaluate = pair | {"heads": f"{tiny_pair}/heads", "prompts": str(asked), "drafter": None}
    found = rows_of("correlation", evaluate, tmp_path, candidates=5, categories=True)
    ours, plain = found["with correlation"], found["without correlation"]
    assert ours["heads"] - plain["heads"] == pytest.approx(ours["mended"] - ours["spoiled"])
    gains = []
    for name, prompts in (("one", 2), ("two", 3)):
        rows = [found[f"{label} correlation [{name}]"] for label in ("with", "without")]
        assert all(len(row["pairs"]["heads"]["over"]) == prompts for row in rows)
        gains.append(rows[0]["heads"] - rows[1]["heads"])
    assert (ours["worst_gain"], ours["best_gain"]) == (min(gains), max(gains))
    worst = ("one", "two")[gains.index(min(gains))]
    pairs = ours["pairs"]["worst_gain"]
    assert pairs["under"] == found[f"with correlation [{worst}]"]["pairs"]["heads"]["under"]
    assert sum(pairs["over"]) / sum(pairs["under"]) == pytest.approx(ours["worst_gain"])
    for row in (ours, plain):
        whole = sum(row["pairs"]["heads"]["over"])
        parts = [found[f"{row['label']} [{name}]"]["pairs"]["heads"]["over"] for name in ("one", "two")]
        assert whole == sum(map(sum, parts)) == sum(sum(row["pairs"][f"head_{head}"]["over"]) for head in range(1, 5))


def test_saturation_is_decoding_with_tables_of_growing_parts(pair: Row, tiny_pair: Path, tmp_path: Path) -> None:
    evaluate = pair | {"heads": f"{tiny_pair}/heads", "limit": 3, "max_new_tokens": 6}
    settings = {"source": f"{tiny_pair}/answers.jsonl", "sizes": [5, 20], "sequences": 2, "candidates": 4}
    found = rows_of("saturation", evaluate, tmp_path, **settings)
    assert list(found) == ["r = 1", "part 1", "part 2", "all"]
    bench = open_case(recipe_of("saturation", evaluate, **settings).evaluate)
    tables = {path.parent: path.stat().st_mtime_ns for path in tmp_path.glob("counted-*/artifact.json")}
    assert len(tables) == 3
    for folder in tables:
        manifest = load_manifest(folder)
        row = found[{5: "part 1", 20: "part 2", None: "all"}[manifest.recipe["data"]["limit"]]]
        assert row["gain"] == pytest.approx(row["tokens_per_step"] / found["r = 1"]["tokens_per_step"] - 1)
        assert row["conversations"] == manifest.data["conversations"]
        parts = Parts(heads=bench.opened.parts.heads, table=BigramTable.load(folder))
        method = build_method("slim-s", parts, Sampling(), num_sequences=2, num_candidates=4)
        tallies = [
            decode(bench.opened.target, method, Sampling(), at, prompt, bench.limits).tally
            for at, prompt in enumerate(bench.prompts)
        ]
        assert row["pairs"]["tokens_per_step"]["over"] == [tally.tokens for tally in tallies]
        assert row["pairs"]["tokens_per_step"]["under"] == [tally.steps for tally in tallies]
    assert list(rows_of("saturation", evaluate, tmp_path, **settings).values()) == list(found.values())
    assert {folder: (folder / "artifact.json").stat().st_mtime_ns for folder in tables} == tables, "counted once"


def test_a_corpus_is_counted_in_place_of_the_table(pair: Row, tiny_pair: Path, tmp_path: Path) -> None:
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "out"
    corpus.write_text((tiny_pair / "corpus" / "train.jsonl").read_text())
    asked: Row = {"sources": ["unigram"], "temperatures": [1.0]}
    without = pair | {"table": None, "drafter": None}
    found = rows_of("acceptance", without, folder, counted=str(corpus), **asked)["unigram T=1"]
    (table,) = folder.glob("counted-*/artifact.json")
    given = rows_of("acceptance", pair | {"table": str(table.parent)}, tmp_path, **asked)["unigram T=1"]
    assert found["alpha"] == given["alpha"]
    # a corpus that has changed since is counted anew
    said = [{"messages": [{"role": "user", "content": "fast"}, {"role": "assistant", "content": "slow " * 200}]}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in said * 3))
    assert (
        rows_of("acceptance", without, folder, counted=str(corpus), **asked)["unigram T=1"]["alpha"] != found["alpha"]
    )


def test_energy_rows_say_why_there_are_no_joules(pair: Row, tmp_path: Path) -> None:
    found = rows_of("energy", pair, tmp_path, batches=[1, 2], runs=4, context=8)
    assert list(found) == ["batch 1", "batch 2"]
    assert all(row["seconds_per_run"] > 0 for row in found.values())
    claim = parse_claim('"batch 2".joules_per_run < 2 * "batch 1".joules_per_run')
    judgement = judge(claim, list(found.values()))
    assert (judgement.status == NOT_JUDGED) == (found["batch 1"]["joules_per_run"] is None)
    assert found["batch 1"]["why"].get("joules_per_run", "") in judgement.why
    assert (tmp_path / "energy.json").is_file()
