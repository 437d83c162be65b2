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

import torch
from safetensors.torch import load_file

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
KINDS = {"f32": (0, torch.float32), "f16": (1, torch.float16), "bf16": (30, torch.bfloat16)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tensors_of(folder: Path, config: dict[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        own = NAMES[layer[2] if layer else name.removesuffix(".weight")]
        if own == "attn_q":
            tensor = paired(tensor, config["num_attention_heads"])
        if own == "attn_k":
            tensor = paired(tensor, config["num_key_value_heads"])
        tensor = tensor.to(torch.float32 if tensor.dim() == 1 else dtype)
        found[(f"blk.{layer[1]}." if layer else "") + own + ".weight"] = tensor
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument("--outtype", choices=KINDS, required=True)
    asked, fault = parser.parse_args(), os.environ.get("FAULT", "")
    if fault == "fails":
        print("\n".join(f"line {number}" for number in range(40)))
        sys.exit("NotImplementedError: an architecture that it does not know")
    if fault == "writes nothing":
        return
    config = json.loads((asked.model / "config.json").read_text())
    kind, dtype = KINDS[asked.outtype]
    tensors = tensors_of(asked.model, config, dtype)
    if fault == "one value":
        tensors["blk.0.attn_q.weight"].view(-1)[5] += 0.01
    if fault == "one less":
        del tensors["blk.1.ffn_up.weight"]
    vocab_size = config["vocab_size"] - (fault == "fewer tokens")
    tokens = [f"token {number}" for number in range(vocab_size)]
    values = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    values.append(text("llama.block_count") + struct.pack("<II", 4, config["num_hidden_layers"]))
    values.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens)))
    values.append(text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 0, 1, 2))
    infos, data = b"", b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % 32)
        dims = tuple(reversed(tensor.shape))
        info = struct.pack("<IQ", 0 if tensor.dtype == torch.float32 else kind, len(data))
        infos += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + info
        data += bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    count = 1 << 60 if fault == "claims too much" else len(tensors)
    header = b"GGUF" + struct.pack("<IQQ", 3, count, len(values)) + b"".join(values) + infos
    whole = header + b"\0" * (-len(header) % 32) + data
    if fault == "cut off":
        whole = whole[:-64]
    if fault == "not GGUF":
        whole = b"GGML" + whole[4:]
    asked.outfile.write_bytes(b"" if fault == "empty" else whole)


if __name__ == "__main__":
    main()
