"""Saturation: tables of the first n conversations are exactly that, each is decoded with, and the verdict follows."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.conversations import CorpusReport
from draftsmith.data.prompts import load_prompts
from draftsmith.data.rendering.render import render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.evaluation.metrics import total
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.data import prepare_data, training_conversations
from draftsmith.recipes.assemble.table.count import recipe_documents
from draftsmith.recipes.commands.training.saturation import enough_from, paired_gain, per_step, run_saturation
from draftsmith.recipes.commands.training.saturation_tables import (
    COUNTS_FILE,
    count_parts_identity,
    default_sizes,
    sizes_to_show,
)
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, parse_recipe
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter
from draftsmith.train.table.documents import count_laid, laid_end_to_end

SIZES = [4, 10, 25]


@pytest.fixture(scope="module")
def heads(stand_ins: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of a tiny target; both have learned enough of the corpus that it matters which table prunes."""
    folder = tmp_path_factory.mktemp("heads")
    train = {"steps": 40, "global_batch": 4, "micro_batch": 4, "learning_rate": 1e-2, "evaluate_every": 0}
    common = {
        "data": {"source": str(stand_ins.rows), "block_tokens": 320, "cache": str(folder / "prepared")},
        "train": train | {"save_every": 0, "precision": "no"},
        "measure": {"prompts": 0, "blocks": 0},
    }
    target = {"kind": "drafter", "out": str(folder / "target"), "model": {"source": str(tiny(stand_ins))}}
    own = {"kind": "heads", "out": str(folder / "heads"), "target": str(folder / "target"), "num_heads": 2}
    for recipe in (target, own):
        run_train(parse_recipe(recipe | common, "test"))  # type: ignore[arg-type]
    return folder / "heads"


@pytest.fixture
def recipe_file(stand_ins: Any, heads: Path, tmp_path: Path) -> Path:
    """A recipe for a table of 60 conversations, of which a fifth is held out, with a section for saturation."""
    recipe = {
        "kind": "table",
        "out": str(tmp_path / "table"),
        "tokenizer": str(tiny(stand_ins)),
        "data": {"source": str(stand_ins.rows), "heldout_share": 0.2, "cache": str(tmp_path / "prepared")},
        "saturation": {
            "target": str(heads.with_name("target")),
            "heads": str(heads),
            "limit": 5,
            "new_tokens": 8,
            "sizes": SIZES,
            "sequences": [1, 4],
            "device": "cpu",
        },
    }
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def tiny(stand_ins: Any) -> Path:
    found: Path = stand_ins.target("lmsys/vicuna-7b-v1.3")
    return found


def load(file: Path, *changes: str) -> TableRecipe:
    recipe = load_recipe(str(file), changes)
    assert isinstance(recipe, TableRecipe)
    return recipe


def conversations(recipe: TableRecipe) -> list[Any]:
    return list(training_conversations(recipe.data, [CorpusReport()], tell=False))


