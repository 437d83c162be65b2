"""What llama.cpp's converter would not find by itself: names of tokenizers, settings, models of sentencepiece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.export.gguf import GGUF, read_gguf
from draftsmith.checkpoints.storage.places import split_revision
from draftsmith.data.tokenizers import train_bpe
from huggingface_hub import constants
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

CONVERTER = Path(__file__).parents[1] / "gguf_converter.py"
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
        about |= {"vocab_size": len(tokenizer), "tokenizer_fingerprint": None}
        about["target"] = target and dict(zip(("id", "revision"), split_revision(target), strict=True))
        save_artifact(tmp_path / name, kind="drafter", write=write, **about)
        return tmp_path / name

    return build


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "llama.cpp").mkdir()
    shutil.copyfile(CONVERTER, tmp_path / "llama.cpp" / "convert_hf_to_gguf.py")

    def run(artifact: Path, target: str | None = None) -> Path:
        options = ExportOptions(target=target, llama_cpp=tmp_path / "llama.cpp")
        export_artifact(artifact, "gguf", tmp_path / "exported", FORMATS, options)
        return tmp_path / "exported"

    return run


def test_a_tokenizer_of_ones_own_is_given_its_name(make: Make, export: Callable[[Path], Path]) -> None:
    assert read_gguf(export(make(our_bpe())) / "model.gguf").settings["tokenizer.ggml.pre"] == "gpt-2"


def test_an_older_file_of_a_tokenizer_says_less(make: Make, export: Callable[..., Path]) -> None:
    """Files written before there was `use_regex` split as those do that say true."""
    artifact = make(our_bpe())
    told = json.loads((artifact / "tokenizer.json").read_text())
    assert told["pre_tokenizer"].pop("use_regex") is True
    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")} | {"target": None}
    about |= {"vocab_size": 276, "tokenizer_fingerprint": None}

    def write(folder: Path) -> None:
        shutil.copytree(artifact, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("artifact.json"))
        (folder / "tokenizer.json").write_text(json.dumps(told))

    save_artifact(artifact.with_name("older"), kind="drafter", write=write, **about)
    assert read_gguf(export(artifact.with_name("older")) / "model.gguf").settings["tokenizer.ggml.pre"] == "gpt-2"
    told = []
    save_artifact(artifact.with_name("older"), kind="drafter", write=write, **about)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: it holds a JSON list"):
        export(artifact.with_name("older"))


def test_a_published_tokenizer_keeps_its_name(make: Make, export: Callable[[Path], Path]) -> None:
    folder = export(make(our_bpe(lambda backend: None, "<published>")))
    assert read_gguf(folder / "model.gguf").settings["tokenizer.ggml.pre"] == "published"


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
    assert found.settings["gptneox.rope.dimension_count"] == 8


def test_the_targets_sentencepiece_model_stands_in(make: Make, export: Callable[[Path], Path]) -> None:
    tokenizer = our_bpe()
    target = make(tokenizer, "target")
    found = read_gguf(export(make(tokenizer, "drafter", str(target))) / "model.gguf")
    assert "tokenizer.ggml.model" not in found.settings
    (target / "tokenizer.model").write_bytes(b"sentencepiece's")
    folder = export(target.with_name("drafter"))
    assert read_gguf(folder / "model.gguf").settings["tokenizer.ggml.model"] == "llama"
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_the_sentencepiece_model_of_a_target_on_the_hub_does_too(
    make: Make, export: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, target = make(our_bpe()), make(our_bpe(), "target")
    (target / "tokenizer.model").write_bytes(b"sentencepiece's")
    repo = tmp_path / "cache" / "models--me--target"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    target.rename(repo / "snapshots" / ("a" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = export(artifact, target="me/target")
    assert read_gguf(folder / "model.gguf").settings["tokenizer.ggml.model"] == "llama"


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


@pytest.mark.parametrize("revision", [None, "v2"])
def test_serving_fetches_a_target_of_the_hub(revision: str | None, make: Make, export: Callable[..., Path]) -> None:
    """The converter takes folders alone."""
    at = f"@{revision}" if revision else ""
    serving = (export(make(our_bpe(), target=f"me/target{at}")) / SERVING_FILE).read_text()
    fetched = "hf download me/target --local-dir model\n"
    assert f"{fetched}python convert_hf_to_gguf.py model --outfile target.gguf" in serving
    assert ("hf download me/target --revision v2 --local-dir target" in serving) is bool(revision)
    serving = (export(make(our_bpe(), target="/gone/target")) / SERVING_FILE).read_text()
    assert "```bash\npython convert_hf_to_gguf.py /gone/target --outfile target.gguf" in serving
