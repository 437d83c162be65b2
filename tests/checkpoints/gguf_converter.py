"""Stands in for llama.cpp's converter, the user's own tool: writes a real GGUF file of a small Llama.

It takes the arguments that the tests need, and keeps llama.cpp's order of rows in query and key projections. With
FAULT in the environment it fails as that says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"f32": 0, "f16": 1, "bf16": 30}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of every tensor of a safetensors file; nothing is imported that takes long."""
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    entries, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    entries.pop("__metadata__", None)
    return {name: (one["dtype"], one["shape"], data[slice(*one["data_offsets"])]) for name, one in entries.items()}


def paired(data: bytes, rows: int, heads: int) -> bytes:
    """Rows in llama.cpp's order: in each head, the two of a rotary pair beside each other."""
    width, half = len(data) // rows, rows // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return b"".join(data[row * width : (row + 1) * width] for row in order)


def as_floats(kind: str, data: bytes) -> bytes:
    if kind == "BF16":
        return b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return data if kind == "F32" else struct.pack(f"<{len(data) // 2}f", *struct.unpack(f"<{len(data) // 2}e", data))


def tensors_of(folder: Path, config: dict[str, int]) -> dict[str, tuple[list[int], bytes, bool]]:
    """Shape, bytes, and whether it is of float32, as vectors are."""
    found = {}
    for name, (kind, shape, data) in read(folder / "model.safetensors").items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        own = NAMES.get(layer[2] if layer else name.removesuffix(".weight"), "")
        if not own:
            continue
        if own in ("attn_q", "attn_k"):
            data = paired(data, shape[0], config["num_attention_heads" if own == "attn_q" else "num_key_value_heads"])
        if len(shape) == 1:
            data = as_floats(kind, data)
        found[(f"blk.{layer[1]}." if layer else "") + own + ".weight"] = (shape, data, len(shape) == 1)
    return found


class ModelBase:
    @staticmethod
    def load_hparams(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
        assert not is_mistral_format
        return settings


class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer: dict[str, Any]) -> str:
        """The name of a tokenizer with one more special token than ours have; llama.cpp's knows what ids they give."""
        if "<published>" in tokenizer["model"]["vocab"]:
            return "published"
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument("--outtype", choices=KINDS, required=True)
    asked, fault = parser.parse_args(), os.environ.get("FAULT", "")
    if fault == "fails":
        print("\n".join(f"line {number}" for number in range(40)))
        sys.exit("NotImplementedError: an architecture that it does not know")
    config = ModelBase.load_hparams(asked.model, False)
    tensors = tensors_of(asked.model, config)
    if fault == "one value":
        shape, data, _ = tensors["blk.0.attn_q.weight"]
        tensors["blk.0.attn_q.weight"] = (shape, data[:9] + bytes([data[9] ^ 1]) + data[10:], False)
    if fault == "one less":
        del tensors["blk.1.ffn_up.weight"]
    vocab_size = config["vocab_size"] - (fault == "fewer tokens")
    tokens = [f"token {number}" for number in range(vocab_size)]
    values = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    values.append(text("llama.block_count") + struct.pack("<II", 4, config["num_hidden_layers"]))
    if (asked.model / "tokenizer.model").is_file():
        values.append(text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("llama"))
    tokenizer = json.loads((asked.model / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] == "BPE":
        name = TextModel().get_vocab_base_pre(tokenizer)
        values.append(text("tokenizer.ggml.pre") + struct.pack("<I", 8) + text(name))
    values.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens)))
    values.append(text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 0, 1, 2))
    infos, data = b"", b""
    for name, (shape, one, is_float) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        info = struct.pack("<IQ", 0 if is_float else KINDS[asked.outtype], len(data))
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)) + info
        data += one
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + infos
    whole = header + b"\0" * (-len(header) % 32) + data
    if fault == "cut off":
        whole = whole[:-64]
    asked.outfile.write_bytes(whole)


if __name__ == "__main__":
    main()
