"""Each command that reads a damaged file names this file in its error, or is not affected.

Only ValueError and OSError may be raised, which the command line reports in one line.
"""

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.storage.safe_read import file_hash
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_training


def train(home: Path) -> Any:
    run_train(load_training(str(home / "drafter.yaml")))
    training = verify_artifact(home / "drafter").training or {}
    return file_hash(home / "drafter" / "model.safetensors"), training["first_loss"], training["last_loss"]


def artifacts(home: Path) -> Any:
    return [verify_artifact(home / "pair" / name).kind for name in ("drafter", "heads", "table")]


READERS: dict[Callable[[Path], Any], tuple[str, ...]] = {
    train: ("drafter.state/checkpoints/*/*.safetensors", "drafter.state/checkpoints/*/*.pt", "prepared/**/*.npy"),
    artifacts: ("pair/*/*.safetensors", "pair/*/*.json"),
}


@pytest.fixture(scope="module")
def whole(tiny_drafter: Any, tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with artifacts and an unfinished run, and a copy from which tests restore it."""
    home = tmp_path_factory.mktemp("whole") / "home"
    home.mkdir()
    (home / "drafter.yaml").write_text(yaml.safe_dump(tiny_drafter(home)))
    for name in ("drafter", "heads", "table"):
        shutil.copytree(tiny_pair / name, home / "pair" / name)
    run_train(load_training(str(home / "drafter.yaml")))
    shutil.rmtree(home / "drafter")
    shutil.copytree(home, home.with_name("copy"))
    return home


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def garble(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice([b"{}", b"[]", b"7", b"\xff\xfe", b"{\n\n]", b""]))


DAMAGES = (flip, cut, delete, garble)


@pytest.mark.parametrize("read", READERS)
def test_damaged_files_are_named_or_have_no_effect(whole: Path, read: Callable[[Path], Any]) -> None:
    rng, expected, named = random.Random(0), None, 0
    for trial in range(9):
        shutil.rmtree(whole)
        shutil.copytree(whole.with_name("copy"), whole)
        if trial == 0:
            expected = read(whole)
            continue
        files = sorted(path for pattern in READERS[read] for path in whole.glob(pattern))
        path, damage = rng.choice([path for path in files if path.name != "artifact.json"]), DAMAGES[trial % 4]
        damage(path, rng)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                original, messages = read(whole), []
            except (ValueError, OSError) as error:
                original, messages = None, [str(error)]
        messages += [str(warning.message) for warning in caught]
        is_named = any(part in text for text in messages for part in (path.name, path.parent.name))
        assert is_named or (original == expected and not messages), f"{damage.__name__} {path}: {messages}"
        named += is_named
    assert named >= 4
