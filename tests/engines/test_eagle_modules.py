"""Exported EAGLE-3 heads in the modules of vLLM and SGLang give the same hidden states, logits and draft tokens as this
engine, on a CPU. `DRAFTSMITH_VLLM` is the path of vLLM's Python (see `test_vllm.py`), `DRAFTSMITH_SGLANG` that of

    python3.11 -m venv sglang && . sglang/bin/activate
    pip install torch==2.13.0 torchvision==0.28.0  # torch as a CPU build: 2.13.0+cpu
    pip install --no-deps sglang==0.5.23
    pip install ...  # packages that importing sglang.srt.models.llama_eagle3 requires

Tested with vLLM 0.32.0, whose `llama_eagle3.py` equals that of 0.33.0, and SGLang 0.5.23.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.heads.eagle import NORMS, EagleHeads, save_eagle
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.recipes.commands.artifacts.export import FORMATS
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

PYTHONS = {"vllm": os.environ.get("DRAFTSMITH_VLLM", ""), "sglang": os.environ.get("DRAFTSMITH_SGLANG", "")}
VOCAB, LAYERS, TOKENS, STEPS = 96, (1, 3, 5), 24, 6
KEPT = torch.arange(1, VOCAB, 3)

pytestmark = pytest.mark.slow


@torch.no_grad()
def ours(heads: EagleHeads, states_TG: torch.Tensor, tokens_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the hidden states and logits of the first step, and a greedy chain, from this engine."""
    drafter = EagleDrafter(heads)
    cache = drafter.new_cache(1, TOKENS + STEPS)
    states_1TD = drafter.extend_with_aux(drafter.fuse_aux(states_TG[None]), cache, tokens_T[None])
    hidden_TD = states_1TD[0] if "norm_output" in heads.norms else heads.norm(states_1TD[0])
    chain, last_11D = list[int](), states_1TD[:, -1:]
    for step in range(STEPS):
        chain.append(int(drafter.logits(last_11D).argmax()))
        cache.set_lengths([TOKENS + step])
        last_11D = drafter.extend_with_aux(last_11D, cache, torch.tensor([chain[-1:]]))
    return {"hidden": hidden_TD, "logits": hidden_TD @ heads.projection().T, "chain": torch.tensor(chain)}


@pytest.mark.parametrize(
    ("trimmed", "norms"),
    [(False, []), (True, []), *((True, [name]) for name in NORMS), (False, ["fc_norm", "norm_output"])],
    ids=str,
)
@pytest.mark.parametrize("engine", PYTHONS)
def test_exports_compute_the_same_in_engines(
    engine: str,
    trimmed: bool,
    norms: list[str],
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
    serving: ModuleType,
) -> None:
    if not PYTHONS[engine]:
        pytest.skip(f"set DRAFTSMITH_{engine.upper()} to a Python with {engine} (see the docstring of this file)")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = make_llama(VOCAB, num_hidden_layers=8, **sizes, rope_parameters={"rope_type": "default", "rope_theta": 500})
    model.save_pretrained(tmp_path / "target")
    torch.manual_seed(2)
    heads = EagleHeads.for_target(model.config, LAYERS, KEPT if trimmed else None, norms=norms)
    for name, weight in heads.named_parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.3)
    heads.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight).requires_grad_(False)
    manifest = {"vocab_size": VOCAB, "shapes": {"num_heads": 3}, "recipe": {}, "data": {}, "training": {}}
    manifest |= {"tokenizer_fingerprint": None, "target": {"id": str(tmp_path / "target")}}
    save_artifact(tmp_path / "heads", kind="heads", write=partial(save_eagle, heads), **manifest)
    export_artifact(tmp_path / "heads", "eagle3", tmp_path / "export", FORMATS)
    states_TG, tokens_T = torch.randn(TOKENS, len(LAYERS) * heads.hidden_size), torch.randint(VOCAB, (TOKENS,))
    inputs = {"embeddings": heads.embedding.clone(), "states": states_TG, "tokens": tokens_T}
    inputs |= {"rows": heads.projection().clone()}
    save_file(inputs, tmp_path / "given.safetensors")
    job = {"engine": engine, "folder": str(tmp_path / "export"), "target": str(tmp_path / "target"), "steps": STEPS}
    job |= {"given": str(tmp_path / "given.safetensors"), "save": str(tmp_path / "found.safetensors")}
    serving.answer_of(PYTHONS[engine], "eagle_run.py", job, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING")
    outputs, expected = load_file(tmp_path / "found.safetensors"), ours(heads, states_TG, tokens_T)
    assert outputs["chain"].tolist() == expected["chain"].tolist()
    assert torch.allclose(outputs["hidden"], expected["hidden"], rtol=1e-4, atol=1e-4)
    assert torch.allclose(outputs["logits"], expected["logits"], rtol=1e-4, atol=1e-4)
