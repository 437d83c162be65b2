"""What correlation tables are worth on real answers, as counted and with 0.01 added to each count.

    python tests/bench/table_worth.py [--work FOLDER] [--quick]

Tables are counted on ShareGPT with LLaMA's vocabulary; Vicuna-7B's own answers to AlpacaEval are the target's output. A
small Llama, trained for some minutes on ShareGPT and nine tenths of the answers, stands for the target's layers, with
heads that learn from those answers; what it would say is replaced by the recorded answer, so that tokens per step are
those of decoding Vicuna's text at temperature 0. Heads of a 7B model are better: what is compared here are tables. (Of
a pair of one's own, see tests/bench/papers.py.)

Intervals: 95 %, bootstrap over prompts, paired for gains. `--work` keeps what was trained. The last line is one JSON
object.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import LLAMA, SHARED, SHAREGPT, VICUNA, finish, parser_of
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.prompts import stop_ids
from draftsmith.data.rendering.render import Renderer, prompt_renderer, render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.evaluation.metrics import speedup_interval
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.loading import load_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe

TRUNK = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "vicuna-v1.1"
NEW_TOKENS = 48
HELD_OUT = 10  # one answer of so many
Variant = tuple[BigramTable | None, dict[str, Any]]
"""A table and how SLiM looks it up; without a table r is 1."""


class RecordedTarget(LeanDecoder):
    """A target that says what is recorded. Hidden states are the model's own; the logits of a node are certain of the
    recorded token after its position, whatever path led there: off the recorded path nothing is accepted anyway."""

    recorded_T = torch.zeros(1, dtype=torch.int64)
    """Prompt and answer of what is decoded."""

    def _forward(self, cache: Any, tokens_BM: Any, positions_BM: Any, *rest: Any) -> Any:
        self._next_BM = (positions_BM + 1).expand(tokens_BM.shape).clamp(max=len(self.recorded_T) - 1)
        return super()._forward(cache, tokens_BM, positions_BM, *rest)

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        known_BM1 = self.recorded_T[self._next_BM][..., None]
        return torch.zeros(*known_BM1.shape[:2], self.vocab_size).scatter_(2, known_BM1, 100.0)


class Bench:
    """Models, and questions with their recorded answers."""

    def __init__(self, work: Path, questions: int, quick: bool) -> None:
        model, tokenizer = load_model(str(work / "trunk")), load_tokenizer(str(LLAMA))
        self.scorer, self.heads = RecordedTarget(model), load_heads(work / "heads")
        self.limits = Limits(NEW_TOKENS, stop_ids(tokenizer))
        self.sequences = (4,) if quick else (1, 4, 20)
        self.questions = []
        template = get_template(TEMPLATE, tokenizer)
        for conversation in islice(read_conversations(str(work / "heldout.jsonl")), questions):
            turns = conversation.turns[:2]
            whole = render(Conversation(conversation.id, turns), template, tokenizer).ids.tolist()
            prompt = prompt_renderer(template, tokenizer)(turns[:1])
            assert whole[: len(prompt)] == prompt
            self.questions.append((prompt, whole[len(prompt) :][:NEW_TOKENS]))

    def run(self, table: BigramTable | None, **options: Any) -> np.ndarray:
        """Tokens and steps of each question [P, 2]."""
        method = build_method("slim-s", Parts(heads=self.heads, table=table), Sampling(), **options)
        rows = []
        for prompt, answer in self.questions:
            self.scorer.recorded_T = torch.tensor(prompt + answer)
            found = decode(self.scorer, method, Sampling(), 0, prompt, self.limits)
            assert found.ids == answer, "not the recorded answer"
            rows.append([found.tally.tokens, found.tally.steps])
        return np.array(rows)

    def slim(self, variant: Variant, sequences: int) -> np.ndarray:
        """Tokens and steps of each question [P, 2]; of two ways without a table the better."""
        table, options = variant
        ways = [options] if table is not None else [{"correlation": "none", "lengths": n} for n in ("all", "full")]
        tried = [self.run(table, num_sequences=sequences, **way) for way in ways]
        return max(tried, key=lambda counts_P2: counts_P2[:, 0].sum() / counts_P2[:, 1].sum())


def gain(counts_P2: np.ndarray, base_P2: np.ndarray, less: float = 1.0) -> tuple[float, list[float]]:
    """A ratio over the base's, less 1, with an interval over prompts drawn for both."""
    ratio, interval = speedup_interval(*counts_P2.T.tolist(), *base_P2.T.tolist())
    assert interval is not None, "at least 3 prompts"
    return ratio - less, [bound - less for bound in interval]


