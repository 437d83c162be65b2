"""What model families do not support is detected from their configurations before weights are read."""

import re
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.verify.families import family_fault, tree_fault
from draftsmith.checkpoints.verify.windows import position_limit
from draftsmith.decode.models.loading import load_model
from transformers import AutoConfig

STATE, LAYERS, MLA = "recurrent state", "layers of type", "multi-head latent attention"
WITHOUT_TREES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        kind: (STATE, {})
        for kind in ("mamba", "mamba2", "rwkv", "jamba", "bamba", "falcon_h1", "qwen3_next", "qwen3_5", "zamba2")
    },
    "lfm2": (f"{LAYERS} conv", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "minimax": (f"{LAYERS} linear_attention", {}),
    **{kind: (MLA, {}) for kind in ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu")},
    "bloom": ("ALiBi", {}),
    "falcon": ("ALiBi", {"alibi": True}),
    "gpt_neo": ("local attention", {}),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "gpt_oss", "gemma3_text", "mpt", "t5", "falcon", "granite", "qwen3_moe")},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global"], 2]]},
}


@pytest.mark.parametrize("kind", WITHOUT_TREES)
def test_a_family_whose_cache_does_not_allow_trees_is_detected(kind: str) -> None:
    reason, settings = WITHOUT_TREES[kind]
    config = AutoConfig.for_model(kind, **settings)
    assert family_fault(config) is None
    assert re.search(f"{kind}.*{reason}|{reason}.*{kind}", tree_fault(config) or "")


def test_an_unknown_encoder_decoder_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("bart").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder-decoders of type 'bart'.*t5, mt5, umt5"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_other_families_are_accepted(kind: str) -> None:
    config = AutoConfig.for_model(kind, **ACCEPTED[kind])
    assert family_fault(config) is None
    assert tree_fault(config) is None


FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}


@pytest.mark.parametrize(
    ("kind", "settings", "limit"),
    [
        ("phi3", {"rope_parameters": FACTORS, "original_max_position_embeddings": 4096}, 4096),
        ("llama", {"rope_parameters": FACTORS | {"original_max_position_embeddings": 64}}, 64),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, 2048),
        ("llama4_text", {"attention_chunk_size": 64}, 64),
        ("mpt", {"max_seq_len": 64}, 64),
    ],
)
def test_positions_are_limited_where_cached_keys_would_be_wrong(
    kind: str, settings: dict[str, Any], limit: int
) -> None:
    assert position_limit(AutoConfig.for_model(kind, **settings)) == limit
