"""Training of prediction heads on a frozen target."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.decode.proposers.head_trees import attach_projection
from draftsmith.train.loop.fit import fit
from draftsmith.train.losses.drafter import head_labels
from draftsmith.train.tasks.heads import HeadsTask
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

HEADS = 3
WEIGHTS = [1.0, 0.8, 0.64]


def measured(_: Any) -> dict[str, float]:
    return {"tokens_per_step": 1.5}


@pytest.fixture
def task(worker: ModuleType) -> HeadsTask:
    target = worker.make_model()
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), HEADS, 1)
    return HeadsTask(target, heads, worker.make_data(4, seed=1), WEIGHTS, evaluate_fn=measured)


def test_only_the_heads_are_trained_and_stored(worker: ModuleType, task: HeadsTask, tmp_path: Path):
    before = {name: tensor.clone() for name, tensor in task.target.state_dict().items()}
    result = fit(task, worker.make_data(), worker.make_config(steps=30, save_every=0), tmp_path)
    assert result.last_loss < result.first_loss
    for name, tensor in task.target.state_dict().items():
        assert torch.equal(tensor, before[name])
    with safe_open(tmp_path / "checkpoints" / "step-000030" / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(task.module.state_dict())
    names = {f"head{k}_{what}" for k in range(HEADS) for what in ("loss", "top1", "top5")}
    assert result.metrics.keys() == names | {"heldout_loss", "tokens_per_step"}
    expected = sum(w * result.metrics[f"head{k}_loss"] for k, w in enumerate(WEIGHTS))
    assert result.metrics["heldout_loss"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("projection", "states", "objective", "proposed"),
    [  # the projection of the target requires post-norm states
        ("own", "after-norm", "cross-entropy", None),
        ("own", "after-norm", "forward-kl", None),
        ("own", "before-norm", "forward-kl", None),
        ("low-rank", "after-norm", "forward-kl", None),
        ("low-rank", "before-norm", "forward-kl", None),
        ("target", "after-norm", "forward-kl", None),
        ("target", "after-norm", "cross-entropy", 2),
        ("target", "after-norm", "forward-kl", 2),
    ],
)
def test_head_k_learns_the_token_k_plus_2_ahead(
    worker: ModuleType, projection: str, states: str, objective: str, proposed: int | None
):
    """Distributions are restricted to the draft vocabulary if `proposed` is given."""
    target = worker.make_model()
    rank = 5 if projection == "low-rank" else 0
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), HEADS, 1, projection, rank, states)
    draft_ids = torch.arange(0, worker.VOCAB, proposed or 1)
    if proposed:
        heads.propose(draft_ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0.0, 0.3)
    task = HeadsTask(target, heads, None, WEIGHTS, {objective: 1.0}, temperature=2.0)
    batch = worker.make_data(3).batch(range(3))
    sums, counts = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = torch.zeros(HEADS), torch.zeros(HEADS)
    for row in range(3):
        for number in set(batch.documents_BT[row].tolist()) - {-1}:
            inside = batch.documents_BT[row] == number
            tokens, labels = batch.tokens_BT[row][inside], batch.labels_BT[row][inside].tolist()
            with torch.no_grad():
                after = target.model(tokens[None]).last_hidden_state
                logits = heads(after[0] if states == "after-norm" else states_before_norm(target, tokens)[0])
            teacher = (target.lm_head(after)[0, :, draft_ids] / 2).log_softmax(-1)
            log_probs = (logits[..., draft_ids] / 2).log_softmax(-1)
            for index in range(len(labels)):
                for k in range(HEADS):
                    ahead = index + 2 + k
                    if ahead >= len(labels) or labels[ahead] not in draft_ids:
                        continue
                    if objective == "cross-entropy":
                        loss = -logits[index, k].log_softmax(-1)[labels[ahead]]
                    else:
                        loss = 4 * (teacher[ahead - 1].exp() * (teacher[ahead - 1] - log_probs[index, k])).sum()
                    expected[k] += WEIGHTS[k] * loss.detach()
                    items[k] += 1
    assert counts.tolist() == items.tolist() == task.count(batch).tolist()
    torch.testing.assert_close(sums.detach(), expected, rtol=1e-4, atol=1e-4)


OWN_LOGITS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.2},
    "granite": {"logits_scaling": 7.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "phi": {},  # a bias
}


def target_with_changed_logits(family: str, vocab_size: int) -> Any:
    """Return a target whose logits are scaled, capped, or have a bias."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **OWN_LOGITS[family])).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(3)
        if (bias := target.get_output_embeddings().bias) is not None:
            bias.normal_()
    return target


