"""text-generation-inference's server over a folder of heads: runs in an environment of its own, with its packages.

Its launcher's steps, as far as they go without a GPU: the download step, the model's choice up to where a CPU's model
refuses speculation, the tokenizer as the router loads it; then its modules for the target's head and the speculator,
loaded and run as its Llama model loads and runs them.

One JSON object on the standard input: `folder`, `speculate`, `states` ([B, D]), `text`. The last line of the output is
one, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ |= {"ATTENTION": "paged", "PREFIX_CACHING": "0"}  # by the launcher; read where the package is imported

import torch
from text_generation_server import cli, models
from text_generation_server.layers import SpeculativeHead
from text_generation_server.utils.dist import FakeGroup, initialize_torch_distributed
from text_generation_server.utils.hub import weight_files
from text_generation_server.utils.speculate import get_speculate
from text_generation_server.utils.weights import DefaultWeightsLoader, UnquantizedWeight, Weights
from transformers import AutoConfig, AutoTokenizer


def chosen(folder: str, speculate: int) -> dict[str, Any]:
    """What `get_model` settles on before the model is loaded: its name and the speculator."""
    seen: dict[str, Any] = {}
    real = models.CausalLM.fallback

    def fallback(model_id: str, *rest: Any, **named: Any) -> Any:
        seen.update(model_id=model_id, speculator=named["speculator"])
        return real(model_id, *rest, **named)

    models.CausalLM.fallback = fallback
    try:
        models.get_model(folder, [], None, False, None, speculate, "float16", None, False, 128)
    except RuntimeError as error:
        seen["refused"] = str(error)
    return seen


def logits_of(asked: dict[str, Any], seen: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, str]:
    """[B, V] of the target, [B, K, V] of the heads, and which class read them."""
    group, _, _ = initialize_torch_distributed()
    place = seen["model_id"]
    loader = DefaultWeightsLoader(UnquantizedWeight)
    weights = Weights(weight_files(place), torch.device("cpu"), torch.float32, group, weights_loader=loader)
    config = AutoConfig.from_pretrained(place)
    config.quantize, config.speculator = None, seen["speculator"]
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    head = SpeculativeHead.load(config, prefix=name, weights=weights)
    known = FakeGroup.allgather  # of a group of one; torch 2.13 hands it one argument more than TGI's 2.7 did
    FakeGroup.allgather = lambda self, found, given, *_: known(self, found, given)
    logits_BV, logits_BKV = head(torch.tensor(asked["states"]))
    return logits_BV, logits_BKV, type(head.speculator).__name__


@torch.inference_mode()
def main() -> None:
    asked = json.load(sys.stdin)
    cli.download_weights(model_id=asked["folder"])
    seen = chosen(asked["folder"], asked["speculate"])
    with tempfile.TemporaryDirectory() as place:
        try:
            AutoTokenizer.from_pretrained(asked["folder"]).save_pretrained(place)
            tokenizer = AutoTokenizer.from_pretrained(place)
            tokens = {"ids": tokenizer(asked["text"]).input_ids, "template": tokenizer.chat_template}
        except (ValueError, OSError, AttributeError) as error:
            tokens = {"refused": str(error)}
    logits_BV, logits_BKV, read_by = logits_of(asked, seen)
    answer = {"target": logits_BV.tolist(), "heads": logits_BKV.tolist(), "class": read_by, "tokenizer": tokens}
    answer |= {"speculate": get_speculate(), "model_id": seen["model_id"], "refused": seen["refused"]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
