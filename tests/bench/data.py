"""Measure data preparation: time relative to tokenisation only, peak memory, packing density, and gain of packing.

    python tests/bench/data.py [--quick] [--parts throughput training limited] [--corpus FILE] [--tokenizer FOLDER]
        [--megabytes 400]

The default corpus is the ShareGPT sample of the shared data with LLaMA's tokenizer; if the files are missing, it is the
documentation of installed packages with a BPE trained on it. `prepare_vs_tokenizer` is the time to prepare
conversations from their file, divided by the time of the fastest tokenizer for the vocabulary on all cores with all
messages in memory (`encode_batch_fast` of tokenizers or list encoding of sentencepiece); runs are interleaved, and the
median ratio is reported. `peak_mb` is the peak resident size of a process that prepares a corpus ten times larger than
the memory that it may allocate (RLIMIT_DATA, `--megabytes`; skipped with `--quick`). Packed and padded batches train a
Llama with 12 layers of size 192. The last line of the output is one JSON object.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import LLAMA, SHAREGPT, against_tokenizers, finish, in_turns, own_process, parser_of, random_llama
from draftsmith.data.blocks.packing import Batch
from draftsmith.data.blocks.prepared import prepare
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.sources.documentation import documentation_conversations
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.train.tasks.drafter import DrafterTask

BLOCK = 2048
PARTS = ("throughput", "training", "limited")
TEMPLATE = get_template("vicuna-v1.1")


def defaults(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a corpus and a tokenizer that need no download."""
    if SHAREGPT.is_file():
        return SHAREGPT, LLAMA
    chats, _, _ = documentation_conversations(["numpy", "torch"], heldout_share=0.01, max_megabytes=5, seed=0)
    write_conversations(chats, folder / "corpus.jsonl")
    texts = (turn.text for chat in chats for turn in chat.turns)
    train_bpe(texts, 4096, ("<pad>", "</s>")).save_pretrained(folder / "tokenizer")
    return folder / "corpus.jsonl", folder / "tokenizer"


def raw_tokenizers(tokenizer: Any, folder: Path, texts: list[str]) -> dict[str, Callable[[], int]]:
    """Return functions that tokenise the texts on all cores and return the number of tokens."""
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    tokenizers = {"tokenizers": lambda: sum(len(e.ids) for e in encode(texts, add_special_tokens=False))}
    model = folder / "tokenizer.model"
    if model.is_file():
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        tokenizers["sentencepiece"] = lambda: sum(map(len, processor.encode(texts, num_threads=os.cpu_count())))
    return tokenizers


def repeated(corpus: Path, times: int) -> Iterator[Conversation]:
    """Yield the conversations of the corpus `times` times, with distinct ids."""
    chats = list(read_conversations(str(corpus)))
    for number in range(times):
        for chat in chats:
            yield Conversation(f"{chat.id}-{number}", chat.turns)


def throughput(corpus: Path, tokenizer: Any, tokenizer_folder: Path, folder: Path, quick: bool) -> dict[str, Any]:
    """Compare the time of data preparation with the time of tokenisation only."""
    file = folder / "repeated.jsonl"
    write_conversations(repeated(corpus, 2 if quick else 6), file)
    texts = [turn.text for chat in read_conversations(str(file)) for turn in chat.turns]

    def prepared() -> int:
        data = prepare(read_conversations(str(file)), tokenizer, TEMPLATE, BLOCK, folder / "prepared", source={})
        return int(data.manifest["tokens"])

    tokenizers = raw_tokenizers(tokenizer, tokenizer_folder, texts)
    fastest, ratios, rates = against_tokenizers(tokenizers, "prepare", prepared, 3 if quick else 9)
    results = {"prepare_vs_tokenizer": ratios["time"], "fastest_tokenizer": fastest, "mtok_per_sec": rates}
    return results | {"corpus_mb": file.stat().st_size / 1e6}


def limited(corpus: Path, tokenizer_folder: Path, megabytes: int, folder: Path) -> dict[str, Any]:
    """Prepare a corpus ten times larger than the memory that the process may allocate."""
    file = folder / "large.jsonl"
    write_conversations(read_conversations(str(corpus)), file)
    write_conversations(repeated(corpus, -(-10 * megabytes * 1_000_000 // file.stat().st_size)), file)
    start = time.perf_counter()
    small = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # the limit includes the stacks and heaps of threads
    arguments = (megabytes, str(file), str(tokenizer_folder), str(folder / "large"))
    results: dict[str, Any] = own_process("children.prepare_limited", *arguments, environment=small)
    results |= {"corpus_mb": file.stat().st_size / 1e6, "limit_mb": megabytes, "seconds": time.perf_counter() - start}
    file.unlink()
    return results


def training(corpus: Path, tokenizer: Any, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure tokens per second of training steps on packed and padded batches of the same documents."""
    module = DrafterTask(random_llama((192, 512, 12, 4, len(tokenizer))), None).module
    batches = 2 if quick else 6
    queues: dict[str, Iterator[Batch]] = {}
    for packing in ("best-fit", "pad"):
        rows = read_conversations(str(corpus))
        data = prepare(rows, tokenizer, TEMPLATE, 1024, folder / packing, source={}, packing=packing)
        order = np.random.default_rng(0).permutation(data.blocks)  # training also draws blocks in random order
        queues[packing] = iter([data.batch(order[4 * n : 4 * n + 4]) for n in range(batches)])

    def step(name: str) -> int:
        batch = next(queues[name])
        sums, counts = module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        (sums.sum() / counts.sum()).backward()
        return int((batch.documents_BT >= 0).sum())

    times = in_turns({name: partial(step, name) for name in queues}, batches)
    rates = {name: 1 / statistics.median(run.wall / run.result for run in times[name]) for name in times}
    for name, rate in rates.items():
        print(f"training on {name:9s} {rate:8.0f} tokens/s")
    return {"tokens_per_sec": rates, "packed_vs_padded": rates["best-fit"] / rates["pad"]}


def main() -> None:
    parser = parser_of(__doc__, "take under a minute; skip the corpus larger than memory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run (default: all; --quick skips limited)")
    parser.add_argument("--corpus", type=Path, help="file of conversations")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer")
    parser.add_argument("--megabytes", type=int, default=400, help="memory limit of part `limited` (default: 400)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer_folder = defaults(folder)
        corpus, tokenizer_folder = arguments.corpus or corpus, arguments.tokenizer or tokenizer_folder
        tokenizer = load_tokenizer(str(tokenizer_folder))
        data = prepare(read_conversations(str(corpus)), tokenizer, TEMPLATE, BLOCK, folder / "once", source={})
        result: dict[str, Any] = {"corpus": corpus.name, "packing_density": data.manifest["packing_density"]}
        print(f"blocks of {BLOCK} are {result['packing_density']:.1%} full, {data.manifest['rendering']}")
        parts = arguments.parts or [part for part in PARTS if part != "limited" or not arguments.quick]
        if "throughput" in parts:
            result |= throughput(corpus, tokenizer, tokenizer_folder, folder, arguments.quick)
            print(f"prepare_vs_tokenizer {result['prepare_vs_tokenizer']:.2f}")
        if "training" in parts:
            result["training"] = training(corpus, tokenizer, folder, arguments.quick)
        if "limited" in parts:
            result["limited"] = limited(corpus, tokenizer_folder, arguments.megabytes, folder)
            result["peak_mb"] = result["limited"]["peak_mb"]
            print(f"limited: {result['limited']}")
    finish(result)


if __name__ == "__main__":
    main()
