"""Unsupported model families are refused by their configuration before weights are read."""

from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.verify.families import family_fault
from draftsmith.checkpoints.verify.windows import position_limit
from draftsmith.decode.models.loading import load_model
from transformers import AutoConfig

STATE, LAYERS, MLA = "recurrent state", "layers of type", "multi-head latent attention"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
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
    "bart": ("encoder-decoders of type 'bart'.*t5, mt5, umt5", {}),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "gpt_oss", "gemma3_text", "mpt", "t5", "falcon", "granite", "qwen3_moe")},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global"], 2]]},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_cannot_decode_is_refused_by_its_configuration(kind: str, tmp_path: Path) -> None:
    reason, settings = REFUSED[kind]
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'{kind}.*{reason}|{reason}") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_other_families_are_accepted(kind: str) -> None:
    assert family_fault(AutoConfig.for_model(kind, **ACCEPTED[kind])) is None


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
