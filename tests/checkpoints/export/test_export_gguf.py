"""GGUF exports with a stand-in for llama.cpp's converter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export.base import SERVING_FILE
from draftsmith.checkpoints.storage.gguf import read_gguf
from draftsmith.data.tokenizers import train_bpe
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import LlamaForCausalLM

VOCAB = 48
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TEXT = ["the drafter drafts, the target checks what the drafter drafted " * 4]
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gguf_is_written_by_the_converter_of_the_user(
    dtype: torch.dtype, make_drafter: Make, export: Export, llama_cpp: Path, target: Path
) -> None:
    artifact = make_drafter(dtype)
    out, report = export(artifact, "gguf", llama_cpp=llama_cpp)
    assert "all 21 tensors are identical" in report
    assert f"all tokens equal those of {target}" in report
    assert {path.name for path in out.iterdir()} == {"artifact.json", "README.md", "SERVING.md", "model.gguf"}
    assert "--spec-draft-n-max 4" in (out / SERVING_FILE).read_text()


def test_tied_weights_and_adapters(make_drafter: Make, make_adapter: Make, export: Export, llama_cpp: Path) -> None:
    out, report = export(make_drafter(tie_word_embeddings=True), "gguf", llama_cpp=llama_cpp)
    assert "all 20 tensors are identical" in report
    assert "output.weight" not in {tensor.name for tensor in read_gguf(out / "model.gguf").tensors}
    out, report = export(make_adapter(), "gguf", llama_cpp=llama_cpp, speculative_tokens=7)
    assert "all 21 tensors are identical" in report
    assert not [path for path in out.iterdir() if path.is_dir()]
    assert "--spec-draft-n-max 7" in (out / SERVING_FILE).read_text()


FAULTS: dict[str, tuple[str, ...]] = {
    "fails": ("exit code 1", "an architecture that it does not know", "line 39"),
    "cut off": ("model.gguf",),
    "fewer tokens": (f"{VOCAB - 1}", f"{VOCAB}"),
    "one value": ("model.layers.0.self_attn.q_proj.weight",),
    "one less": ("model.layers.1.mlp.up_proj.weight",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_converter_that_writes_nonsense_is_refused(
    fault: str, make_drafter: Make, refused: Callable[..., str], llama_cpp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    message = refused(make_drafter(), "gguf", llama_cpp=llama_cpp)
    for part in FAULTS[fault]:
        assert part in message
    assert "line 20\n" not in message


def our_bpe(change: Callable[[Tokenizer], Any] = lambda backend: None, *special: str) -> Any:
    tokenizer = train_bpe(TEXT, 256 + 20, ["<s>", *special, "</s>"])
    change(tokenizer.backend_tokenizer)
    return tokenizer


def set_to(name: str, value: Any) -> Callable[[Tokenizer], None]:
    """Return a function that sets an attribute of a tokenizer or, with the prefix "model.", of its model."""

    def change(backend: Tokenizer) -> None:
        setattr(backend.model if name.startswith("model.") else backend, name.removeprefix("model."), value)

    return change


@pytest.fixture
def make(save: Make, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Make:
    """Return a function that writes a drafter with a tokenizer."""

    def build(tokenizer: Any, name: str = "artifact", model: Any = None, also: Any = None) -> Path:
        model = model or make_llama(len(tokenizer), 2, **SIZES)

        def write(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if also is not None:
                also(folder)

        artifact = save(write, vocab_size=len(tokenizer), target=None)
        return artifact if name == "artifact" else artifact.rename(tmp_path / name)

    return build


@pytest.fixture
def converted(export: Export, llama_cpp: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that exports a drafter to GGUF and returns the metadata of the file."""

    def settings(artifact: Path, **options: Any) -> dict[str, Any]:
        out, _ = export(artifact, "gguf", llama_cpp=llama_cpp, **options)
        return {name: field.contents() for name, field in read_gguf(out / "model.gguf").fields.items()}

    return settings


def older(folder: Path) -> None:
    """Remove `use_regex` from tokenizer.json, as earlier versions of the tokenizers library did not write it."""
    state = json.loads((folder / "tokenizer.json").read_text())
    assert state["pre_tokenizer"].pop("use_regex") is True
    (folder / "tokenizer.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("special", "also", "name"), [((), None, "gpt-2"), ((), older, "gpt-2"), (("<published>",), None, "published")]
)
def test_pre_tokenizers_are_named(special: tuple[str, ...], also: Any, name: str, make: Make, converted: Any) -> None:
    assert converted(make(our_bpe(lambda backend: None, *special), also=also))["tokenizer.ggml.pre"] == name


SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    "change",
    [
        set_to("normalizer", normalizers.NFC()),
        set_to("pre_tokenizer", SPLIT),
        set_to("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        set_to("model.ignore_merges", True),
    ],
)
def test_an_unknown_pre_tokenizer_is_refused(
    change: Callable[[Tokenizer], None], make: Make, refused: Callable[..., str], llama_cpp: Path
) -> None:
    message = refused(make(our_bpe(change)), "gguf", llama_cpp=llama_cpp)
    assert "does not support the tokenizer" in message
    assert "Traceback" not in message


def test_the_targets_sentencepiece_model_is_used(make: Make, converted: Any) -> None:
    tokenizer = our_bpe()
    pieces = make(tokenizer, "pieces")
    artifact = make(tokenizer)
    assert "tokenizer.ggml.model" not in converted(artifact, target=str(pieces))
    (pieces / "tokenizer.model").write_bytes(b"sentencepiece's")
    assert converted(artifact, target=str(pieces))["tokenizer.ggml.model"] == "llama"
