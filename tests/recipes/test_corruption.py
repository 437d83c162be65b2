"""A finished set of files, damaged at random, and the commands that read it: each says what is damaged, or does what it
does with the whole set. Nothing else than ValueError and OSError comes out, which the command line reports in a line.

What is not looked at: texts of the user's (recipes) are read as they are, and of `artifact.json`, which has no hash of
itself, only what the artifact's files are checked by.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.storage.safe_read import file_hash
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.artifact import Run
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.drafter import drafter_parts
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.evaluation.journal import Journal
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.commands.training.train import accelerator_for, run_train
from draftsmith.recipes.report.page import run_report
from draftsmith.recipes.schema.loading import load_recipe, load_training, parse_recipe
from draftsmith.recipes.schema.results import load_results

Read = Callable[[Path], Any]
"""What a command makes of the set, as values that can be compared."""
LINES = [["autoregressive", number, 0, [number, 7], {"tokens": 2}, 0.5, 0.0] for number in range(6)]


def weights_and_losses(home: Path) -> Any:
    run_train(load_training(str(home / "drafter.yaml")))
    training = verify_artifact(home / "drafter").training or {}
    return file_hash(home / "drafter" / "model.safetensors"), training["first_loss"], training["last_loss"]


def data_of_artifacts(home: Path) -> Any:
    names = ("drafter", "heads", "table")
    kept = [verify_artifact(home / "pair" / name).kind for name in names]
    files = [path for name in names for path in (home / "pair" / name).rglob("*") if path.name != "artifact.json"]
    return kept, {path: file_hash(path) for path in sorted(files) if path.is_file()}


def results_of(home: Path) -> Any:
    results = load_results(home / "results.json")
    run_report([home / "results.json"], home / "report.html")
    return results


def answers(home: Path) -> Any:
    run_regenerate(load_recipe(str(home / "answers.yaml")))  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (home / "answers.jsonl").read_text().splitlines()]
    return {row["key"]: (row["messages"], row["finish"]) for row in rows}


def recipes(home: Path) -> Any:
    for name in ("answers.recipe.yaml", "results.recipe.yaml", "pair/recipe.yaml"):
        load_recipe(str(home / name))


def journal(home: Path) -> Any:
    with Journal(home / "evaluated.json", "runs", {"seed": 0}) as opened:
        return opened.lines == LINES[: len(opened.lines)]  # what is lost is done again


READERS: dict[str, tuple[Read, tuple[str, ...]]] = {
    "train": (weights_and_losses, ("drafter.state/**/*", "prepared/**/*")),
    "artifacts": (data_of_artifacts, ("pair/drafter/*", "pair/heads/*", "pair/table/*")),
    "results": (results_of, ("results.json",)),
    "answers": (answers, ("answers.jsonl", "answers.jsonl.json")),
    "recipes": (recipes, ("*.recipe.yaml", "pair/recipe.yaml")),
    "journal": (journal, ("evaluated.json.state/*",)),
}
WEIGHTS = {"train": 6, "artifacts": 4, "results": 3, "answers": 4, "recipes": 1, "journal": 2}


@pytest.fixture(scope="module")
def whole(tiny_drafter: Any, tiny_pair: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of it, and its copy, from which each trial restores it."""
    home = tmp_path_factory.mktemp("whole") / "home"
    home.mkdir()
    values = tiny_drafter(home)
    (home / "drafter.yaml").write_text(yaml.safe_dump(values))
    shutil.copytree(tiny_pair, home / "pair")
    recipe = load_training(str(home / "drafter.yaml"))
    shutil.copyfile(home / "drafter.yaml", home / "pair" / "recipe.yaml")
    accelerator = accelerator_for(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = prepare_data(recipe.data, tokenizer, quiet=True)
    parts = drafter_parts(recipe, tokenizer, prepared, accelerator.device)  # type: ignore[arg-type]
    Run(recipe, home / "drafter", accelerator, tokenizer, prepared).fit(parts.task, False)  # type: ignore[arg-type]
    asked: dict[str, Any] = {
        "kind": "regenerate",
        "out": str(home / "answers.jsonl"),
        "source": str(corpus / "rows.json"),
    }
    asked |= {"target": str(home / "pair" / "target"), "template": "chatml", "max_new_tokens": 8, "on_length": "keep"}
    (home / "answers.yaml").write_text(yaml.safe_dump(asked | {"limit": 6}))
    answers(home)
    evaluated = {"kind": "evaluate", "out": str(home / "results.json"), "template": "chatml", "limit": 2}
    evaluated |= {"prompts": str(corpus / "rows.json"), "max_new_tokens": 8, "energy": "off"}
    evaluated |= {name: str(home / "pair" / name) for name in ("target", "drafter")}
    evaluated |= {"methods": [{"method": "autoregressive"}, {"method": "speculative"}]}
    run_evaluate(parse_recipe(evaluated, "the test's recipe"))  # type: ignore[arg-type]
    with Journal(home / "evaluated.json", "runs", {"seed": 0}) as opened:
        for line in LINES:
            opened.add(line)
    shutil.copytree(home, home.with_name("copy"))
    return home


def restore(home: Path) -> None:
    shutil.rmtree(home)
    shutil.copytree(home.with_name("copy"), home)


def flip(path: Path, other: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 40)))


