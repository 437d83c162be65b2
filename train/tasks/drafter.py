"""Training of drafters (causal LMs or encoder-decoders) on labels, on a teacher's distributions, or on both.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, D hidden of the drafter, E hidden of the teacher,
V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from ...decode.models.draft_vocabulary import kept_tokens
from ..forward.packed import PackedForward, make_forward
from ..loop.task import Task
from ..losses.drafter import IGNORED, agreement, heads_mixture, label_hits, narrow_vocabulary, shifted_labels
from ..losses.objectives import needs_teacher, parse_weights, weights_at
from ..teachers.teacher import ModelTeacher, Teacher
from .on_policy import OnPolicy, rewrite
from .parallel import Parallel, append_mask_tokens

_EVALUATED_TOGETHER = 4  # blocks

Evaluate = Callable[[nn.Module], Mapping[str, float]]
Weight = float | Sequence[float]
"""Weight of an objective; see `objectives.parse_weights`."""


class DrafterModule(nn.Module):
    """Drafter whose forward pass returns its training loss. The teacher is neither trained nor saved with it."""

    def __init__(
        self,
        model: Any,
        objective: Mapping[str, Weight],
        teacher: Teacher | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.top_k, self.parallel = temperature, top_k, parallel
        self.progress = 0.0
        """Completed fraction of the run (0 to 1), which determines the weights of the objectives."""
        self._weights = parse_weights(objective)
        self._forward = make_forward(model)
        if parallel is not None:
            assert isinstance(self._forward, PackedForward)
            self._forward.check_masks()
        self._teacher = teacher
        vocab = self._forward.vocab_size
        teacher_vocab = vocab if teacher is None else teacher.vocab_size
        if vocab != teacher_vocab:
            raise ValueError(
                f"the drafter's vocabulary has {vocab} tokens, but the teacher's has {teacher_vocab}: `draftsmith "
                "doctor TARGET DRAFTER --fix OUT` writes a drafter with the target's vocabulary"
            )

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over supervised positions (float32), and their number (int64).

        The arguments are the fields of `Batch`. For parallel drafting, the number excludes mask tokens, and the sum is
        this number times the mean loss over all supervised positions, including mask tokens.
        """
        batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
        weights = weights_at(self._weights, self.progress)
        learns_from_teacher = needs_teacher(weights)
        teacher = self._teacher(batch) if self._teacher is not None and learns_from_teacher else None
        labels_X, rows_X1, count = shifted_labels(labels_BT, documents_BT, 1).flatten(), None, None
        if self.parallel is None:
            hidden_XD, weight_VD = self.states(batch)
        else:
            count = (labels_X != IGNORED).sum()
            extended = append_mask_tokens(batch, self.parallel, self.progress)
            assert isinstance(self._forward, PackedForward)
            hidden_XD, weight_VD = self._forward(extended.batch).flatten(0, 1), self._forward.weight_VD()
            labels_X, rows_X1 = extended.labels_X, extended.teacher_rows_X[:, None]
        if self.proposed is not None:
            narrowed = narrow_vocabulary(self.proposed, hidden_XD, weight_VD, labels_X, teacher)
            hidden_XD, weight_VD, labels_X, teacher = narrowed
        arguments = (labels_X[:, None], teacher, rows_X1, self.temperature)
        sums_1, counts_1 = heads_mixture(weights, hidden_XD[:, None], [weight_VD], *arguments, top_k=self.top_k)
        if count is None:
            return sums_1[0], counts_1[0]
        return sums_1[0] * (count / counts_1[0].clamp(min=1)), count  # the mean includes mask tokens

    @property
    def proposed(self) -> Tensor | None:
        """Token ids of the draft vocabulary (int64) on the model's device, or None if all tokens can be drafted."""
        return kept_tokens(self.model)

    def states(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [X, D] and the output projection [V, D], or logits [X, V] and None."""
        return self._forward(batch).flatten(0, 1), self._forward.weight_VD()

    def read_directly(self) -> list[nn.Parameter]:
        """Return parameters that `forward` reads without calling their layer, so that ZeRO-3 can gather them."""
        weight_VD = self._forward.weight_VD()
        return [weight_VD] if isinstance(weight_VD, nn.Parameter) else []

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass instead of storing them."""
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})