def test_each_table_is_that_of_the_first_conversations(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load(recipe_file)
    results = run_saturation(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer)
    template = get_template(recipe.data.template, tokenizer)
    documents = [render(row, template, tokenizer).ids for row in conversations(recipe)]
    assert [row["conversations"] for row in results["sizes"]] == [*SIZES, len(documents)]
    assert [row["whole"] for row in results["sizes"]] == [False] * len(SIZES) + [True]
    for row in results["sizes"]:
        table, wanted = BigramTable.load(Path(row["folder"])), documents[: row["conversations"]]
        expected = BigramTable.from_documents(wanted, len(tokenizer))
        for name in ("row_ptr", "col", "count", "unigram"):
            assert torch.equal(getattr(table, name), getattr(expected, name)), (row["conversations"], name)
        assert row["tokens"] == sum(map(len, wanted))
        assert row["pairs"] == sum(len(ids) - 1 for ids in wanted)
        assert row["entries"] == len(expected.col) == round(row["density"] * len(tokenizer) ** 2)
        file = Path(row["folder"]) / "table.safetensors"
        assert 0 < file.stat().st_size - row["megabytes"] * 1e6 < 2000, "all but the header"
    assert not (tmp_path / "table.saturation" / "counts").exists(), "parts are not kept beside their sums"
    assert not (tmp_path / "table").exists(), "saturation makes no artifact"
    again = load_recipe(str(tmp_path / "table.saturation" / "recipe.yaml"))
    assert again == recipe, "the resolved recipe lies beside the results"


def test_what_is_written_is_what_decoding_gives(recipe_file: Path, heads: Path, capsys: Any) -> None:
    """At temperature 1, where prompts draw other numbers and end at other places."""
    recipe = load(recipe_file, "saturation.temperature=1.0", "saturation.new_tokens=16")
    results = run_saturation(recipe)
    assert recipe.saturation is not None
    scorer, module = wrap_model(load_model(recipe.saturation.target)), load_heads(heads)
    tokenizer = load_tokenizer(recipe.tokenizer)
    held = prepare_data(recipe.data, tokenizer, quiet=True).folder / "heldout.jsonl"
    prompts = [ids for _, ids in load_prompts(str(held), recipe.data.template, tokenizer, 5, 1024)]
    limits, sampling = Limits(16, (int(tokenizer.eos_token_id),)), Sampling(1.0)
    assert results["prompts"] == len(prompts) == 5
    counts = json.loads((Path(f"{recipe.out}.saturation") / "saturation.json").read_text())["counts"]
    for name, by_sequences in counts.items():
        table = None if name == "none" else BigramTable.load(Path(f"{recipe.out}.saturation") / "tables" / name)
        for sequences, pairs in by_sequences.items():
            ways: list[dict[str, Any]] = [{}]
            if table is None:
                ways = [{"correlation": "none", "lengths": lengths} for lengths in ("all", "full")]
            tried = []
            for options in ways:
                parts = Parts(heads=module, table=table)
                method = build_method("slim-s", parts, sampling, sequences=int(sequences), **options)
                tried.append(
                    [decode(scorer, method, sampling, at, ids, limits).tally for at, ids in enumerate(prompts)]
                )
            tallies = max(
                tried, key=lambda each: sum(tally.tokens for tally in each) / sum(tally.steps for tally in each)
            )
            assert pairs == [[tally.tokens, tally.steps] for tally in tallies]
            entry = results["baseline"] if table is None else next(
                row["sequences"] for row in results["sizes"] if str(row["conversations"]) == name
            )  # fmt: skip
            assert entry[sequences]["tokens_per_step"] == pytest.approx(total(tallies).metrics()["tokens_per_step"])
    assert len({json.dumps(pairs) for pairs in counts.values()}) > 2, "which table it is makes a difference"
    shown = capsys.readouterr().out
    for row in results["sizes"]:
        assert f"{row['conversations']:,}" in shown
        assert f"{row['entries']:,}" in shown
    assert results["rule"] in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 120


def counts_of(*per_step: float, prompts: int = 12, noise: float = 0.0, seed: int = 0) -> list[np.ndarray]:
    """Counts of so many tokens per step: 100 steps a prompt, prompts apart from each other, noise beside that."""
    rng = np.random.default_rng(seed)
    easy_P = rng.uniform(0.8, 1.2, prompts)
    steps_P = np.full(prompts, 100)
    tokens = (np.rint(100 * value * easy_P + 100 * noise * rng.standard_normal(prompts)) for value in per_step)
    return [np.stack((tokens_P.astype(np.int64), steps_P), 1) for tokens_P in tokens]


def test_gains_are_paired() -> None:
    base, more = counts_of(1.5, 1.65)
    gain, (low, high) = paired_gain(more, base)
    assert gain == pytest.approx(0.1, abs=0.01)
    assert 0.09 < low < gain < high < 0.11, "prompts differ by far more than that, and each is compared with itself"
    alone = per_step(more)[1]
    assert alone[1] - alone[0] > 5 * 1.5 * (high - low)
    assert paired_gain(base, base) == (0.0, (0.0, 0.0))
    assert per_step(base)[0] == pytest.approx(base[:, 0].sum() / base[:, 1].sum())
    low, high = per_step(base)[1]
    rng = np.random.default_rng(1)
    drawn = [base[rng.integers(12, size=12)].sum(0) for _ in range(4000)]
    assert (low, high) == pytest.approx(np.quantile([t / s for t, s in drawn], [0.025, 0.975]), abs=0.01)


@pytest.mark.parametrize(
    ("curve", "least", "place"),
    [
        ((1.2, 1.4, 1.6, 1.6, 1.6), 0.01, 2),
        ((1.2, 1.4, 1.6, 1.8, 2.0), 0.01, 4),
        ((1.6, 1.6, 1.6, 1.6, 1.6), 0.01, 0),
        ((1.6, 1.4, 1.6, 1.6, 1.6), 0.01, 2),  # a larger table that is worse: the small one was luck
        ((1.7, 1.7, 1.6, 1.5, 1.6), 0.01, 4),
        ((1.6, 1.65, 1.7, 1.7, 1.7), 0.05, 1),  # smaller gains than asked for do not pay
        ((2.0, 1.9, 1.8, 1.7, 1.6), 0.01, 0),  # larger tables that do harm do not pay either
        ((1.5,), 0.01, 0),
    ],
)
def test_the_size_beyond_which_more_does_not_pay(curve: tuple[float, ...], least: float, place: int) -> None:
    found, most_lost = enough_from(counts_of(*curve), least)
    assert found == place
    if place < len(curve) - 1:
        assert most_lost >= paired_gain(counts_of(*curve)[-1], counts_of(*curve)[place])[0]


def test_what_few_prompts_cannot_tell_apart_does_not_pay_and_is_said() -> None:
    swings_P = 40 * (-1) ** np.arange(10)
    small, whole = (np.stack((tokens_P, np.full(10, 100)), 1) for tokens_P in (150 - swings_P, 155 + swings_P))
    found, most_lost = enough_from([small, whole], 0.01)
    assert found == 0, "3 % more, but half of the prompts have far less"
    assert most_lost > 0.2, "the upper end of the interval says how much may have been missed"
    found, _ = enough_from(counts_of(1.4, 1.45, 1.5, 1.55, prompts=400, noise=0.1), 0.01)
    assert found == 3, "many prompts tell"


def test_default_sizes() -> None:
    sizes = default_sizes()
    assert [next(sizes) for _ in range(7)] == [1, 2, 5, 10, 20, 50, 100]
    for whole, first, number in (
        (1_000_000, 1000, 10), (10_000, 1000, 4), (9999, 100, 7), (500, 5, 7), (64, 1, 7), (1, 1, 1),
    ):  # fmt: skip
        sizes = [*takewhile(lambda size: size < whole, default_sizes()), whole]  # noqa: B023 - used at once
        shown = sizes_to_show(sizes)
        assert (shown[0], shown[-1], len(shown)) == (first, whole, number)
        assert shown == sizes[-number:]


def test_a_stopped_and_a_killed_run_go_on(recipe_file: Path, tmp_path: Path, launcher: Any) -> None:
    changes = ["saturation.limit=8", "saturation.new_tokens=30", "saturation.sequences=[1, 4]"]
    whole = run_saturation(load(recipe_file, *changes, f"out={tmp_path / 'other'}"))
    folder = tmp_path / "table.saturation"
    command = ["train", str(recipe_file), "--saturation", *changes]
    kept: dict[str, Any] = {}
    stamps: dict[Path, int] = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = launcher.start(*command)
        while process.poll() is None and len(measured(folder)) <= len(kept):
            time.sleep(0.005)
        process.send_signal(number)
        code, errors = process.ended()
        assert code == (143 if number == signal.SIGTERM else -9), errors
        if number == signal.SIGTERM:
            assert "the same command goes on from what" in errors
        now = measured(folder)
        assert len(kept) < len(now) < len(SIZES) + 2, "it was stopped in the middle"
        assert now.items() >= kept.items(), "what was measured is not measured again"
        kept = now
        files = {path: path.stat().st_mtime_ns for path in folder.glob("tables/*/*")}
        assert files.items() >= stamps.items()
        stamps = files
    code, said = launcher.run(*command)
    assert code == 0, said
    assert {path: path.stat().st_mtime_ns for path in folder.glob("tables/*/*")} == stamps, "nothing is counted again"
    results = json.loads((folder / "saturation.json").read_text())
    assert results["counts"].items() >= kept.items()
    for key in ("baseline", "verdict", "prompts", "rule"):
        assert results[key] == json.loads(json.dumps(whole[key]))
    mine, theirs = ([{**row, "folder": ""} for row in found["sizes"]] for found in (results, whole))
    assert mine == json.loads(json.dumps(theirs))


def measured(folder: Path) -> dict[str, Any]:
    file = folder / "saturation.json"
    found: dict[str, Any] = json.loads(file.read_text())["counts"] if file.is_file() else {}
    return found


def test_a_count_that_was_stopped_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    """What a killed run leaves: whole folders of counted parts, one in the middle, none of the later ones."""
    recipe = load(recipe_file)
    whole = run_saturation(recipe.model_copy(update={"out": str(tmp_path / "other")}))
    tokenizer, folder = load_tokenizer(recipe.tokenizer), tmp_path / "table.saturation"
    folder.mkdir()
    identity = count_parts_identity(recipe, tokenizer)
    (folder / COUNTS_FILE).write_text(json.dumps({"identity": identity, "parts": None}))
    rows = list(enumerate(conversations(recipe)))
    for part, (first, end) in enumerate([(0, 4), (4, 10), (10, 17)]):
        with PairCounter(len(tokenizer), folder / "counts" / str(part)) as counter:
            batches = laid_end_to_end(recipe_documents(recipe, tokenizer, rows[first:end]))
            count_laid(batches, counter, save_seconds=100, progress=lambda place: None)
    runs = {path: path.stat().st_ino for path in (folder / "counts" / "0").iterdir()}
    assert runs
    results = run_saturation(recipe)
    for mine, theirs in zip(results["sizes"], whole["sizes"], strict=True):
        assert {**mine, "folder": ""} == {**theirs, "folder": ""}
        files = [Path(row["folder"]) / "table.safetensors" for row in (mine, theirs)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_other_settings_measure_anew_and_other_counts_count_anew(
    recipe_file: Path, tmp_path: Path, capsys: Any
) -> None:
    run_saturation(load(recipe_file))
    tables = tmp_path / "table.saturation" / "tables"
    stamps = {path: path.stat().st_mtime_ns for path in tables.glob("*/*")}
    capsys.readouterr()
    run_saturation(load(recipe_file))
    assert "decoding" not in capsys.readouterr().err
    run_saturation(load(recipe_file, "saturation.temperature=1.0"))
    assert "was measured with other settings (section): measuring anew" in capsys.readouterr().err.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in tables.glob("*/*")} == stamps
    results = run_saturation(load(recipe_file, "saturation.sizes=[7]"))
    assert "counting anew" in capsys.readouterr().err
    assert results["sizes"][0]["conversations"] == 7
    assert len(list(tables.iterdir())) == 2
    results = run_saturation(load(recipe_file, "saturation.sizes=[7]", "count.pairs=answers"))
    said = " ".join(capsys.readouterr().err.split())
    assert 'with other settings (count.pairs: "documents" there, "answers" here)' in said
    counts = tables.parent / COUNTS_FILE
    found = json.loads(counts.read_text())
    found["parts"][-1]["tokens"] = 10**7  # as if it had been hours of work
    counts.write_text(json.dumps(found))
    recipe = (tables.parent / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match=r"saturation.sizes: \[7\] there, \[8\] here.*set them back to go on"):
        run_saturation(load(recipe_file, "saturation.sizes=[8]", "count.pairs=answers"))
    assert (tables.parent / "recipe.yaml").read_text() == recipe
    assert len(list(tables.iterdir())) == 2


def test_tables_are_pruned_as_the_recipe_prunes(recipe_file: Path) -> None:
    whole = run_saturation(load(recipe_file))
    results = run_saturation(load(recipe_file, "prune={top: 2}"))
    for pruned, row in zip(results["sizes"], whole["sizes"], strict=True):
        assert pruned["entries"] < row["entries"]
        assert pruned["pairs"] == row["pairs"]
        assert 0 < pruned["mass"] < row["mass"] == 1


def test_the_plot_is_grey_and_a_missing_matplotlib_is_said(
    recipe_file: Path, tmp_path: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from matplotlib.image import imread

    code, said = launcher.run("train", str(recipe_file), "--saturation")
    assert code == 0, said
    plot = tmp_path / "table.saturation" / "saturation.png"
    pixels = imread(plot)[..., :3]
    assert (pixels == pixels[..., :1]).all(), "nothing is told by colour"
    assert 0.005 < (pixels < 0.5).mean() < 0.3
    plot.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_saturation(load(recipe_file, "saturation.temperature=0.5"))
    assert "pip install draftsmith[report]" in capsys.readouterr().err
    assert not plot.exists()
    assert json.loads((plot.with_suffix(".json")).read_text())["recipe"]["saturation"]["temperature"] == 0.5


def test_mistakes_are_found_before_anything_is_counted(stand_ins: Any, recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a section `saturation`"):
        run_saturation(load(recipe_file, "saturation=null"))
    with pytest.raises(ValueError, match=r"have a vocabulary of 320 tokens, the table of 400"):
        run_saturation(load(recipe_file, "vocab_size=400"))
    other = tmp_path / "tokenizer"
    shutil.copytree(tiny(stand_ins), other)
    known = json.loads((other / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    first, second = list(vocabulary)[60:62]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"were made with another tokenizer than .*: the fingerprints are"):
        run_saturation(load(recipe_file, f"tokenizer={other}"))
    for sizes in ("[5, 5]", "[10, 5]", "[0, 5]"):
        with pytest.raises(ValueError, match=r"`sizes` is .* rising, each once"):
            load(recipe_file, f"saturation.sizes={sizes}")
    with pytest.raises(ValueError, match="there is no artifact at"):
        run_saturation(load(recipe_file, f"saturation.heads={tmp_path / 'none'}"))
    assert not (tmp_path / "table.saturation" / "counts").exists()


def test_a_corpus_without_anything_to_compare_is_refused(recipe_file: Path) -> None:
    rows = len(conversations(load(recipe_file)))
    with pytest.raises(ValueError, match=r"the corpus has [01] conversations, and there are no parts"):
        run_saturation(load(recipe_file, "saturation.sizes=[]", "data.limit=1"))
    with pytest.raises(ValueError, match=f"has {rows} conversations, and the smallest size .* is {rows}"):
        run_saturation(load(recipe_file, f"saturation.sizes=[{rows}]"))


def test_a_small_corpus_is_cut_small(recipe_file: Path) -> None:
    recipe = load(recipe_file, "saturation.sizes=[]", "saturation.limit=3", "saturation.new_tokens=2")
    rows = len(conversations(recipe))
    results = run_saturation(recipe)
    assert [row["conversations"] for row in results["sizes"]] == [1, 2, 5, 10, 20, rows]
    assert [row["whole"] for row in results["sizes"]] == [False] * 5 + [True]


def test_prompts_that_nobody_holds_out_are_missed_before_anything_is_counted(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`data.heldout_share` is 0 .* nothing would be held out"):
        run_saturation(load(recipe_file, "data.heldout_share=0.0"))
    with pytest.raises(ValueError, match="`prune`: a table of 320 tokens takes"):
        run_saturation(load(recipe_file, "prune={megabytes: 0.001}"))
    assert not (tmp_path / "table.saturation").exists()


def test_only_one_process(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process"):
        run_saturation(load(recipe_file))
