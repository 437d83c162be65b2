"""Check which model families of transformers load, train, decode chains and trees, and are exported.

A tiny random model of each type is built, and its decoded tokens are compared with those of its own `generate` for rows
of several lengths. Run with

    python tests/bench/families.py [--quick]
"""

import copy
import re
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import finish, parser_of
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.verify.families import ENCODER_DECODERS, family_fault
from draftsmith.checkpoints.verify.model_files import UNLOADABLE, meta_model, model_class, silence_transformers
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.train.forward.packed import make_forward
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, NEW, LARGEST = 120, 16, 4_000_000
# Values of these fields, if a configuration has them.
SIZES: dict[int, str] = {
    VOCAB: "vocab_size",
    32: "hidden_size d_model n_embd lru_width hidden_size_per_layer_input",
    48: "intermediate_size ffn_dim d_ff n_inner shared_intermediate_size intermediate_size_mlp ffn_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank "
    "linear_key_head_dim linear_value_head_dim ssm_state_size mamba_d_state state_size mamba_d_head",
    2: "num_hidden_layers n_layer num_layers n_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk "
    "linear_num_key_heads linear_num_value_heads",
    4: "num_attention_heads n_head n_heads num_heads attention_heads num_experts num_local_experts n_routed_experts "
    "mamba_n_heads",
    8: "head_dim d_kv kv_channels dim_head rotary_dim moe_num_experts qk_rope_head_dim qk_nope_head_dim v_head_dim",
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
    1: "n_group topk_group first_k_dense_replace num_shared_experts n_shared_experts moe_num_shared_experts",
}
MORE: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 32},
    **{kind: {"layer_types": ["conv", "full_attention"]} for kind in ("lfm2", "lfm2_moe")},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma2": {"query_pre_attn_scalar": 8},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_bigcode": {"num_key_value_heads": 1},
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: {"decoder_start_token_id": 0} for kind in ENCODER_DECODERS},
}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (ALiBi)": ("falcon", {"alibi": True, "multi_query": False}),
    "falcon (new)": ("falcon", {"new_decoder_architecture": True, "multi_query": False}),
    "gpt_neo (global)": ("gpt_neo", {"attention_types": [[["global"], 2]]}),
    "llama (llama3)": ("llama", {"rope_parameters": LLAMA3}),
    "llama (yarn)": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
}


def build(kind: str, overrides: dict[str, Any]) -> Any:
    """Return a tiny random model, or the reason why its family is not supported."""
    default_config = AutoConfig.for_model(kind)
    if fault := family_fault(default_config):
        return fault
    fields = default_config.to_dict()
    small = {name: size for size, names in SIZES.items() for name in names.split() if fields.get(name) is not None}
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = 4
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | MORE.get(kind, {}) | overrides
    if fields.get("layer_types"):
        small.setdefault("layer_types", (list(dict.fromkeys(fields["layer_types"])) * 2)[:2])
    config = AutoConfig.for_model(kind, **small)
    if (count := sum(weight.numel() for weight in meta_model(config).parameters())) > LARGEST:
        raise ValueError(f"no tiny configuration is known ({count:,} parameters)")
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 or "norm" in name or "ln" in name:
                weight.normal_(0, 0.25) if weight.dim() > 1 else weight.uniform_(0.7, 1.3)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, use_cache=True)
    return model


def try_family(kind: str, overrides: dict[str, Any]) -> tuple[dict[str, bool], str]:
    """Return whether loading, training, decoding and exporting work, and the first reason for a failure."""
    works = {"loads": False, "trains": False, "chains": False, "trees": False, "exports": False}
    try:
        model = build(kind, overrides)
    except UNLOADABLE as error:
        return {}, f"not built: {' '.join(str(error).split())[:90]}"
    try:
        if isinstance(model, str):
            return works, model
        target = wrap_model(model)
    except ValueError as error:
        return works, str(error)
    works["loads"], reason = True, target.tree_fault or ""
    draws = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, VOCAB, (count,), generator=draws).tolist() for count in (20, 9)]
    expected = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        expected.append(output[1:] if model.config.is_encoder_decoder else output[len(prompt) :])
    drafter, sampling = copy.deepcopy(model).requires_grad_(False), Sampling()
    for weight in drafter.parameters():
        weight.add_(torch.randn(weight.shape, generator=draws) * 0.02)
    parts = Parts(wrap_model(drafter))
    for column, name in (("chains", "speculative"), ("trees", "multi-candidate")):
        if column == "chains" or target.tree_fault is None:
            method = build_method(name, parts, sampling)
            texts = decode_texts(target, *method, prompts, Limits(NEW), sampling, Rng.for_rows(0, len(prompts)))
            works[column] = texts == expected
            reason = reason or ("" if works[column] else f"{name} decoding differs from generate")
    try:
        make_forward(model)
        works["trains"] = True
    except UNLOADABLE as error:
        reason = reason or str(error)
    try:
        export(model)
        works["exports"] = True
    except UNLOADABLE as error:
        reason = reason or f"not exported: {error}"
    return works, reason


def export(model: Any) -> None:
    """Export the model as a drafter for transformers, which also compares tensors and logits with the original."""
    with tempfile.TemporaryDirectory() as folder:
        source, about = Path(folder, "drafter"), {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None}
        save_artifact(source, kind="drafter", write=lambda out: model.save_pretrained(out), **about)
        export_artifact(source, "transformers", Path(folder, "export"), FORMATS)


def main() -> None:
    """Print the table of model families, the reasons for failures and the counts."""
    arguments = parser_of(__doc__, "check only the first ten families").parse_args()
    torch.set_num_threads(1)
    families = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODER_DECODERS})
    rows = {kind: (kind, dict[str, Any]()) for kind in families} | VARIANTS
    reasons, counts = defaultdict(list), defaultdict(int)
    print("| family | loads | trains | chains | trees | exports |\n|---|---|---|---|---|---|")
    for name, (kind, overrides) in sorted(rows.items())[: 10 if arguments.quick else None]:
        with silence_transformers(), warnings.catch_warnings(action="ignore"):
            works, reason = try_family(kind, overrides)
        reasons[re.sub(r" \(relative RMS difference.*", "", reason.replace(repr(kind), "…"))].append(name)
        counts["families"] += bool(works)
        if works:
            print(f"| {name} | {' | '.join('yes' if ok else 'no' for ok in works.values())} |", flush=True)
        for column, ok in works.items():
            counts[column] += ok
    for reason, names in sorted(reasons.items()):
        print(f"- {', '.join(names)}: {reason}" if reason else "")
    finish(dict(counts))


if __name__ == "__main__":
    main()
