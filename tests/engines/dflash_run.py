"""Run exported DFlash and DSpark drafters in the modules of engines, in an environment with their packages.

Engines are vLLM (both kinds), SGLang and transformers.

The engine's own code computes everything except attention in vLLM and SGLang, which a plain implementation replaces.

The standard input is one JSON object: `engine`, `target` (a folder), `folders` (exported drafters), and `given` and
`save`, one file per drafter. A file `given` has the target's embeddings and output rows [V, D], and of P prompts the
lengths [P], the hidden states of their tokens [sum of T, G], and the anchors that follow them [P]. The script saves the
logits of all slots, [P, S, V].
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ADDRESS = "tcp://127.0.0.1:0"
Run = Callable[[Tensor, Tensor], Tensor]
"""Function that computes logits [S, V] of a block from the context's states [T, G] and the block's tokens [S]."""


class PlainAttention(nn.Module):
    """Attention of a block to the stored keys and values of its context and to the whole block."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.sizes = (module.num_heads, module.num_kv_heads, module.head_dim)
        self.context: tuple[Tensor, Tensor] | None = None
        self.layer_name, self.kv_cache = getattr(module.attn, "layer_name", ""), None
        self.impl = SimpleNamespace(do_kv_cache_update=self.store)

    def store(self, layer: Any, key: Tensor, value: Tensor, *cache: Any) -> None:
        self.context = (key.clone(), value.clone())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        assert self.context is not None
        heads, kv_heads, width = self.sizes
        key, value = (
            torch.cat((known.view(-1, kv_heads, width), own.view(-1, kv_heads, width)))
            for known, own in zip(self.context, (key, value), strict=True)
        )
        states = (each.transpose(0, 1)[None] for each in (query.view(-1, heads, width), key, value))
        made_1HSE = F.scaled_dot_product_attention(*states, enable_gqa=heads != kv_heads)
        return made_1HSE[0].transpose(0, 1).flatten(1)


