"""Heads exported for serving engines, read by reimplementations of the loader of each engine.

Each `*_reads` function finds the heads in a folder as the loader of that engine does, and computes their logits with
plain torch. Shape letters: K heads, L residual blocks, V vocabulary, D hidden, B hidden states.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.checkpoints.export.base import SERVING_FILE
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.data.tokenizers import train_bpe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

VOCAB, HIDDEN = 48, 16
CASES: dict[str, dict[str, Any]] = {
    "one block": {"num_heads": 3, "num_layers": 1},
    "two blocks": {"num_heads": 2, "num_layers": 2},
    "no blocks": {"num_heads": 2, "num_layers": 0},
    "low rank": {"num_heads": 3, "num_layers": 1, "projection": "low-rank", "rank": 5},
    "the target's": {"num_heads": 3, "num_layers": 1, "projection": "target"},
}
STATES_BD = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
Make = Callable[..., Path]
Export = Callable[..., tuple[Path, str]]


def logits_of(tensors: dict[str, Tensor], weight: str, bias: str | None, tail: str, sizes: tuple[int, int]) -> Tensor:
    """Compute the logits [B, K, V] of `sizes` (heads, blocks); names of tensors contain `{k}` (head), `{l}` (block)."""
    logits = []
    for k in range(sizes[0]):
        x = STATES_BD
        for layer in range(sizes[1]):
            inner = x @ tensors[weight.format(k=k, l=layer)].float().T
            if bias is not None:
                inner = inner + tensors[bias.format(k=k, l=layer)].float()
            x = x + inner * torch.sigmoid(inner)
        logits.append(x @ tensors[tail.format(k=k)].float().T)
    return torch.stack(logits, 1)


def vllm_reads(folder: Path, drafted: int, target_vocab: int) -> Tensor:
    """Load heads as vLLM's Medusa model does, and return their logits.

    The number of heads is the number of draft tokens. Every safetensors file is read and unknown tensors are ignored.
    A missing block is an error, and a missing projection stays uninitialised.
    """
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert config.get("architectures", ["MedusaModel"]) == ["MedusaModel"]
    layers = [value for key, value in config.items() if "num" in key and "heads" not in key and "layers" in key][-1]
    assert config["hidden_size"] == HIDDEN
    assert config["medusa_fc_bias"]
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(drafted):
        for layer in range(layers):
            shapes |= {f"blocks.{k}.layers.{layer}.weight": (HIDDEN, HIDDEN)}
            shapes |= {f"blocks.{k}.layers.{layer}.bias": (HIDDEN,)}
        shapes[f"lm_heads.{k}.weight"] = (target_vocab, HIDDEN)
    loaded = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for path in sorted(folder.glob("*.safetensors")):
        for stored, tensor in load_file(path).items():
            parts = stored.split(".")
            target_name = f"blocks.{parts[0]}.layers.{parts[1]}" if "linear" in parts else f"lm_heads.{parts[0]}"
            name = f"{target_name}.{parts[-1]}"
            if name in loaded:
                assert loaded[name].shape == tensor.shape
                loaded[name] = tensor
    assert not [name for name, tensor in loaded.items() if name.startswith("blocks") and tensor.isnan().any()]
    tails = "lm_heads.{k}.weight"
    return logits_of(loaded, "blocks.{k}.layers.{l}.weight", "blocks.{k}.layers.{l}.bias", tails, (drafted, layers))


def tgi_reads(folder: Path, target: Path) -> Tensor:
    """Load heads as text-generation-inference does, and return their logits.

    `medusa_num_heads` selects Medusa, `architectures` must be absent, and one file with a fixed name is read.
    """
    config = json.loads((folder / "config.json").read_text())
    assert AutoConfig.from_pretrained(config["base_model_name_or_path"]).hidden_size == HIDDEN
    assert "architectures" not in config
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    assert not set(tensors) & set(load_file(target / "model.safetensors")), "TGI rejects a tensor name in two files"
    sizes = config["medusa_num_heads"], config["medusa_num_layers"]
    return logits_of(tensors, "{k}.{l}.linear.weight", "{k}.{l}.linear.bias", f"{{k}}.{sizes[1]}.weight", sizes)


def tensorrt_reads(folder: Path) -> Tensor:
    """Load heads as TensorRT-LLM's convert_checkpoint does; every block needs a bias and every head a projection."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    sizes = config["medusa_num_heads"], config["medusa_num_layers"]
    tail = f"{{k}}.{sizes[1]}.weight"
    return logits_of(tensors, "{k}.{l}.linear.weight", "{k}.{l}.linear.bias", tail, sizes)


