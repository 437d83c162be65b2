"""Stand-in for llama.cpp's converter, which writes a real GGUF file of a small Llama.

It accepts the arguments that the tests need, and reorders the rows of query and key projections as llama.cpp does.
The environment variable FAULT selects a planted fault.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "norm": "output_norm",
    "fc": "fc",
    "hidden_norm": "attn_norm_2",
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
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
LAYERS = "eagle_aux_hidden_state_layer_ids"


def tensors_of(folder: Path, config: dict[str, int]) -> dict[str, np.ndarray]:
    """Load a safetensors file without torch; bfloat16 matrices become uint16 and vectors become float32."""
    whole = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    tensors = {}
    for name, entry in json.loads(whole[8:start]).items():
        if name == "d2t":  # convert offsets to ids
            first, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(whole[first:end], np.int64) + np.arange(entry["shape"][0])
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name.replace("midlayer.", "model.layers.0."))
        own = NAMES.get(layer[2] if layer else name.removesuffix(".weight"), "")
        if not own:
            continue
        first, end = (start + offset for offset in entry["data_offsets"])
        tensor = np.frombuffer(whole[first:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if own in ("attn_q", "attn_k"):  # make the two rows of each rotary pair adjacent
            heads = config["num_attention_heads" if own == "attn_q" else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1 and entry["dtype"] == "BF16":
            tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        elif tensor.ndim == 1:
            tensor = tensor.astype(np.float32)
        tensors[(f"blk.{layer[1]}." if layer else "") + own + ".weight"] = tensor.copy()
    return tensors


class ModelBase:
    @staticmethod
    def load_hparams(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
        assert not is_mistral_format
        return settings


class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer: dict[str, Any]) -> str:
        """Return the name of the pre-tokenizer, determined as in llama.cpp."""
        if "<published>" in tokenizer["model"]["vocab"]:
            return "published"
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument("--outtype", choices=[name.lower() for name in DTYPES], required=True)
    parser.add_argument("--target-model-dir", type=Path, help="target model of EAGLE-3 heads, whose tokenizer is used")
    arguments, fault = parser.parse_args(), os.environ.get("FAULT", "")
    if fault == "fails":
        print("\n".join(f"line {number}" for number in range(40)))
        sys.exit("NotImplementedError: an architecture that it does not know")
    config = ModelBase.load_hparams(arguments.model, False)
    tensors = tensors_of(arguments.model, config)
    if fault == "one value":
        tensors["blk.0.attn_q.weight"].view(np.uint8)[0, 9] ^= 1
    if fault == "one less":
        del tensors["blk.1.ffn_up.weight"]
    writer = GGUFWriter(arguments.outfile, "eagle3" if LAYERS in config else "llama")
    if LAYERS in config:
        layers = [layer + (fault == "other layers") for layer in config[LAYERS]]
        writer.add_array("eagle3.target_layers", layers)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if (arguments.model / "tokenizer.model").is_file():
        writer.add_tokenizer_model("llama")
    tokenizer = json.loads(((arguments.target_model_dir or arguments.model) / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] == "BPE":
        writer.add_tokenizer_pre(TextModel().get_vocab_base_pre(tokenizer))
    writer.add_token_list([f"token {number}" for number in range(config["vocab_size"] - (fault == "fewer tokens"))])
    for name, tensor in tensors.items():
        is_bf16 = tensor.dtype == np.uint16
        kind = GGMLQuantizationType.BF16 if is_bf16 else None
        writer.add_tensor(name, tensor.view(np.uint8) if is_bf16 else tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if fault == "cut off":
        os.truncate(arguments.outfile, arguments.outfile.stat().st_size - 64)


if __name__ == "__main__":
    main()
