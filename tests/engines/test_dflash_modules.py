"""Exported DFlash drafters compute the same logits and drafts in the modules of vLLM, SGLang and transformers as here.

DSpark drafters are compared with the module of vLLM.

`DRAFTSMITH_VLLM` and `DRAFTSMITH_SGLANG` are the paths of the Pythons of `test_eagle_modules.py`, and
`DRAFTSMITH_TRANSFORMERS` that of an environment with transformers 5.24. Tested on a CPU with vLLM 0.32.0, whose
`qwen3_dflash.py` differs from that of 0.33.0 only in quantization and aliases of names, and SGLang 0.5.23.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.heads.dflash import DFlashHeads, save_dflash
from draftsmith.checkpoints.heads.dspark import DSparkHeads
from draftsmith.decode.models.dflash import DSparkDrafter, block_drafter
from draftsmith.recipes.commands.artifacts.export import FORMATS
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

PYTHONS = {name: os.environ.get(f"DRAFTSMITH_{name.upper()}", "") for name in ("vllm", "sglang", "transformers")}
VOCAB, PROMPTS, BLOCK, MASK = 96, 50, 6, 95
KEPT = torch.arange(1, VOCAB, 3)
DFLASH, DSPARK = DFlashHeads.for_target, partial(DSparkHeads.for_target, rank=8)
CASES = [(DFLASH, 1, [4], False), (DFLASH, 1, [2, 4, 7], True), (DFLASH, 2, [5], True), (DFLASH, 2, [1, 3, 6], False)]
CASES += [(DSPARK, 1, [4], False), (DSPARK, 2, [1, 3, 6], True)]
"""Kind, layers of the drafter, layers of the target whose inputs it reads, and if it has a draft vocabulary."""

pytestmark = pytest.mark.slow


def drafter_for(make: Any, model: Any, layers: int, reads: list[int], kept: torch.Tensor | None) -> DFlashHeads:
    torch.manual_seed(2)
    heads = make(model.config, MASK, BLOCK, layers, reads, kept)
    for name, weight in heads.named_parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.3)
    heads.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return heads.requires_grad_(False).eval()


@torch.no_grad()
def inputs_for(model: LlamaForCausalLM, reads: list[int]) -> dict[str, torch.Tensor]:
    """Return the target's weights, and its hidden states of random prompts with 4 to 20 tokens."""
    torch.manual_seed(5)
    lengths, states = torch.randint(4, 21, (PROMPTS,)), []
    for length in lengths.tolist():
        hidden_states = model(torch.randint(VOCAB - 1, (1, length)), output_hidden_states=True).hidden_states
        states.append(torch.cat([hidden_states[layer][0] for layer in reads], -1))
    weights = {"embeddings": model.get_input_embeddings().weight, "rows": model.get_output_embeddings().weight}
    inputs = {name: weight.detach().clone() for name, weight in weights.items()}
    return inputs | {"lengths": lengths, "states": torch.cat(states), "anchors": torch.randint(VOCAB - 1, (PROMPTS,))}


@torch.no_grad()
def our_logits(heads: DFlashHeads, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [P, K, R] of the draft tokens, from this engine's decoding."""
    drafter, logits = block_drafter(heads), []
    for states_TG, anchor in zip(inputs["states"].split(inputs["lengths"].tolist()), inputs["anchors"], strict=True):
        cache = drafter.new_cache(1, len(states_TG) + BLOCK)
        drafter.add_context(cache, states_TG[None])
        cache.set_lengths([len(states_TG)])
        outputs_KY, token = drafter.draft_block(cache, anchor.view(1, 1), heads.num_heads)[0], anchor.view(1, 1)
        for number in range(heads.num_heads if isinstance(drafter, DSparkDrafter) else 0):
            outputs_KY[number] = drafter.after(outputs_KY[None, number, None], token)[0]
            best = outputs_KY[number, :-1].argmax().view(1, 1)
            token = best if heads.proposed is None else heads.proposed[best]
        logits.append(outputs_KY[:, : VOCAB if heads.proposed is None else len(heads.proposed)])
    return torch.stack(logits)


@pytest.mark.parametrize("engine", PYTHONS)
def test_exports_compute_the_same_in_engines(
    engine: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, serving: ModuleType
) -> None:
    if not PYTHONS[engine]:
        pytest.skip(f"set DRAFTSMITH_{engine.upper()} to a Python with {engine} (see the docstring of this file)")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = make_llama(VOCAB, num_hidden_layers=8, **sizes, rope_parameters={"rope_type": "default", "rope_theta": 500})
    model.save_pretrained(tmp_path / "target")
    expected, folders = [], []
    cases = CASES if engine == "vllm" else CASES[:4]
    for number, (make, layers, reads, trimmed) in enumerate(cases):
        heads = drafter_for(make, model, layers, reads, KEPT if trimmed else None)
        shapes = {"num_heads": heads.num_heads, "states": heads.states, **heads.facts}
        manifest = {"vocab_size": VOCAB, "shapes": shapes}
        manifest |= {"recipe": {}, "data": {}, "training": {}, "tokenizer_fingerprint": None}
        manifest |= {"target": {"id": str(tmp_path / "target")}}
        save_artifact(tmp_path / f"heads-{number}", kind="heads", write=partial(save_dflash, heads), **manifest)
        form = "dflash-transformers" if engine == "transformers" else "dspark" if make is DSPARK else "dflash"
        folders.append(tmp_path / f"export-{number}")
        export_artifact(tmp_path / f"heads-{number}", form, folders[-1], FORMATS)
        inputs = inputs_for(model, reads)
        save_file(inputs, tmp_path / f"given-{number}")
        if trimmed and engine != "vllm":  # the others draft all tokens
            whole = drafter_for(make, model, layers, reads, None)
            whole.load_state_dict(heads.state_dict())
            heads = whole
        expected.append((our_logits(heads, inputs), heads.proposed))
    files = {name: [str(tmp_path / f"{name}-{number}") for number in range(len(cases))] for name in ("given", "save")}
    request = {"engine": engine, "target": str(tmp_path / "target"), "folders": [*map(str, folders)], **files}
    serving.answer_of(
        PYTHONS[engine], "dflash_run.py", request, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING"
    )
    for (logits_PKR, ids_R), path in zip(expected, files["save"], strict=True):
        found_PKV = load_file(path)["logits"][:, -logits_PKR.shape[1] :]
        known_R = torch.arange(VOCAB) if ids_R is None else ids_R
        assert torch.allclose(found_PKV[..., known_R], logits_PKR, rtol=1e-4, atol=1e-3)
        assert torch.equal(found_PKV.argmax(-1), known_R[logits_PKR.argmax(-1)])
