"""What correlation tables are worth: smoothing, pruning, and drafts from counts alone.

    python tests/bench/table_worth.py [--pair runs/quickstart] [--work FOLDER] [--parts pair,real] [--quick]

`pair`: a finished quickstart's target and heads, with tables counted on the target's own answers and on the corpus's
text; tokens per step at temperatures 0 and 1 on held-out questions.

`real`: tables counted on ShareGPT with LLaMA's vocabulary, and Vicuna-7B's own answers to AlpacaEval as the target's
output. A small Llama, trained for some minutes on ShareGPT and nine tenths of the answers, stands for the target's
layers, with heads that learn from those answers; what it would say is replaced by the recorded answer, so that tokens
per step and acceptance are those of decoding Vicuna's text. The same small Llama is the neural drafter. Neither is as
good as one that comes from a 7B model: what is compared here are tables.

Intervals: 95 %, bootstrap over prompts, paired for gains. `--work` keeps what was trained. The last line is one JSON
object.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import LLAMA, SHARED, SHAREGPT, VICUNA, Pair, finish, parser_of
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.prompts import stop_ids
from draftsmith.data.rendering.render import render, render_all, render_prompt
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.metrics import Tally, speedup_interval
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.lean import LeanLlama
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe

TRUNK = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
HEADS = 4
NEW_TOKENS = 48
SEQUENCES = (1, 4, 20)
QUICK = ((4,), (1,))  # sequences and gammas
HELD_OUT = 10  # one answer of so many
BATCH = 16
SMOOTHED: dict[str, dict[str, Any]] = {
    "bigram": {},
    "bigram, add-k 0.01": {"smoothing": "add-k", "strength": 0.01},
    "bigram, Kneser-Ney": {"smoothing": "kneser-ney"},
}


@dataclass(frozen=True)
class Variant:
    """A table and how SLiM looks it up; without a table r is 1."""

    table: BigramTable | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer that is known of it, if one is."""

    ids: list[int]
    answer: list[int] = field(default_factory=list)


class RecordedTarget(LeanLlama):
    """A target that says what is recorded. Hidden states are the model's own; the logits of a node are certain of the
    recorded token after its position, whatever path led there: off the recorded path nothing is accepted anyway."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.recorded_BT = torch.zeros(1, 1, dtype=torch.int64)
        """Prompt and answer of each row that is decoded, padded with anything."""

    def _forward(self, cache: Any, tokens_BM: Any, positions_BM: Any, *rest: Any) -> Any:
        self._next_BM = (positions_BM + 1).expand(tokens_BM.shape).clamp(max=self.recorded_BT.shape[1] - 1)
        return super()._forward(cache, tokens_BM, positions_BM, *rest)

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        known_BM1 = self.recorded_BT.gather(1, self._next_BM)[..., None]
        return torch.zeros(*known_BM1.shape[:2], self.vocab_size).scatter_(2, known_BM1, 100.0)


@dataclass(frozen=True)
class Bench:
    """Something to decode with, and questions."""

    scorer: Any
    heads: Any
    drafter: Any
    questions: list[Question]
    stop: tuple[int, ...]
    sequences: tuple[int, ...] = SEQUENCES
    gammas: tuple[int, ...] = (1, 2)
    done: list[float] = field(default_factory=lambda: [0, time.monotonic()])

    def run(self, method: str, temperature: float, table: BigramTable | None = None, **options: Any) -> np.ndarray:
        """Tokens, steps, accepted and examined draft tokens of each question [P, 4].

        Raises:
            AssertionError: greedy decoding of a recorded target that does not write what is recorded.
        """
        sampling, limits = Sampling(temperature), Limits(NEW_TOKENS, self.stop)
        parts = Parts(drafter=self.drafter, heads=self.heads, table=table)
        built = build_method(method, parts, sampling, **options)
        rows = []
        for start in range(0, len(self.questions), BATCH):
            asked = self.questions[start : start + BATCH]
            recorded = [torch.tensor(question.ids + question.answer) for question in asked]
            if asked[0].answer:
                self.scorer.recorded_BT = torch.nn.utils.rnn.pad_sequence(recorded, batch_first=True)
            tallies, written = [Tally() for _ in asked], [list[int]() for _ in asked]
            rng = Rng.for_rows(start, len(asked))
            for step in generate(self.scorer, *built, [question.ids for question in asked], limits, sampling, rng):
                for row, tally in enumerate(tallies):
                    tally.add_step(step, row)
                    written[row] += step.new_ids[row]
            for question, ids in zip(asked, written, strict=True):
                assert not question.answer or ids == question.answer, f"{method}: not the recorded answer"
            self.tell()
            rows += [[tally.tokens, tally.steps, tally.accepted, tally.examined] for tally in tallies]
        return np.array(rows)

    def tell(self) -> None:
        """A line on standard error now and then."""
        self.done[0] += 1
        if self.done[0] % 20 == 0:
            print(f"{self.done[0]} batches decoded, {time.monotonic() - self.done[1]:.0f} s", file=sys.stderr)

    def slim(self, variant: Variant, sequences: int, temperature: float) -> np.ndarray:
        """Tokens and steps of each question [P, 2]."""
        ways = [variant.options]
        if variant.table is None:  # whichever does better
            ways = [{"correlation": "none", "lengths": lengths} for lengths in ("all", "full")]
        tried = [self.run("slim-s", temperature, variant.table, sequences=sequences, **way)[:, :2] for way in ways]
        return max(tried, key=per_step)


def paired_gain(counts_P2: np.ndarray, base_P2: np.ndarray) -> tuple[float, tuple[float, float]]:
    """How much more tokens per step than the base's, as a share of it, with an interval over prompts drawn for both."""
    ratio, interval = speedup_interval(*counts_P2.T.tolist(), *base_P2.T.tolist())
    assert interval is not None, "at least 3 prompts"
    return ratio - 1, (interval[0] - 1, interval[1] - 1)