@pytest.mark.parametrize("family", OWN_LOGITS)
def test_soft_targets_equal_the_models_distributions(worker: ModuleType, family: str):
    target = target_with_changed_logits(family, worker.VOCAB)
    heads = PredictionHeads.from_lm_head(target.get_output_embeddings().weight.detach(), HEADS, 1)
    module = HeadsTask(target, heads, None, objective={"forward-kl": 1.0}).module
    batch = worker.make_data(2).batch([0])
    first = batch.documents_BT[0] == 0
    with torch.no_grad():
        expected = target(batch.tokens_BT[:, first]).logits[0]
        teacher = module.teacher(module.frozen_states(batch))  # type: ignore[operator]
        logits = teacher.hidden_XE if teacher.weight_VE is None else teacher.hidden_XE @ teacher.weight_VE.T
    torch.testing.assert_close(logits[first], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("proposed", [None, 3])
@pytest.mark.parametrize("family", OWN_LOGITS)
def test_heads_with_the_targets_projection_give_its_logits(worker: ModuleType, family: str, proposed: int | None):
    """Heads whose residual blocks are zero give the logits of the target."""
    target = target_with_changed_logits(family, worker.VOCAB)
    heads = PredictionHeads(HEADS, 1, 16, None, projection="target").eval()
    ids = torch.arange(0, worker.VOCAB, proposed or 1)
    heads.propose(ids if proposed else None)
    attach_projection(heads, target, torch.device("cpu"))
    data = worker.make_data(2)
    batch = data.batch([0])
    expected_BTV, hidden_BTD = target(batch.tokens_BT).logits, target.base_model(batch.tokens_BT).last_hidden_state
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            actual_BTKV = heads(hidden_BTD)
        for k in range(HEADS):
            torch.testing.assert_close(actual_BTKV[:, :, k, ids], expected_BTV[..., ids], rtol=1e-4, atol=1e-5)
    task = HeadsTask(target, heads, data, objective={"cross-entropy": 1.0})
    hidden_XD = task.module.frozen_states(batch)  # type: ignore[operator]
    labels_XK = head_labels(batch.labels_BT, batch.documents_BT, HEADS).flatten(0, 1)
    labels_XK = torch.where(torch.isin(labels_XK, ids), labels_XK, -100)
    logits_XKV = heads(hidden_XD)
    expected = F.cross_entropy(logits_XKV.flatten(0, 1), labels_XK.flatten(), reduction="sum", ignore_index=-100)
    expected_grads = torch.autograd.grad(expected, list(heads.parameters()))
    sums_K, _ = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    torch.testing.assert_close(sums_K.sum(), expected, rtol=1e-4, atol=1e-4)
    for result, grad in zip(torch.autograd.grad(sums_K.sum(), list(heads.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(result, grad, rtol=1e-3, atol=1e-4)
    loss = F.cross_entropy(logits_XKV[:, 0], labels_XK[:, 0], ignore_index=-100)
    one = HeadsTask(target, heads, data, objective={"cross-entropy": 1.0}, evaluate_blocks=1)
    torch.testing.assert_close(one.evaluate(one.module)["head0_loss"], loss.item(), rtol=1e-4, atol=1e-4)


def test_unknown_output_layers_are_refused(worker: ModuleType):
    sizes = {"vocab_size": worker.VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", logit_scale=0.2, **sizes))
    target.logit_scale = 0.3  # differs from the configuration
    heads = PredictionHeads.from_lm_head(target.get_output_embeddings().weight.detach(), HEADS, 1)
    with pytest.raises(ValueError, match="cohere"):
        HeadsTask(target, heads, None, objective={"forward-kl": 1.0})


def states_before_norm(target: Any, tokens: torch.Tensor) -> torch.Tensor:
    states: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    target.model(tokens[None])
    hook.remove()
    return states[0]
