"""Measure the training of a 68M drafter: speed relative to the Hugging Face Trainer, loss memory and teacher cost.

    python tests/bench/train_drafter.py [--quick] [--parts trainer loss teacher] [--rounds 3]

Corpus and tokenizer are those of data.py. Both trainers use the same rendered documents and labels with AdamW, float32
and batch size 4; runs are interleaved. `fit` packs documents into blocks of 2,048 tokens, and `Trainer.train` pads one
document per row to the longest of its batch. Tokens per second exclude padding; `vs_hf_trainer` is the ratio of the
total speeds. `loss_memory_ratio` is the peak memory of chunked cross-entropy beyond inputs and gradients, divided by
that of full logits, each in a separate process. The last line of the output is one JSON object.
"""

import statistics
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SHAREGPT, finish, in_turns, own_process, parser_of, peak_above, random_llama
from draftsmith.data.blocks.packing import IGNORED
from draftsmith.data.blocks.prepared import PreparedData, prepare
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.train.loop.fit import FitConfig, fit
from draftsmith.train.losses.drafter import mixture
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.teachers.teacher import ModelTeacher
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from data import defaults

BATCH = 4
PARTS = ("trainer", "loss", "teacher")
OBJECTIVES = ("cross-entropy", "forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "lk-alpha", "lk-lambda")


def model_of(vocab: int, positions: int, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    return random_llama((768, 3072, layers, 12, vocab), positions, seed=seed)


def documents(folder: Path, block: int, rows: int) -> tuple[PreparedData, int]:
    """Prepare conversations as training data; return them and the vocabulary size."""
    with tempfile.TemporaryDirectory() as temporary:
        corpus, tokenizer_folder = defaults(Path(temporary))
        tokenizer = load_tokenizer(str(tokenizer_folder))
        chats = read_conversations(str(corpus), limit=rows if corpus == SHAREGPT else 10 * rows)
        data = prepare(chats, tokenizer, get_template("vicuna-v1.1"), block, folder, source={"bench": "train_drafter"})
        return data, len(tokenizer)


def rows_of(data: PreparedData) -> list[dict[str, Any]]:
    """Return the documents of prepared data for the Trainer: one per row, in random order."""
    rows = []
    for batch in (data.batch([block]) for block in range(data.blocks)):
        numbers = batch.documents_BT[0]
        for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
            inside = numbers == number
            rows.append({"input_ids": batch.tokens_BT[0, inside], "labels": batch.labels_BT[0, inside]})
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", IGNORED), "attention_mask": mask}


class Watch(TrainerCallback):
    """Callback that records the seconds of the Trainer's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def trainer_round(model: Any, rows: list[dict[str, Any]], first: int, steps: int, folder: Path) -> tuple[int, float]:
    """Run steps of `Trainer.train` and return their number of tokens and seconds."""
    watch = Watch()
    part = [rows[i % len(rows)] for i in range(first * BATCH, (first + steps) * BATCH)]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=2e-5, use_cpu=True,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0,
        lr_scheduler_type="constant", optim="adamw_torch_fused",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=part, data_collator=padded, callbacks=[watch]).train()
    return sum(len(row["input_ids"]) for row in part), sum(watch.seconds)


def fit_round(task: DrafterTask, data: PreparedData, steps: int, folder: Path, seed: int) -> tuple[int, float]:
    """Run steps of `fit` and return their number of tokens and seconds."""
    config = FitConfig(
        steps=steps, global_batch=BATCH, micro_batch=BATCH, learning_rate=2e-5, schedule="constant", warmup=0.0,
        log_every=1, seed=seed, keep_checkpoints=1, evaluate_every=0, save_every=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as state:
        result = fit(task, data, config, state)
    return result.tokens, result.seconds


def against_the_trainer(folder: Path, block: int, rows: int, rounds: int, steps: int) -> dict[str, Any]:
    data, vocab = documents(folder / "data", block, rows)
    task, model = DrafterTask(model_of(vocab, block), None), model_of(vocab, block)
    listed = rows_of(data)
    runs: dict[str, list[tuple[int, float]]] = {"draftsmith": [], "trainer": []}
    for number in range(rounds + 1):
        runs["draftsmith"].append(fit_round(task, data, steps, folder, seed=number))
        runs["trainer"].append(trainer_round(model, listed, number * steps, steps, folder / "trainer"))
    speeds = {name: sum(t for t, _ in series[1:]) / sum(s for _, s in series[1:]) for name, series in runs.items()}
    by_round = [(a / b) / (c / d) for (a, b), (c, d) in list(zip(*runs.values(), strict=True))[1:]]
    useful = sum(len(row["input_ids"]) for row in listed) / len(listed)
    density = data.manifest["packing_density"]
    print(f"documents of {useful:.0f} tokens on average, blocks of {block}, {density:.1%} full")
    for name, speed in speeds.items():
        print(f"  {name:12} {speed:8.0f} tokens/s without padding")
    return {
        "useful_tokens_per_sec": speeds,
        "vs_hf_trainer": speeds["draftsmith"] / speeds["trainer"],
        "vs_hf_trainer_by_round": by_round,
        "mean_document_tokens": useful,
        "packing_density": density,
    }


def run_loss(kind: str, hidden_XD: torch.Tensor, weight_VD: torch.Tensor, labels_X: torch.Tensor) -> None:
    if kind == "chunked":
        loss, _ = mixture({"cross-entropy": 1.0}, hidden_XD, weight_VD, labels_X)
    else:
        loss = torch.nn.functional.cross_entropy(hidden_XD @ weight_VD.T, labels_X, reduction="sum")
    loss.backward()


def peak_of_loss(kind: str, positions: int, vocab: int) -> tuple[int, float]:
    """Run a cross-entropy loss in this process; return its peak bytes beyond inputs and gradients, and seconds."""
    torch.manual_seed(0)
    hidden_XD = torch.randn(positions, 768, requires_grad=True)
    weight_VD = torch.randn(vocab, 768, requires_grad=True)
    labels_X = torch.randint(vocab, (positions,))
    hidden_XD.grad, weight_VD.grad = torch.zeros_like(hidden_XD), torch.zeros_like(weight_VD)
    small = hidden_XD[:8].detach().requires_grad_()
    run_loss(kind, small, weight_VD, labels_X[:8])  # libraries allocate their own memory once
    times, peak = peak_above(lambda: run_loss(kind, hidden_XD, weight_VD, labels_X))
    return peak, times.wall


def memory_of_loss(positions: int, vocab: int) -> dict[str, Any]:
    measured = {kind: own_process("train_drafter.peak_of_loss", kind, positions, vocab) for kind in ("full", "chunked")}
    megabytes = {kind: peak / 1e6 for kind, (peak, _) in measured.items()}
    seconds = {kind: sec for kind, (_, sec) in measured.items()}
    for kind in measured:
        print(f"  loss {kind:8} {megabytes[kind]:8.0f} MB  {seconds[kind]:.2f} s")
    ratio = megabytes["chunked"] / megabytes["full"]
    return {"loss_memory_mb": megabytes, "loss_sec": seconds, "loss_memory_ratio": ratio}


def cost_of_teachers(folder: Path, block: int, rows: int, rounds: int) -> dict[str, Any]:
    """Return the step time of each objective relative to cross-entropy; the teacher has the drafter's shape."""
    data, vocab = documents(folder / "taught", block, rows)
    teacher, seeds = ModelTeacher(model_of(vocab, block, seed=1)), count()
    tasks = {
        name: DrafterTask(model_of(vocab, block), None, {name: 1.0}, None if name == "cross-entropy" else teacher)
        for name in OBJECTIVES
    }

    def round_of(task: DrafterTask) -> tuple[int, float]:
        return fit_round(task, data, 1, folder, seed=next(seeds) // len(tasks))

    times = in_turns({name: partial(round_of, task) for name, task in tasks.items()}, rounds, warm=1)
    medians = {
        name: statistics.median(seconds / tokens for (tokens, seconds), *_ in series) for name, series in times.items()
    }
    ratios = {name: value / medians["cross-entropy"] for name, value in medians.items()}
    for name, ratio in ratios.items():
        print(f"  {name:16} {1 / medians[name]:7.0f} tokens/s  {ratio:.2f} x the time of cross-entropy")
    return {"cost_vs_cross_entropy": ratios}


def main() -> None:
    parser = parser_of(__doc__, "use blocks of 512 tokens and one round", rounds=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options = parser.parse_args()
    block, rounds = (512, 1) if options.quick else (2048, options.rounds)
    results: dict[str, Any] = {"block_tokens": block, "batch": BATCH, "rounds": rounds}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "trainer" in options.parts:
            results |= against_the_trainer(folder, block, 200, rounds, 1 if options.quick else 3)
        if "loss" in options.parts:
            results |= memory_of_loss(BATCH * block, 32000)
        if "teacher" in options.parts:
            results |= cost_of_teachers(folder, block, 60, rounds)
    finish(results)


if __name__ == "__main__":
    main()
