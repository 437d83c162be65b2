"""Joint training of a target and its heads (Medusa-2: Cai et al. 2024, arXiv 2401.10774, section 2.2.2).

Letters: B batch (blocks), T tokens, Y = B · T flattened positions, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from ..config import Medusa2
from ..losses.drafter import IGNORED, agreement, label_hits, mixture, shifted_labels
from .drafter import Weight, blocks_in_order
from .heads import HeadsModule, HeadsTask

if TYPE_CHECKING:
    from ...checkpoints.heads.files import PredictionHeads


class Medusa2Module(HeadsModule):
    """Prediction heads and a target with LoRA adapters. The forward pass returns the losses of both."""

    def __init__(
        self,
        target: Any,
        heads: PredictionHeads,
        head_weights: Sequence[float],
        objective: Mapping[str, Weight],
        medusa2: Medusa2,
        **options: Any,
    ) -> None:
        super().__init__(target, heads, head_weights, objective, **options)
        self.target = target  # part of the module, so that ZeRO-3 also shards its weights
        self.register_state_dict_post_hook(_without_frozen)
        self.register_load_state_dict_pre_hook(_with_frozen)
        self.medusa2 = medusa2
        names = {"cross-entropy": medusa2.label_weight, "forward-kl": medusa2.kl_weight}
        self._target_weights = {name: weight for name, weight in names.items() if weight}

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return weighted loss sums and position counts, both [K + 1]: K entries for the heads, one for the target."""
        batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
        labels_Y = shifted_labels(labels_BT, documents_BT, 1).flatten()
        count = (labels_Y != IGNORED).sum()
        if self.progress < self.medusa2.heads_only:
            with self.original():
                sums_K, counts_K = self.heads_loss(batch, self.frozen_states(batch))
            # DDP needs a gradient for every parameter, even if it is zero; empty ZeRO-3 shards are skipped
            adapter_sums = (p.sum() for p in self.adapters() if p.numel())
            target_loss = sum(adapter_sums, torch.zeros((), device=sums_K.device)) * 0.0
        else:
            states_YD = self._target.hidden(batch).flatten(0, 1)
            sums_K, counts_K = self.heads_loss(batch, states_YD)
            target_loss = self._own_loss(batch, states_YD, labels_Y)
        sums_K = sums_K * self.medusa2.heads_loss_weight(self.progress)
        return torch.cat([sums_K, target_loss.to(sums_K.dtype)[None]]), torch.cat([counts_K, count[None]])

    def _own_loss(self, batch: Batch, states_YD: Tensor, labels_Y: Tensor) -> Tensor:
        original = self.original_teacher(batch) if "forward-kl" in self._target_weights else None
        after_YD = self._target.after_norm(states_YD)
        weight_VD = self._target.weight_VD()
        if self._logits is not None:
            after_YD = self._logits(after_YD)
        return mixture(self._target_weights, after_YD, weight_VD, labels_Y, original)[0]

    def original_teacher(self, batch: Batch) -> Any:
        """Return the next-token distributions of the target with its adapters disabled."""
        with self.original():
            return self.teacher(self.frozen_states(batch))

    def adapters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.target.parameters() if parameter.requires_grad)

    def rate_group(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter's learning rate group: "base" for adapters, otherwise ""."""
        return "base" if any(parameter is adapter for adapter in self.adapters()) else ""

    def rate(self, group: str) -> float:
        """Return the learning rate multiplier of a group. For "base", it rises from 0 during the warm-up."""
        if group != "base":
            return 1.0
        return self.medusa2.rate * self.medusa2.warmup_share(self.progress)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Disable the target's adapters and dropout within the context."""
        layers = [part for part in self.target.modules() if hasattr(part, "_disable_adapters")]
        assert layers, "the target has no adapters"
        was_training = self.target.training
        self.target.eval()
        for layer in layers:
            layer._disable_adapters = True  # peft's own switch also disables gradients, which breaks hooks
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False
            self.target.train(was_training)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the target's activations in the backward pass instead of storing them."""
        enable = getattr(self.target, "activation_checkpointing_enable", self.target.gradient_checkpointing_enable)
        enable({"use_reentrant": False})


def _without_frozen(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove the target's frozen weights from a state dictionary."""
    for name in _frozen_state(module):
        state.pop(prefix + name, None)


def _with_frozen(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the target's frozen weights to a loaded state dictionary."""
    for name, tensor in _frozen_state(module).items():
        state.setdefault(prefix + name, tensor.detach())


def _frozen_state(module: nn.Module) -> dict[str, Tensor]:
    state = module.target.state_dict(keep_vars=True, prefix="target.")  # type: ignore[union-attr]
    return {name: tensor for name, tensor in state.items() if not tensor.requires_grad}


class Medusa2Task(HeadsTask):
    """Training task for prediction heads and the adapters of `target`; see `HeadsTask` and `Medusa2`.

    Evaluations also return the target's `base_loss` (nats per token) and `base_overlap`, which is Σ min(p, q) with the
    original target. Raises ValueError for the same reasons as `HeadsTask`, and if the target has no trainable
    parameters or its output projection has an adapter.
    """

    def __init__(
        self, target: Any, heads: PredictionHeads, heldout: PreparedData | None, medusa2: Medusa2, **options: Any
    ) -> None:
        trained = [parameter for parameter in target.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("the target has no trainable parameters: add adapters to its layers")
        if hasattr(target.get_output_embeddings(), "base_layer"):
            raise ValueError("the target's output projection has an adapter, which heads do not use: remove it")
        self._medusa2 = medusa2
        super().__init__(target, heads, heldout, **options)
        for parameter in trained:
            parameter.requires_grad_(True)
        self.settings["base"] = asdict(medusa2)

    def _make_module(self, target: Any, heads: Any, weights: Any, objective: Any, **options: Any) -> Medusa2Module:
        del options["states"]
        return Medusa2Module(target, heads, weights, objective, self._medusa2, **options)

    @property
    def other_models(self) -> list[nn.Module]:
        return []

    def count(self, batch: Batch) -> Tensor:
        """Return the number of supervised positions of each head and of the target, int64 [K + 1]."""
        target_count = (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).sum()
        return torch.cat([super().count(batch), target_count[None]])

    @torch.no_grad()
    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Return the metrics of `HeadsTask.evaluate`, and `base_loss` and `base_overlap` of the target."""
        assert isinstance(module, Medusa2Module)
        device = next(module.parameters()).device
        loss = overlap = count = 0.0
        for batch in blocks_in_order(self._heldout, self._blocks, device):
            labels_Y = shifted_labels(batch.labels_BT, batch.documents_BT, 1).flatten()
            current = module.teacher(module.frozen_states(batch))
            hits = label_hits(current.hidden_XE, current.weight_VE, labels_Y)
            shared = agreement(current.hidden_XE, current.weight_VE, module.original_teacher(batch), labels_Y)
            loss, count = loss + float(hits.loss), count + float(hits.count)
            overlap += float(shared.overlap)
        target_metrics = {"base_loss": loss / count, "base_overlap": overlap / count} if count else {}
        return super().evaluate(module) | target_metrics
