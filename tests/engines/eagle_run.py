"""Run EAGLE-3 heads in the modules of vLLM or SGLang, in a separate environment with their packages.

The engine's own code computes everything (loader, projections, norms, rotary positions, output layer, token map) except
attention, which a plain implementation with a key-value cache replaces.

The standard input is one JSON object: `engine`, `folder`, `target`, `given` (a safetensors file with the target's
embeddings and output rows [V, D], hidden states [T, G] and the tokens [T] one position later), `steps` (tokens of the
chain) and `save` (an output file). The script saves the first step's hidden states [T, D], its logits [T, R or V], and
the token ids of the chain.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ADDRESS = "tcp://127.0.0.1:0"


class PlainAttention(nn.Module):
    """Causal attention with a plain key-value cache."""

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.sizes, self.kept = (heads, kv_heads, width), list[Tensor]()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        heads, kv_heads, width = self.sizes
        query_HTE, key_JTE, value_JTE = (
            states.view(-1, count, width).transpose(0, 1)
            for states, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
        if self.kept:
            key_JTE, value_JTE = (torch.cat(pair, 1) for pair in zip(self.kept, (key_JTE, value_JTE), strict=True))
        self.kept = [key_JTE, value_JTE]
        mask = torch.ones(query_HTE.shape[1], key_JTE.shape[1], dtype=torch.bool)
        mask = mask.tril(key_JTE.shape[1] - query_HTE.shape[1])
        made_1HTE = F.scaled_dot_product_attention(
            query_HTE[None], key_JTE[None], value_JTE[None], attn_mask=mask, enable_gqa=heads != kv_heads
        )
        return made_1HTE[0].transpose(0, 1).flatten(1)


def vllm_model(folder: str, target: str) -> tuple[Any, Any, Callable[[], None]]:
    """Return vLLM's loaded module, its forward context, and a function that must be called after changing weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    speculative = {"method": "eagle3", "model": folder, "num_speculative_tokens": 2}
    arguments = EngineArgs(
        target, speculative_config=speculative, dtype="float32", enforce_eager=True, max_model_len=64
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
        initialize_model_parallel(1)
        model = Eagle3LlamaForCausalLM(vllm_config=config)
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
    finish = partial(process_weights_after_loading, model, config.model_config, torch.device("cpu"))
    return model, set_forward_context(None, config), finish


def sglang_model(folder: str, target: str) -> tuple[Any, Any, Callable[[], None]]:
    for name in ("nms", "qnms"):  # torchvision requires these operators, which are missing without a GPU
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from sglang.srt import runtime_context
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.server_args import ServerArgs
    from transformers import LlamaConfig

    arguments = ServerArgs(model_path=target, device="cpu", dtype="float32", disable_cuda_graph=True)
    runtime_context.get_context().set_server_args(arguments)
    init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
    initialize_model_parallel(backend="gloo")
    with runtime_context.get_parallel().override(tp_rank=0, attn_tp_rank=0):
        model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder))
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
    return model, nullcontext(), lambda: None


def step_of(engine: str, model: Any, tokens_T: Tensor, places_T: Tensor, above_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Run one drafting step of an engine; return the hidden states [T, D] for the logits and for the next step."""
    if engine == "vllm":
        if above_TX.shape[1] != model.config.hidden_size:
            above_TX = model.combine_hidden_states(above_TX)
        made_TD, above_TD = model(tokens_T, places_T, above_TX)
        return made_TD, above_TD
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=above_TX), mm_input_embeds=None, forward_mode=mode)
    made_TD, (above_TD,) = model.model(tokens_T, places_T, batch)
    return made_TD, above_TD


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_default_dtype(torch.float32)
    engine, inputs = request["engine"], load_file(request["given"])
    model, context, finish = {"vllm": vllm_model, "sglang": sglang_model}[engine](request["folder"], request["target"])
    vocab, stored = len(inputs["embeddings"]), load_file(f"{request['folder']}/model.safetensors")
    model.model.embed_tokens.weight.data[:vocab] = inputs["embeddings"]  # both engines share the target's embedding
    if "lm_head.weight" not in stored:
        assert engine == "vllm" or model.load_lm_head_from_target, "the output layer would have random weights"
        model.lm_head.weight.data[:vocab] = inputs["rows"]
    finish()
    attention = model.model.layers[0].self_attn
    attention.attn = PlainAttention(attention.num_heads, attention.num_kv_heads, attention.head_dim)
    tokens_T = inputs["tokens"]
    places_T, chain = torch.arange(len(tokens_T)), list[int]()
    with context, torch.inference_mode():
        made_TD, above_TD = step_of(engine, model, tokens_T, places_T, inputs["states"])
        hidden_TD, logits_TR = made_TD, made_TD @ model.lm_head.weight[: model.config.draft_vocab_size].T
        for step in range(request["steps"]):
            if engine == "vllm":
                best = model.compute_logits(made_TD[-1:]).argmax(-1)
            else:
                best = (made_TD[-1:] @ model.lm_head.weight[: model.config.draft_vocab_size].T).argmax(-1)
                best = best if model.hot_token_id is None else model.hot_token_id[best]
            chain.append(int(best))
            made_TD, above_TD = step_of(engine, model, best, places_T[-1:] + 1 + step, above_TD[-1:])
    outputs = {"hidden": hidden_TD, "logits": logits_TR, "chain": torch.tensor(chain)}
    save_file({name: tensor.clone().contiguous() for name, tensor in outputs.items()}, request["save"])
    print(json.dumps({"chain": chain}))


if __name__ == "__main__":
    main()