def compare(bench: Bench, rows: dict[str, Variant]) -> dict[str, Any]:
    """Each row's tokens per step and its gains over r = 1 and over the table as counted, by sequences."""
    results: dict[str, Any] = {}
    for sequences in bench.sequences:
        counts = {name: bench.slim(variant, sequences) for name, variant in rows.items()}
        found: dict[str, Any] = {}
        print(f"SLiM, {sequences} sequences: tokens/step, gain over the table as counted")
        for name, counts_P2 in counts.items():
            row: dict[str, Any] = {}
            row["tokens_per_step"], row["interval"] = gain(counts_P2, np.ones_like(counts_P2), 0.0)
            for key, base in (("gain_over_r1", "r = 1"), ("gain_over_counted", "as counted")):
                row[key], row[f"{key}_interval"] = gain(counts_P2, counts[base])
            found[name] = row
            (low, high), (worst, best) = row["interval"], row["gain_over_counted_interval"]
            print(f"  {name:24} {row['tokens_per_step']:.2f} ({low:.2f}–{high:.2f})  {row['gain_over_counted']:+.1%} "
                  f"({worst:+.1%} to {best:+.1%})")  # fmt: skip
        results[f"T=0, {sequences} seq."] = found
    return results


def counted(source: Path, vocab: int) -> BigramTable:
    """The table of the conversations of a file."""
    tokenizer = load_tokenizer(str(LLAMA))
    documents: Iterator[Any] = Renderer(get_template(TEMPLATE, tokenizer), tokenizer, None)(
        read_conversations(str(source))
    )
    return BigramTable.from_documents((document.ids for document in documents), vocab)


def train_models(work: Path, steps: int, heads_steps: int) -> None:
    """Split Vicuna's answers, and train the small Llama and its heads, where they are not there."""
    rows = list(read_conversations(str(VICUNA)))
    train, held = work / "train.jsonl", work / "heldout.jsonl"
    write_conversations([row for number, row in enumerate(rows) if number % HELD_OUT], train)
    write_conversations([row for number, row in enumerate(rows) if not number % HELD_OUT], held)
    data = {
        "template": TEMPLATE, "block_tokens": 256, "heldout_source": str(held), "cache": str(work / "prepared"),
    }  # fmt: skip
    settings = {
        "global_batch": 2, "micro_batch": 2, "warmup": 0.05, "betas": [0.9, 0.95], "evaluate_every": 0,
        "save_every": 0, "learning_rate": 3e-3,
    }  # fmt: skip
    mixture = [{"source": str(SHAREGPT)}, {"source": str(train), "weight": 2.0}]
    measure = {"prompts": 0, "blocks": 32}
    trunk = str(work / "trunk")
    drafter = {
        "kind": "drafter", "out": trunk, "tokenizer": str(LLAMA), "model": {"config": TRUNK},
        "data": data | {"mixture": mixture}, "train": settings | {"steps": steps, "weight_decay": 0.05},
        "measure": measure,
    }  # fmt: skip
    heads = {
        "kind": "heads", "out": str(work / "heads"), "target": trunk, "num_heads": 4, "num_layers": 1,
        "data": data | {"source": str(train)}, "train": settings | {"steps": heads_steps}, "measure": measure,
    }  # fmt: skip
    for recipe in (drafter, heads):
        checked: Any = parse_recipe(recipe, "table_worth")
        run_train(checked)


def main() -> None:
    parser = parser_of(__doc__, "few questions, few steps", questions=24, steps=1000, heads_steps=150)
    parser.add_argument("--work", type=Path, help="folder that keeps what is trained")
    options = parser.parse_args()
    if options.quick:
        options.questions, options.steps, options.heads_steps = 4, 4, 4
    if not SHARED.is_dir():
        parser.error(f"there is no folder {SHARED}: set DRAFTSMITH_SHARED to the shared data")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        train_models(work, options.steps, options.heads_steps)
        training = {"steps": options.steps, "heads_steps": options.heads_steps, "sec": time.monotonic() - began}
        bench = Bench(work, options.questions, options.quick)
        table = counted(SHAREGPT, bench.scorer.vocab_size)
        rows: dict[str, Variant] = {"r = 1": (None, {}), "as counted": (table, {}), "add-k": (table, {"add_k": 0.01})}
    results = {"variants": compare(bench, rows), "questions": len(bench.questions), "training": training}
    finish({"real": results, "sec": time.monotonic() - began})


if __name__ == "__main__":
    main()