def vllm_runner(folder: str, target: str, inputs: dict[str, Tensor]) -> Run:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

    stored, size = load_file(f"{folder}/model.safetensors"), config_of(folder)["block_size"]
    is_spark = "markov_rank" in config_of(folder)
    if is_spark:  # vLLM refuses the method `dspark` on CPUs, but its module runs
        Path(twin := tempfile.mkdtemp(), "config.json").write_text(
            json.dumps(config_of(folder) | {"architectures": ["DFlashDraftModel"]}), encoding="utf-8"
        )
        folder = shutil.copy(f"{folder}/model.safetensors", twin) and twin
    speculative = {"method": "dflash", "model": folder, "num_speculative_tokens": size - 1}
    options = {"speculative_config": speculative, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(target, **options).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
            parallel_state.initialize_model_parallel(1)
        model = (Qwen3DSparkForCausalLM if is_spark else DFlashQwen3ForCausalLM)(vllm_config=config)
        for layer in model.model.layers:
            layer.self_attn.attn = PlainAttention(layer.self_attn)
        model.load_weights(stored.items())
        # the operator for CPUs applies the first layer's weights to all layers
        norms = [layer.self_attn.k_norm for layer in model.model.layers]
        model.model._normalize_context_k = lambda keys: torch.stack(
            [norm.forward_native(key) for norm, key in zip(norms, keys, strict=True)]
        )
        vocab = len(inputs["embeddings"])
        model.model.embed_tokens.weight.data[:vocab] = inputs["embeddings"]
        if "lm_head.weight" not in stored:
            model.lm_head.weight.data[:vocab] = inputs["rows"]
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    assert model.get_draft_attn_causal() in ([False] * len(norms), False)

    def run(states_TG: Tensor, block_S: Tensor) -> Tensor:
        known = len(states_TG)
        places = torch.arange(known + len(block_S))
        with set_forward_context(None, config):
            context = model.combine_hidden_states(states_TG)
            model.precompute_and_store_context_kv(context, places[:known], places[:known])
            hidden_SD = model(block_S, places[known:])
            if not is_spark:
                return model.compute_logits(hidden_SD)[:, :vocab].float()
            logits_SR, token = model.compute_draft_logits(hidden_SD).float(), block_S[:1]
            for logits_R in logits_SR:  # in the order of the speculator, which needs a GPU
                logits_R += model.markov_bias(model.markov_embed(token))[0]
                token = model.map_draft_to_target(logits_R.argmax().view(1))
            ids_R = model.map_draft_to_target(torch.arange(logits_SR.shape[1]))
            return torch.full((len(block_S), vocab), -torch.inf).index_copy_(1, ids_R, logits_SR)

    return run


def sglang_runner(folder: str, target: str, inputs: dict[str, Tensor]) -> Run:
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    base._is_cpu = True  # otherwise it imports a kernel of vLLM, which is not used
    if not parallel_state.model_parallel_is_initialized():
        arguments = ServerArgs(model_path=target, device="cpu", dtype="float32", disable_cuda_graph=True)
        runtime_context.get_context().set_server_args(arguments)
        parallel_state.init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    with runtime_context.get_parallel().override(tp_rank=0, attn_tp_rank=0):
        model = DFlashDraftModel(AutoConfig.from_pretrained(folder))
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
    for part in model.modules():  # PyTorch instead of kernels
        if hasattr(part, "forward_native") and hasattr(part, "_forward_method"):
            part._forward_method = part.forward_native
    for layer in model.layers:
        layer.self_attn.attn = PlainAttention(layer.self_attn)
    settings = config_of(folder)["dflash_config"]
    assert (model.block_size, model.draft_config.mask_token_id) == (settings["block_size"], settings["mask_token_id"])

    def run(states_TG: Tensor, block_S: Tensor) -> Tensor:
        known = len(states_TG)
        places, context = torch.arange(known + len(block_S)), model.project_target_hidden(states_TG)
        for layer in model.layers:  # as dflash_worker_v2._append_target_hidden_sequential
            attention = layer.self_attn
            key, value = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
            attention.attn.store(None, attention.apply_k_rope(places[:known], attention.apply_k_norm(key)), value)
        embedded = inputs["embeddings"][block_S]
        hidden_SD = model(block_S, places[known:], None, input_embeds=embedded).hidden_states
        return hidden_SD @ inputs["rows"].T

    return run


def transformers_runner(folder: str, target: str, inputs: dict[str, Tensor]) -> Run:
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.cache_utils import DFlashCache

    model, pair = AutoModel.from_pretrained(folder).eval(), AutoModelForCausalLM.from_pretrained(target).eval()
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    start = inputs["anchors"][None, :8] % len(inputs["embeddings"])
    drafted = pair.generate(start, assistant_model=model, speculation_type="dflash", **options)
    assert torch.equal(drafted, pair.generate(start, **options)), "assisted generation changes the text"

    def run(states_TG: Tensor, block_S: Tensor) -> Tensor:
        cache = DFlashCache(config=model.config)
        cache.set_previous_accepted_tokens(len(states_TG))
        places = torch.arange(len(states_TG) + len(block_S))[None]
        more = {"context_hidden_states": states_TG[None], "position_ids": places, "cache": cache}
        made = model(noise_embeds=inputs["embeddings"][block_S][None], **more)
        return made.last_hidden_state[0] @ inputs["rows"].T

    return run


def config_of(folder: str) -> Any:
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        return json.load(file)


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_default_dtype(torch.float32)
    if request["engine"] == "sglang":
        for name in ("nms", "qnms"):  # torchvision requires these operators, which are missing without a GPU
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    runners = {"vllm": vllm_runner, "sglang": sglang_runner, "transformers": transformers_runner}
    for folder, given, save in zip(request["folders"], request["given"], request["save"], strict=True):
        inputs, config = load_file(given), config_of(folder)
        run = runners[request["engine"]](folder, request["target"], inputs)
        mask = config.get("dflash_config", config)["mask_token_id"]
        states = inputs["states"].split(inputs["lengths"].tolist())
        with torch.inference_mode():
            logits = [
                run(states_TG, torch.tensor([anchor, *[mask] * (config["block_size"] - 1)])).clone()
                for states_TG, anchor in zip(states, inputs["anchors"].tolist(), strict=True)
            ]
        save_file({"logits": torch.stack(logits)}, save)
    print(json.dumps({"drafters": len(request["folders"])}))


if __name__ == "__main__":
    main()
