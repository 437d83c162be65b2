"""What llama.cpp's converter would not find by itself: names of tokenizers, settings, models of sentencepiece."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact import save_artifact
from draftsmith.checkpoints.export import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.export_gguf import GGUF
from draftsmith.checkpoints.gguf_file import read_gguf
from draftsmith.data.tokenizers import train_bpe
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

CONVERTER = Path(__file__).with_name("gguf_converter.py")
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FORMATS = {GGUF.name: GGUF}
TEXT = ["the drafter drafts, the target checks what the drafter drafted " * 4]


def our_bpe(change: Callable[[Tokenizer], Any] = lambda backend: None, *special: str) -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(TEXT, 256 + 20, ["<s>", *special, "</s>"])
    change(tokenizer.backend_tokenizer)
    return tokenizer


def set_to(name: str, value: Any) -> Callable[[Tokenizer], None]:
    """A change of a tokenizer, or with "model." before the name, of its model."""

    def change(backend: Tokenizer) -> None:
        setattr(backend.model if name.startswith("model.") else backend, name.removeprefix("model."), value)

    return change


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Make:
    """A function that writes a drafter with a tokenizer."""

    def build(
        tokenizer: PreTrainedTokenizerFast, name: str = "drafter", target: str | None = None, model: Any = None
    ) -> Path:
        model = model or make_llama(len(tokenizer), 2, **SIZES)

        def write(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
        about |= {"vocab_size": len(tokenizer), "target": target and {"id": target}, "tokenizer_fingerprint": None}
        save_artifact(tmp_path / name, kind="drafter", write=write, **about)
        return tmp_path / name

    return build


@pytest.fixture
def export(tmp_path: Path) -> Callable[[Path], Path]:
    (tmp_path / "llama.cpp").mkdir()
    shutil.copyfile(CONVERTER, tmp_path / "llama.cpp" / "convert_hf_to_gguf.py")

    def run(artifact: Path) -> Path:
        options = ExportOptions(llama_cpp=tmp_path / "llama.cpp")
        export_artifact(artifact, "gguf", tmp_path / "exported", FORMATS, options)
        return tmp_path / "exported"

    return run


def test_a_tokenizer_of_ones_own_is_given_its_name(make: Make, export: Callable[[Path], Path]) -> None:
    assert read_gguf(export(make(our_bpe())) / "model.gguf").values["tokenizer.ggml.pre"] == "gpt-2"


def test_a_published_tokenizer_keeps_its_name(make: Make, export: Callable[[Path], Path]) -> None:
    folder = export(make(our_bpe(lambda backend: None, "<published>")))
    assert read_gguf(folder / "model.gguf").values["tokenizer.ggml.pre"] == "published"


SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_to("normalizer", normalizers.NFC()), "it has a normalizer, NFC"),
        (set_to("pre_tokenizer", SPLIT), "its pre-tokenizer is Sequence"),
        (set_to("pre_tokenizer", None), "its pre-tokenizer is None"),
        (set_to("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "otherwise: add_prefix_space"),
        (set_to("pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)), "otherwise: use_regex"),
        (set_to("model.ignore_merges", True), "otherwise: ignore_merges"),
        (set_to("model", models.BPE({"a": 0}, [], byte_fallback=True)), "otherwise: byte_fallback"),
    ],
)
def test_a_tokenizer_that_splits_otherwise_is_refused(
    change: Callable[[Tokenizer], None], why: str, make: Make, export: Callable[[Path], Path]
) -> None:
    with pytest.raises(ValueError, match="does not know the tokenizer of") as refused:
        export(make(our_bpe(change)))
    assert why in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_settings_under_another_name_are_given(make: Make, export: Callable[[Path], Path]) -> None:
    tokenizer = our_bpe()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=48, rope_parameters=rotary))
    found = read_gguf(export(make(tokenizer, model=model)) / "model.gguf")
    assert found.values["gptneox.rope.dimension_count"] == 8


def test_the_targets_sentencepiece_model_stands_in(make: Make, export: Callable[[Path], Path]) -> None:
    tokenizer = our_bpe()
    target = make(tokenizer, "target")
    found = read_gguf(export(make(tokenizer, "drafter", str(target))) / "model.gguf")
    assert "tokenizer.ggml.model" not in found.values
    (target / "tokenizer.model").write_bytes(b"sentencepiece's")
    folder = export(target.with_name("drafter"))
    assert read_gguf(folder / "model.gguf").values["tokenizer.ggml.model"] == "llama"
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_serving_converts_a_target_as_the_drafter_was_converted(make: Make, export: Callable[[Path], Path]) -> None:
    tokenizer = our_bpe()
    target = make(tokenizer, "target")
    artifact = make(tokenizer, "drafter", str(target))
    serving = (export(artifact) / SERVING_FILE).read_text()
    assert f"draftsmith export {target} --to gguf --out target-gguf --llama-cpp" in serving
    assert "-m target-gguf/model.gguf -md exported/model.gguf --spec-type draft-simple" in serving
    (target / "artifact.json").unlink()
    shutil.rmtree(artifact)
    serving = (export(make(tokenizer, "drafter", str(target))) / SERVING_FILE).read_text()
    assert f"convert_hf_to_gguf.py {target} --outfile target.gguf" in serving
    assert "-m target.gguf" in serving