def per_step(counts_P2: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Tokens per step, or accepted per examined, with an interval."""
    gain, (low, high) = paired_gain(counts_P2, np.ones_like(counts_P2))
    return gain + 1, (low + 1, high + 1)


def variants(table: BigramTable) -> dict[str, Variant]:
    """A table as it is, smoothed and pruned; of the last, pairs may take half of their bytes."""
    margins, pairs = 32 * table.vocab_size + 8, 8 * table.entries
    pruned: dict[str, dict[str, Any]] = {
        "count ≥ 2": {"min_count": 2},
        "count ≥ 5": {"min_count": 5},
        "top 10 a row": {"top": 10},
        "half the bytes": {"megabytes": (margins + pairs / 2) / 1e6},
    }
    rows = {"r = 1": Variant(None), "as counted": Variant(table)}
    rows |= {name.partition(", ")[2]: Variant(table, options) for name, options in SMOOTHED.items() if options}
    return rows | {name: Variant(table.pruned(**options)) for name, options in pruned.items()}


def compare(bench: Bench, rows: dict[str, Variant], temperatures: Sequence[float]) -> dict[str, Any]:
    """Each row's tokens per step and its gains over r = 1 and over the table as counted, by temperature, sequences."""
    results: dict[str, Any] = {}
    for temperature in temperatures:
        for sequences in bench.sequences:
            counts = {name: bench.slim(variant, sequences, temperature) for name, variant in rows.items()}
            found: dict[str, Any] = {}
            for name, counts_P2 in counts.items():
                value, interval = per_step(counts_P2)
                gain, gain_interval = paired_gain(counts_P2, counts["r = 1"])
                other, other_interval = paired_gain(counts_P2, counts["as counted"])
                found[name] = {
                    "tokens_per_step": value, "interval": interval, "gain_over_r1": gain,
                    "gain_over_r1_interval": gain_interval, "gain_over_counted": other,
                    "gain_over_counted_interval": other_interval,
                }  # fmt: skip
            results[f"T={temperature:g}, {sequences} seq."] = found
    return results


def acceptance(bench: Bench, tables: dict[str, BigramTable], temperatures: Sequence[float]) -> dict[str, Any]:
    """Shares of draft tokens that the target accepts, with intervals; tables by what they were counted on."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {"unigram": ("unigram", {})}
    methods |= {name: ("bigram", options) for name, options in SMOOTHED.items()}
    methods["neural drafter"] = ("speculative", {})
    results: dict[str, Any] = {}
    for source, temperature, gamma in itertools.product(tables, temperatures, bench.gammas):
        found = {}
        for name, (method, options) in methods.items():
            counts_P4 = bench.run(method, temperature, tables[source], gamma=gamma, **options)
            rate, interval = per_step(counts_P4[:, 2:])
            found[name] = {"acceptance_rate": rate, "interval": interval}
        results[f"{source}, T={temperature:g}, gamma {gamma}"] = found
    return results


def rendered(source: Path, template: str, tokenizer: Any) -> Iterator[np.ndarray]:
    """Ids of the conversations of a file."""
    rows = read_conversations(str(source))
    return (document.ids for document in render_all(rows, tokenizer, get_template(template, tokenizer), None))


def pair_part(pair: Path, questions: int, quick: bool) -> dict[str, Any]:
    """The embedded pair."""
    found = Pair(pair, questions)
    asked = [Question(ids) for ids in found.prompts]
    extra = QUICK if quick else ()
    bench = Bench(found.target, load_heads(pair / "heads"), found.drafter, asked, found.stop, *extra)
    own = rendered(pair / "answers.jsonl", "chatml", found.tokenizer)
    text = rendered(pair / "corpus" / "train.jsonl", "chatml", found.tokenizer)
    vocab, temperatures = bench.scorer.vocab_size, ((1.0,) if quick else (0.0, 1.0))
    whole, whole_text = (BigramTable.from_documents(documents, vocab) for documents in (own, text))
    rows = variants(whole) | {"counted on the text": Variant(whole_text)}
    return {
        "variants": compare(bench, rows, temperatures),
        "acceptance": acceptance(bench, {"own answers": whole, "text": whole_text}, temperatures),
        "questions": len(asked),
    }


def real_part(work: Path, questions: int, steps: int, heads_steps: int, quick: bool) -> dict[str, Any]:
    """Real answers with LLaMA's vocabulary."""
    tokenizer = load_tokenizer(str(LLAMA))
    train, held = split(work)
    trained = time.monotonic()
    trunk = train_models(work, train, held, steps, heads_steps)
    trained = time.monotonic() - trained
    template = get_template("vicuna-v1.1", tokenizer)
    asked = []
    for conversation in islice(read_conversations(str(held)), questions):
        turns = conversation.turns[:2]
        whole = render(Conversation(conversation.id, turns), template, tokenizer).ids.tolist()
        prompt = render_prompt(turns[:1], template, tokenizer)
        assert whole[: len(prompt)] == prompt
        asked.append(Question(prompt, whole[len(prompt) :][:NEW_TOKENS]))
    model = load_model(str(trunk))
    extra = QUICK if quick else ()
    bench = Bench(
        RecordedTarget(model), load_heads(work / "heads"), wrap_model(model), asked, stop_ids(tokenizer), *extra
    )
    vocab = bench.scorer.vocab_size
    shared = BigramTable.from_documents(rendered(SHAREGPT, "vicuna-v1.1", tokenizer), vocab)
    own = BigramTable.from_documents(rendered(train, "vicuna-v1.1", tokenizer), vocab)
    both = BigramTable.merge(shared, own)
    rows = variants(shared) | {"counted on own answers": Variant(own), "ShareGPT and own": Variant(both)}
    return {
        "variants": compare(bench, rows, (0.0,)),
        "acceptance": acceptance(bench, {"ShareGPT": shared, "ShareGPT and own": both}, (0.0,)),
        "questions": len(asked),
        "training": {"steps": steps, "heads_steps": heads_steps, "sec": trained},
    }


def split(work: Path) -> tuple[Path, Path]:
    """Vicuna's answers to train on and those held out."""
    files = work / "train.jsonl", work / "heldout.jsonl"
    rows = list(read_conversations(str(VICUNA)))
    write_conversations([row for place, row in enumerate(rows) if place % HELD_OUT], files[0])
    write_conversations([row for place, row in enumerate(rows) if not place % HELD_OUT], files[1])
    return files


def train_models(work: Path, train: Path, held: Path, steps: int, heads_steps: int) -> Path:
    """The small Llama and its heads, or those that are there. Returns the Llama's folder."""
    common = {
        "template": "vicuna-v1.1", "block_tokens": 256, "heldout_source": str(held), "cache": str(work / "prepared")
    }  # fmt: skip
    settings = {
        "global_batch": 2, "micro_batch": 2, "warmup": 0.05, "betas": [0.9, 0.95], "evaluate_every": 0,
        "save_every": 0,
    }  # fmt: skip
    mixture = [{"source": str(SHAREGPT)}, {"source": str(train), "weight": 2.0}]
    out = work / "trunk"
    drafter = {
        "kind": "drafter", "out": str(out), "tokenizer": str(LLAMA), "model": {"config": TRUNK},
        "data": common | {"mixture": mixture},
        "train": settings | {"steps": steps, "learning_rate": 3e-3, "weight_decay": 0.05},
        "measure": {"prompts": 0, "blocks": 32},
    }  # fmt: skip
    heads = {
        "kind": "heads", "out": str(work / "heads"), "target": str(out), "num_heads": HEADS, "num_layers": 1,
        "data": common | {"source": str(train)}, "train": settings | {"steps": heads_steps, "learning_rate": 3e-3},
        "measure": {"prompts": 0, "blocks": 32},
    }  # fmt: skip
    for recipe in (drafter, heads):
        checked: Any = parse_recipe(recipe, "table_worth")
        run_train(checked)
    return out


def lines(part: str, results: dict[str, Any]) -> Iterator[str]:
    """What a reader wants to see."""
    yield f"\n{part}: {results['questions']} held-out questions, up to {NEW_TOKENS} tokens each"
    for when, rows in results["variants"].items():
        yield f"SLiM, {when}: tokens/step, gain over the table as counted"
        for name, row in rows.items():
            low, high = row["gain_over_counted_interval"]
            gain = "" if name == "as counted" else f"  {row['gain_over_counted']:+.1%} ({low:+.1%} to {high:+.1%})"
            yield f"  {name:24} {row['tokens_per_step']:.2f} ({row['interval'][0]:.2f}–{row['interval'][1]:.2f}){gain}"
    for when, rows in results["acceptance"].items():
        cells = [f"{name} {row['acceptance_rate']:.3f}" for name, row in rows.items()]
        yield f"acceptance, {when}: {', '.join(cells)}"


def main() -> None:
    parser = parser_of(__doc__, "few questions, few steps", pair=True, questions=24, heads_steps=150)
    parser.add_argument("--work", type=Path, help="folder that keeps what is trained for the part `real`")
    parser.add_argument("--parts", default="pair,real")
    parser.add_argument("--steps", type=int, default=1000, help="of 512 tokens, for the small Llama")
    options = parser.parse_args()
    if options.quick:
        options.questions, options.steps, options.heads_steps = 4, 4, 4
    wanted = options.parts.split(",")
    if unknown := sorted(set(wanted) - {"pair", "real"}):
        parser.error(f"unknown part {unknown[0]!r}: pair and real are known")
    if "real" in wanted and not SHARED.is_dir():
        parser.error(f"there is no folder {SHARED}: set DRAFTSMITH_SHARED to the shared data, or --parts pair")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        if "pair" in wanted:
            results["pair"] = pair_part(options.pair, options.questions, options.quick)
        if "real" in wanted:
            results["real"] = real_part(work, options.questions, options.steps, options.heads_steps, options.quick)
    for part, found in results.items():
        print("\n".join(lines(part, found)))
    finish(results | {"sec": time.monotonic() - began})


if __name__ == "__main__":
    main()