def delete(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()


def empty(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def garble(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice([b"{}", b"[]", b"null", b"7", b'{"schema": 2}', b"[" * 100_000, b"{\n\n]", b"\n"]))


def spoil(path: Path, other: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    place = rng.randrange(len(content))
    path.write_bytes(content[:place] + b"\xff\xfe" + content[place:])


def become_folder(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def become_link(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice([other, path.with_name("nowhere")]))


def swap(path: Path, other: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    shutil.copyfile(other, path)
    other.write_bytes(content)


DAMAGES = (flip, flip, flip, cut, lengthen, delete, empty, garble, spoil, become_folder, become_link, swap)


def damaged(home: Path, name: str, rng: random.Random) -> tuple[list[Path], str]:
    """Which files of the set were damaged, and how."""
    found = {path for pattern in READERS[name][1] for path in home.glob(pattern)}
    files = sorted(path for path in found if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    other, damage = rng.choice([each for each in files if each != path] or [home / "answers.yaml"]), rng.choice(DAMAGES)
    damage(path, other, rng)
    return [path, other] if damage is swap else [path], damage.__name__


def outcome(home: Path, name: str) -> tuple[Any, list[str]]:
    """What the command makes of the set, or its error; and all that it said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = READERS[name][0](home)
        except (ValueError, OSError) as error:
            return None, [str(error)]
    return found, [str(warning.message) for warning in caught]


def trials(home: Path, number: int, seed: int) -> Counter[str]:
    """Damage the set so many times; how often it was named, and how often it changed nothing."""
    rng, ends = random.Random(seed), Counter[str]()
    expected, faults = dict[str, Any](), list[str]()
    for name in READERS:
        restore(home)
        expected[name], _ = outcome(home, name)
        assert expected[name] is not None or name == "recipes"
    for trial in range(number):
        name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        restore(home)
        files, damage = damaged(home, name, rng)
        case = f"trial {trial} of seed {seed}: {damage} {[str(file.relative_to(home)) for file in files]}"
        try:
            found, said = outcome(home, name)
        except Exception as error:
            faults.append(f"{case}: {error!r}")
            continue
        if any(part in text for file in files for part in (file.name, file.parent.name) for text in said):
            ends["named"] += 1
        elif said:
            faults.append(f"{case} ended in {said}")
        elif found != expected[name]:
            faults.append(f"{case} changed what {name} gives, and nothing was said")
        else:
            ends["changed nothing"] += 1
    assert not faults, "\n".join(faults)
    return ends


def test_damage_is_named_or_without_effect(whole: Path) -> None:
    ends = trials(whole, 20, seed=0)
    assert ends["named"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_two_hundred_damages_are_named_or_without_effect(whole: Path, seed: int) -> None:
    ends = trials(whole, 200, seed)
    assert ends["named"] >= 100