def own_logits(artifact: Path, target: Path) -> Tensor:
    """Return the logits [B, K, V] that this package computes for an artifact."""
    heads = load_heads(artifact, dtype=torch.float32)
    if heads.projection_kind == "target":
        heads.attach(load_file(target / "model.safetensors")["lm_head.weight"])
    with torch.inference_mode():
        return heads(STATES_BD)


@pytest.mark.parametrize("case", CASES)
def test_all_engines_load_the_heads_from_one_folder(export: Export, case: str, make_heads: Make, target: Path) -> None:
    artifact = make_heads(**CASES[case])
    out, expected = export(artifact, "medusa")[0], own_logits(artifact, target)
    count = CASES[case]["num_heads"]
    for logits in (vllm_reads(out, count, VOCAB), tgi_reads(out, target), tensorrt_reads(out)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(load_heads(out)(STATES_BD), expected, rtol=1e-4, atol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "model_type": "medusa",
        "base_model_name_or_path": str(target),
        "medusa_num_heads": count,
        "num_medusa_heads": count,
        "medusa_num_layers": CASES[case]["num_layers"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "medusa_fc_bias": True,
        "version": "1",
    }


def test_the_projection_of_a_tied_target_is_its_embedding(
    export: Export, make_heads: Make, target: Path, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model = make_llama(VOCAB, 3, hidden_size=HIDDEN, num_attention_heads=2, tie_word_embeddings=True)
    model.save_pretrained(target, max_shard_size="2KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    (target / "model.safetensors").unlink()  # weights of the untied model
    artifact = make_heads(**CASES["the target's"])
    with torch.inference_mode():
        expected = load_heads(artifact).attach(model.lm_head.weight)(STATES_BD)
    torch.testing.assert_close(tensorrt_reads(export(artifact, "medusa")[0]), expected, rtol=1e-4, atol=1e-4)


def test_the_tokenizer_is_readable_by_transformers_4(export: Export, make_heads: Make, target: Path) -> None:
    artifact = make_heads()
    for path in target.glob("*token*"):
        path.unlink()
    out = export(artifact, "medusa")[0]
    assert not list(out.glob("*token*")), "the target has no tokenizer"
    assert "copy the target's tokenizer there" in (out / SERVING_FILE).read_text()
    tokenizer = train_bpe(["some words of a text"] * 3, 270, ["<pad>", "<s>", "</s>"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(target)
    out = export(artifact, "medusa")[0]
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 knows no other class name"
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.all_special_tokens == tokenizer.all_special_tokens
    assert loaded("some <s> words").input_ids == tokenizer("some <s> words").input_ids
    (target / "tokenizer_config.json").write_text("{}")  # like gpt2, whose class follows from config.json
    assert AutoTokenizer.from_pretrained(export(artifact, "medusa")[0]).get_vocab() == tokenizer.get_vocab()


def test_a_failed_export_leaves_no_files(
    export: Export, make_heads: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    artifact, good = make_heads(num_heads=5, projection="target"), save_file

    def err(tensors: dict[str, Tensor], *rest: Any, **named: Any) -> None:
        tensors[sorted(tensors)[-1]].view(-1)[0] += 1e-3
        good(tensors, *rest, **named)

    monkeypatch.setattr(export_heads, "save_file", err)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"tensor .* differs from the artifact"):
        export(artifact, "medusa")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("size", ["medusa_num_heads", "vocab_size"])
def test_a_wrong_config_is_detected(
    export: Export, size: str, make_heads: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = export_heads.engine_config
    monkeypatch.setattr(export_heads, "engine_config", lambda *args: good(*args) | {size: 7})
    with pytest.raises(ValueError, match="has the sizes"):
        export(make_heads(projection="target"), "medusa")
