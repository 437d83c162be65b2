"""speculators' own EAGLE-3 model and trainer on batches that `eagle.py` wrote; run by an environment that has it.

    python tests/bench/eagle_child.py FOLDER

Its trainer asks for an accelerator: here it is told "cpu", and nothing else of it is changed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from memory import Anonymous
from safetensors.torch import load_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.trainer import Trainer, TrainerConfig
from transformers import AutoConfig


class OnCpu(Trainer):
    def setup_trainer(self) -> None:
        super().setup_trainer()
        self.local_rank = self.device_type = "cpu"
        self.global_step = 1  # the first one would be timed by the accelerator's clock


class Batches:
    """One file a step, as speculators reads hidden states from disk."""

    batch_sampler = SimpleNamespace()

    def __init__(self, folder: Path, steps: int) -> None:
        self.files = [folder / f"batch-{step}.safetensors" for step in range(steps)]

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Any:
        for file in self.files:
            yield load_file(file) | {"error_records": 0}


def model_of(settings: dict[str, Any], start: dict[str, torch.Tensor]) -> Any:
    config = AutoConfig.from_pretrained(settings["target"])
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    ids_R = start.pop("ids")
    known_V = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids_R, True)
    model = Eagle3DraftModel.from_training_args(
        config, t2d=known_V, d2t=ids_R - torch.arange(len(ids_R)), draft_vocab_size=len(ids_R),
        norm_before_residual=False, target_layer_ids=settings["layers"], verifier_name_or_path=settings["target"],
        ttt_steps=settings["num_heads"], draft_attn_impl=settings["attention"],
    )  # fmt: skip
    missing = model.load_state_dict(start, strict=False)
    assert not missing.unexpected_keys, missing
    model.verifier_norm = torch.nn.Identity()  # the states are behind the target's norm
    return model.float()


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    model = model_of(settings, load_file(folder / "start.safetensors"))
    losses: list[float] = []
    ends: list[float] = []
    forward = model.forward

    def told(*arguments: Any, **options: Any) -> Any:
        found = forward(*arguments, **options)
        losses.append(float(found[1].detach()))
        return found

    model.forward = told
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", ttt_steps=settings["num_heads"], ttt_step_loss_decay=settings["decay"],
        loss_implementation=settings["implementation"],
    )  # fmt: skip
    config = TrainerConfig(
        lr=settings["rate"], num_epochs=1, save_path=str(folder / "theirs"), train_call_kwargs=options,
        weight_decay=0.0, scheduler_type="cosine", scheduler_warmup_steps=settings["warmup"], log_freq=10**9,
    )  # fmt: skip
    trainer = OnCpu(model, config, Batches(folder, settings["steps"]))
    with Anonymous() as memory:
        trainer.train_epoch(0, step_callback=lambda: ends.append(time.perf_counter()))
    print(
        json.dumps(
            {"losses": losses, "ends": ends, "peak_mb": memory.peak_mb, "above_mb": memory.peak_mb - memory.before_mb}
        )
    )


if __name__ == "__main__":
    main()
