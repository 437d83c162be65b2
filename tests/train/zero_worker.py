"""Worker that runs jobs in each launched process and reports their results.

torchrun … zero_worker.py '[{"name": "…", "state_dir": "…", "weights": "….safetensors", "config": {…}, …}]'
"""

import json
import os
import signal
import sys
from typing import Any

import torch
from draftsmith.checkpoints.heads.dflash import DFlashHeads
from draftsmith.checkpoints.heads.dspark import DSparkHeads
from draftsmith.checkpoints.heads.eagle import EagleHeads
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.recipes.session.launch import destroy_process_group
from draftsmith.train.config import Medusa2, Parallel
from draftsmith.train.loop.fit import fit
from draftsmith.train.parallel.processes import Interrupted, TrainingError
from draftsmith.train.tasks.dflash import DFlashTask, DSparkTask
from draftsmith.train.tasks.drafter import DrafterModule
from draftsmith.train.tasks.heads import EagleTask, HeadsTask
from draftsmith.train.tasks.medusa2 import Medusa2Task
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from worker import SignallingTask, make_config, make_data, make_model


class UnevenModule(DrafterModule):
    """Drafter whose loss is finite but whose gradient is NaN while `uneven` is set."""

    uneven = False

    def forward(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sums, counts = super().forward(*batch)
        if self.uneven:
            sums = sums + 0 * torch.sqrt(0 * sums)
        return sums, counts


class SpyingTask(SignallingTask):
    """Task that counts sharded parameters, and has a NaN gradient in step `uneven_at` (from 1)."""

    uneven_at = 0
    sharded_between_steps: int | None = None
    sharded_in_evaluation: int | None = None

    def begin(self, step: int, steps: int) -> None:
        super().begin(step, steps)
        self.module.uneven = step + 1 == self.uneven_at
        self.sharded_between_steps = count_sharded(self.module)

    def evaluate(self, module: torch.nn.Module) -> dict[str, float]:
        self.sharded_in_evaluation = count_sharded(module)
        return super().evaluate(module)


def count_sharded(module: torch.nn.Module) -> int:
    """Count the parameters that are sharded between processes."""
    return sum(parameter.numel() == 0 for parameter in module.parameters())


def make_heads_task(options: dict[str, Any], kind: str) -> HeadsTask:
    model = make_model(**{"attention_dropout": 0.0} | options.get("model", {}))
    if kind in ("eagle", "dflash", "dspark"):
        torch.manual_seed(1)
        proposed = torch.arange(0, model.config.vocab_size, 2)
        weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        common = make_data(4, seed=1), [1.0, 0.5], {"forward-kl": 1.0}
        if kind == "eagle":
            eagle = EagleHeads.for_target(model.config, [0, 1], proposed, 2).attach(*weights)
            return EagleTask(model, eagle, *common)
        if kind == "dspark":
            dspark = DSparkHeads.for_target(model.config, 1, 2, 2, proposed=proposed, rank=3).attach(*weights)
            return DSparkTask(model, dspark, *common, anchors=3)
        dflash = DFlashHeads.for_target(model.config, 1, 3, 2, proposed=proposed).attach(*weights)
        return DFlashTask(model, dflash, *common, anchors=3)
    heads = PredictionHeads.from_lm_head(model.get_output_embeddings().weight.detach().clone(), 2, 1)
    if kind == "heads":
        return HeadsTask(model, heads, make_data(4, seed=1))
    torch.manual_seed(1)
    get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1))
    return Medusa2Task(model, heads, make_data(4, seed=1), Medusa2())


def signal_in_step(task: HeadsTask, at: int) -> None:
    """Send this process a SIGTERM during step `at` (from 1)."""
    count, steps = task.count, [0]

    def counted(batch: Any) -> torch.Tensor:
        steps[0] += 1
        if steps[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return count(batch)

    task.count = counted  # type: ignore[method-assign]


def make_task(options: dict[str, Any], rank: int) -> Any:
    is_signalled = rank == options.get("kill_rank", 0)
    if "task" in options:
        heads_task = make_heads_task(options, options["task"])
        if is_signalled:
            signal_in_step(heads_task, options.get("kill_at", 0))
        return heads_task
    model = make_model(**{"attention_dropout": 0.0} | options.get("model", {}))
    at, more = options.get("kill_at", 0) if is_signalled else 0, dict[str, Any]()
    if options.get("parallel"):
        more = {"parallel": Parallel(token=3, tokens=3, keep_share=0.6, min_share=0.1)}
    task = SpyingTask(model, make_data(4, seed=1), at, options.get("signal", 15), **more)
    task.module.__class__ = UnevenModule
    task.uneven_at = options.get("uneven_at", 0)
    return task


def run_job(options: dict[str, Any], rank: int) -> dict[str, Any]:
    task = make_task(options, rank)
    report: dict[str, Any] = {"name": options["name"]}
    try:
        result = fit(task, make_data(), make_config(**options.get("config", {})), options["state_dir"])
    except (Interrupted, TrainingError, ValueError) as error:
        return report | {"error": f"{type(error).__name__}: {error}"}
    report |= {
        "processes": result.processes,
        "distributed_type": result.distributed_type,
        "resumed_from": result.resumed_from,
        "between_steps": getattr(task, "sharded_between_steps", None),
        "in_evaluation": getattr(task, "sharded_in_evaluation", None),
        "afterwards": count_sharded(task.module),
        "gradients": all(type(p) is torch.nn.Parameter for p in task.module.parameters()),
    }
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in task.module.state_dict().items()}, options["weights"])
    return report


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    for options in json.loads(sys.argv[1]):
        report = run_job(options, rank)
        if rank == options.get("speaker", 0):
            print("said " + json.dumps(report), flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        destroy_process_group()
