"""Training of EAGLE-3 heads."""

from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.eagle import EagleHeads
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.train.tasks.heads import EagleTask

STEPS = 2


def task_of(worker: ModuleType, proposed: int | None, objective: str, target: Any = None) -> EagleTask:
    target = target or worker.make_model()
    draft_ids = None if proposed is None else torch.arange(0, worker.VOCAB, proposed)
    torch.manual_seed(0)
    heads = EagleHeads.for_target(target.config, [0, 1], draft_ids, STEPS)
    heads.attach(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    return EagleTask(target, heads, None, [1.0, 0.5], {objective: 1.0})


@pytest.mark.parametrize("proposed", [None, 2])
@pytest.mark.parametrize("objective", ["cross-entropy", "forward-kl"])
def test_documents_are_trained_independently(worker: ModuleType, proposed: int | None, objective: str):
    """Step k at position t learns token t + 2 + k or the target's distribution of this token."""
    task = task_of(worker, proposed, objective)
    heads, batch = task.module.heads, worker.make_data(3).batch(range(3))
    assert isinstance(heads, EagleHeads)
    sums, counts = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = torch.zeros(STEPS), torch.zeros(STEPS)
    draft_ids = torch.arange(worker.VOCAB) if heads.proposed is None else heads.proposed
    for row in range(3):
        for number in set(batch.documents_BT[row].tolist()) - {-1}:
            inside = batch.documents_BT[row] == number
            tokens, labels = batch.tokens_BT[row][inside], batch.labels_BT[row][inside].tolist()
            length = len(tokens)
            with torch.no_grad():
                output = task.target(tokens[None], output_hidden_states=True)
                input_1TG = torch.cat([output.hidden_states[layer] for layer in heads.layers], -1)
                mask_TT = torch.ones(length, length, dtype=torch.bool).tril()
                output_TKD = heads.features(input_1TG, tokens[None], torch.arange(length)[None], mask_TT[None, None])[0]
                log_q_TKR = (output_TKD @ heads.projection().T).log_softmax(-1)
                log_p_TR = output.logits[0][:, draft_ids].log_softmax(-1)
            for position in range(length):
                for step in range(STEPS):
                    ahead = position + 2 + step
                    if ahead >= length or labels[ahead] not in draft_ids.tolist():
                        continue
                    log_q_R = log_q_TKR[position, step]
                    items[step] += 1
                    if objective == "cross-entropy":
                        expected[step] -= log_q_R[draft_ids.tolist().index(labels[ahead])]
                    else:
                        expected[step] += (log_p_TR[ahead - 1].exp() * (log_p_TR[ahead - 1] - log_q_R)).sum()
    assert counts.tolist() == items.int().tolist()
    assert torch.allclose(sums.detach(), expected * torch.tensor([1.0, 0.5]), rtol=1e-4)


def test_trained_heads_are_accepted(worker: ModuleType, make_llama: Any):
    """Heads that overfit texts of the target decode them in fewer than half of the steps with γ = 2."""
    task = task_of(worker, None, "forward-kl", make_llama(worker.VOCAB, sharpness=2.0))
    heads, module = task.module.heads, task.module
    assert isinstance(heads, EagleHeads)
    target, prompts = wrap_model(task.target, aux_layers=heads.layers), [[1, 2, 3], [4, 5, 6]]

    def decoded(name: str, **options: Any) -> list[list[list[int]]]:
        method = build_method(name, Parts(EagleDrafter(heads)), Sampling(0.0), **options)
        return [
            step.new_ids
            for step in generate(target, *method, prompts, Limits(24), Sampling(0.0), Rng([0, 1], target.device))
        ]

    steps = decoded("autoregressive")
    tokens_BT = torch.tensor([prompt + [step[row][0] for step in steps] for row, prompt in enumerate(prompts)])
    places_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-3)
    for _ in range(200):
        sums_K, counts_K = module(tokens_BT, tokens_BT, places_BT, torch.zeros_like(tokens_BT))
        loss = (sums_K / counts_K).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(steps) == 24
    assert len(decoded("speculative", gamma=2)) <= 10
