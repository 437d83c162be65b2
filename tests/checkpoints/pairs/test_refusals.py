"""Error messages of the doctor name the invalid files and numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.pairs.repair import repair
from draftsmith.checkpoints.pairs.sides import read_model_info
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from transformers import LlamaForCausalLM

VOCAB = 280
Pair = tuple[Path, Path]


@pytest.fixture
def pair(make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Pair:
    target = tmp_path / "target"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    make_llama(VOCAB, **sizes, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(target)
    train_bpe(["a little text of words to merge, and more"], VOCAB, ("<s>", "</s>")).save_pretrained(target)
    return target, Path(shutil.copytree(target, tmp_path / "drafter"))


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def as_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def as_heads(folder: Path) -> None:
    shutil.rmtree(folder)
    save_artifact(
        folder, kind="heads", write=put("config.json", b"{}"), vocab_size=VOCAB, tokenizer_fingerprint=None, target=None
    )


UNREADABLE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing there": (shutil.rmtree, ()),
    "an adapter of nothing": (as_adapter, ("adapter",)),
    "heads": (as_heads, ("heads",)),
    "custom code": (put("config.json", b'{"model_type": "mine", "auto_map": {"AutoConfig": "code.C"}}'), ()),
    "no JSON": (put("config.json", b"{"), ()),
    "no vocabulary": (put("config.json", b'{"model_type": "vit"}'), ("vit", "vocab_size")),
    "damaged weights": (put("model.safetensors", b"\xff" * 64), ("model.safetensors",)),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_folders_without_a_model_are_refused(case: str, pair: Pair) -> None:
    change, parts = UNREADABLE[case]
    (pair[1] / "code.py").write_text("raise SystemExit('this was run')\n")
    change(pair[1])
    with pytest.raises(ValueError, match=str(pair[1])) as caught:
        read_model_info(str(pair[1]), load_tokenizer)
    assert all(part in str(caught.value) for part in parts)


def test_a_file_instead_of_a_model_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_info(str(pair[1] / "config.json"), load_tokenizer)


def test_repairs_that_are_refused(pair: Pair, tmp_path: Path) -> None:
    sides = [read_model_info(str(folder), load_tokenizer) for folder in pair]
    for out in (*pair, tmp_path):
        with pytest.raises(ValueError, match=str(out)):
            repair(*sides, out, "")
    train_bpe(["quite other words than those before"] * 3, 280, ("<s>", "</s>")).save_pretrained(pair[1])
    with pytest.raises(ValueError, match=r"tokens of .* are missing from the target's"):
        repair(sides[0], read_model_info(str(pair[1]), load_tokenizer), tmp_path / "out", "")
    assert not (tmp_path / "out").exists()