class DrafterTask(Task):
    """Task that trains a drafter on labels, on a teacher's distributions, or on both.

    See `objectives.parse_weights` for `objective`, and `losses.drafter.mixture` for `top_k` and `temperature`. With
    `on_policy`, some of the responses are sampled from the drafter. Evaluations use the first `evaluate_blocks` blocks
    of `heldout` (all if None), compare with `eval_teacher`, and include the metrics that `evaluate_fn(model)` returns.

    Raises ValueError if the weights are invalid, the vocabularies differ, or `on_policy` is used with cross-entropy.
    """

    name = "drafter"

    def __init__(
        self,
        model: Any,
        heldout: PreparedData | None,
        objective: Mapping[str, Weight] | None = None,
        teacher: Teacher | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        on_policy: OnPolicy | None = None,
        eval_teacher: Teacher | None = None,
        evaluate_fn: Evaluate | None = None,
        evaluate_blocks: int | None = 64,
        parallel: Parallel | None = None,
    ) -> None:
        objective = dict(objective or {"cross-entropy": 1.0})
        if on_policy is not None and "cross-entropy" in objective:
            raise ValueError("`on_policy` does not support cross-entropy: the labels would be the drafter's samples")
        self.teacher, self.eval_teacher, self.on_policy = teacher, eval_teacher, on_policy
        self._teachers = [other for other in (teacher, eval_teacher) if other is not None]
        self.module: nn.Module = DrafterModule(model, objective, teacher, temperature, top_k, parallel)
        self.settings: dict[str, Any] = {"objective": objective, "temperature": temperature}
        if parallel is not None:
            self.settings["parallel"] = asdict(parallel)
        if top_k is not None:
            self.settings["top_k"] = top_k
        if teacher is not None:
            self.settings |= {f"teacher.{key}": value for key, value in teacher.settings.items()}
        if on_policy is not None:
            stop_ids = list(on_policy.stop_ids)
            self.settings["on_policy"] = [on_policy.share, on_policy.new_tokens, on_policy.temperature, stop_ids]
        self.rewrites = on_policy is not None
        self._heldout, self._evaluate_fn, self._blocks = heldout, evaluate_fn, evaluate_blocks

    @property
    def other_models(self) -> list[nn.Module]:
        """Models that are in memory but not trained, such as teachers."""
        models = [other.model for other in self._teachers if isinstance(other, ModelTeacher)]
        return list(dict.fromkeys(models))

    def move_to(self, device: torch.device) -> None:
        for other in self._teachers:
            other.move_to(device)

    def rewrite(self, batch: Batch, rows: np.ndarray, global_batch: int, seed: tuple[int, int]) -> Batch:
        """Return the batch with some of its responses sampled from the current drafter; see `on_policy.rewrite`."""
        assert self.on_policy is not None
        assert isinstance(self.module, DrafterModule)
        return rewrite(self.module.model, batch, rows, global_batch, seed, self.on_policy)

    def count(self, batch: Batch) -> Tensor:
        return (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).sum()

    @torch.no_grad()
    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Evaluate the drafter on held-out blocks, in the precision used for training, and return the metrics.

        Metrics of the labels are `heldout_loss` (nats per token that the drafter can propose), `perplexity`,
        `top1_accuracy` and `top5_accuracy`. With `eval_teacher`, `overlap`, `top1_agreement` and `top5_agreement` are
        added (see `losses.drafter.Agreement`). The metrics of `evaluate_fn` are computed without autocast.
        """
        assert isinstance(module, DrafterModule)
        sums: dict[str, float] = {}
        items = num_known = 0

        def add(**values: Any) -> None:
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value)

        device = next(module.parameters()).device
        for batch in blocks_in_order(self._heldout, self._blocks, device):
            hidden_XD, weight_VD = module.states(batch)
            labels_X = shifted_labels(batch.labels_BT, batch.documents_BT, 1).flatten()
            proposed, states = module.proposed, (hidden_XD, weight_VD, labels_X)
            hits = label_hits(*(states if proposed is None else narrow_vocabulary(proposed, *states, None)[:3]))
            add(heldout_loss=hits.loss, top1_accuracy=hits.top1, top5_accuracy=hits.top5)
            items += int((labels_X != IGNORED).sum())
            num_known += int(hits.count)
            if self.eval_teacher is not None:
                agreements = agreement(hidden_XD, weight_VD, self.eval_teacher(batch), labels_X, proposed=proposed)
                add(overlap=agreements.overlap, top1_agreement=agreements.top1, top5_agreement=agreements.top5)
        metrics = {name: value / items for name, value in sums.items()} if items else {}
        if num_known:
            metrics["heldout_loss"] *= items / num_known
            metrics["perplexity"] = math.exp(min(metrics["heldout_loss"], 700.0))
        if self._evaluate_fn is not None:
            with torch.autocast(device.type, enabled=False):
                metrics |= self._evaluate_fn(module.model)
        return metrics


def blocks_in_order(data: PreparedData | None, blocks: int | None, device: torch.device) -> Iterator[Batch]:
    """Yield the first `blocks` blocks of `data`, or all blocks if `blocks` is None, in batches."""
    numbers = range(0 if data is None else data.blocks)[:blocks]
    for start in range(0, len(numbers), _EVALUATED_TOGETHER):
        assert data is not None
        yield data.batch(numbers[start : start + _EVALUATED_TOGETHER]).to(device)
