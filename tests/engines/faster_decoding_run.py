"""FasterDecoding's runtime over a folder of heads: runs in an environment of its own, with its packages, not ours.

One JSON object on the standard input: `folder` (heads of version 2), `prompts` (token ids), `choices` (paths of the
tree), `steps`. The last line of the output is a JSON object.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch


class Ids:
    """In the place of a model's tokenizer: `medusa_generate` hands out nothing but what this makes of the tokens."""

    eos_token_id = -1

    def decode(self, ids: torch.Tensor, **_: Any) -> list[int]:
        return [int(token) for token in ids]


def generating(loader: Any) -> Any:
    """The class of version 2, as it must be to generate: its `medusa_generate` says `medusa_forward` to a `forward`
    that does not know the word (commit e2a5d20). Nothing else of it is changed."""
    known = loader.forward
    loader.forward = lambda self, *given, medusa_forward=None, **named: known(self, *given, **named)
    return loader


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The same base model's likeliest tokens, one after another, without a cache."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        logits = model.lm_head(model.model(ids, use_cache=False)[0])[:, -1:]
        ids = torch.cat((ids, logits.argmax(-1)), 1)
    return [int(token) for token in ids[0, len(prompt) :]]


@torch.inference_mode()
def main() -> None:
    asked = json.load(sys.stdin)
    loader = generating(importlib.import_module("medusa.model.medusa_model_legacy").MedusaModel)
    model = loader.from_pretrained(asked["folder"], torch_dtype=torch.float32).eval()
    base = model.base_model
    choices, steps, answers = [tuple(path) for path in asked["choices"]], [], []
    words = [each["text"] for each in model.medusa_generate(torch.tensor(asked["prompts"][:1]), max_steps=4)]
    words += [model.tokenizer.decode(asked["prompts"][0])]
    model.tokenizer = Ids()
    for prompt in asked["prompts"]:
        run = model.medusa_generate(torch.tensor([prompt]), max_steps=asked["steps"], medusa_choices=choices)
        found = [each["text"] for each in run]
        base.model.medusa_mask = None
        steps.append([after[len(before) :] for before, after in zip([[], *found], found, strict=False)])
        answers.append(greedy(base, prompt, len(found[-1])))
    heads = {name: tensor.double().sum().item() for name, tensor in model.medusa_head.state_dict().items()}
    print(json.dumps({"steps": steps, "greedy": answers, "heads": heads, "words": words}))


if __name__ == "__main__":
    main()
