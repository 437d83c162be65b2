"""Targets and drafters of every kind on a device, and a function that decodes with them."""

from typing import Any

import numpy as np
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import TextStore
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method, method_variants
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.graphs import GraphedModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from helpers.pretend_device import PretendCuda

VOCAB = 64
PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3], [63, 0]]
LIMITS = Limits(24)
ROWS = {" ".join([name, *options.values()]): (name, options) for name, options in method_variants() if name != "beam"}
"""Methods and options by label, except `beam`, which decodes a whole text in one step."""


def with_eagle(make_llama: Any, make_eagle: Any, device: str) -> tuple[Any, Parts]:
    """Build a target with an EAGLE-3 drafter on a device."""
    model = make_llama(VOCAB).to(device)
    heads = make_eagle(model).to(device)
    drafter = EagleDrafter(heads)
    return wrap_model(model, aux_layers=heads.layers), Parts(GraphedModel(drafter) if device == "cuda" else drafter)


def built(make_llama: Any, device: str) -> tuple[Any, Parts]:
    """Build a target with drafters of every kind; weights are the same on every device."""
    models = [make_llama(VOCAB, seed=seed, num_hidden_layers=layers) for seed, layers in ((0, 2), (1, 1), (2, 1))]
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, 3000).astype(np.int32)]
    table = BigramTable.from_documents(texts, VOCAB)
    table.texts = TextStore.from_documents(texts)
    torch.manual_seed(7)
    heads = PredictionHeads(3, 1, models[0].config.hidden_size, VOCAB).to(device).eval()
    target, drafter, other = (wrap_model(model.to(device)) for model in models)
    return target, Parts(drafter, heads, table, (other,))


def decode(
    target: Any, parts: Parts, name: str, batch: int, temperature: float, cuda: PretendCuda | None, **options: Any
) -> Any:
    """Decode prompts with a method.

    Returns:
        The texts with the numbers of accepted draft tokens per step (texts do not depend on drafts), and the
        synchronisations and launches of each step in the second half except the last.
    """
    sampling, counts, accepted = Sampling(temperature), [], []
    rng = Rng.for_rows(3, batch, target.device)
    texts: list[list[int]] = [[] for _ in range(batch)]
    if cuda is not None:
        cuda.reset()
    for step in generate(
        target, *build_method(name, parts, sampling, **options), PROMPTS[:batch], LIMITS, sampling, rng
    ):
        for text, ids in zip(texts, step.new_ids, strict=True):
            text += ids
        accepted.append(step.accepted[step.active].tolist())
        if cuda is not None:
            counts.append((list(map(str, cuda.syncs)), cuda.launches.total()))
            assert not cuda.unpinned
            cuda.reset()
    return (texts, accepted), counts[len(counts) // 2 : -1]
