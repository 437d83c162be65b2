"""Golden outputs: what the package computes from tiny models and texts, recorded once and compared after a change.

    python tests/golden.py --record golden.json      # writes them
    python tests/golden.py --compare golden.json     # computes them again; names each difference, exits 1 if any
    python tests/golden.py --compare golden.json --only decode --only train

A difference is any: numbers are compared to the last bit, files by their hash. That holds on one machine with the same
libraries. All but the part `decode` goes through the command line and the files that it leaves, so that modules may
move. A command is run by a fork of this process, as `python -m draftsmith` runs it: importing torch and transformers
anew for each of them would take minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import chdir
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

SETTINGS = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
os.environ.update(SETTINGS | {"CUDA_VISIBLE_DEVICES": ""})

# ruff: noqa: E402
import accelerate  # noqa: F401 - here, so that no command has to import it
import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SEED = int(os.environ.get("GOLDEN_SEED", "0"))
"""Another one gives other outputs: a way to see that differences are found."""
Golden = dict[str, Any]
Options = dict[str, Any]
RUNS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
LLAMA, T5 = RUNS["models"]["llama"], RUNS["models"]["t5"]
NOT_COMPARED = {"second", "seconds", "mfu", "memory", "bytes", "version", "files"}
NOT_COMPARED |= {"artifacts", "says", "advice", "headline", "sentences"}
"""A key with one of these words tells of clocks, machine, libraries or whole files, or has words for people."""


# What everything is made from: texts, a tokenizer, models

WORDS = ["the", "tree", "token", "draft", "target", "head", "table", "keeps", "drops", "reads", "fast", "slow", "exact"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSY: list[tuple[str, ...]] = [
    ("What is a “naïve” π-tree? 🌳", "一棵树 — so.\n\n```py\nx = 'é'\n```", "And  two  spaces?", " Led by one. "),
    ("", "An answer to nothing."),
    ("A question without an answer", ""),
    ("How <b>bold</b> is <|im_end|> here?", "As \\_bold\\_ as USER: and ASSISTANT: are."),
    ("trailing question", "answer", "one more that nobody answers"),
    ("the same", "the same"),
    ("the same", "the same"),
    ("long " * 60, "longer " * 90, "short", "words"),
    ("As an AI?", "As an AI language model, I cannot."),
]


def make_folder() -> None:
    """Into the current folder, whose relative paths are the same in each run: texts, tokenizer, models."""
    rng = random.Random(SEED)
    rows, texts = [], []
    for number in range(60):
        turns = []
        for _ in range(rng.randint(1, 3)):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(2))
            turns += [{"from": "human", "value": question + "?"}, {"from": "gpt", "value": answer + "."}]
            texts += [question, answer]
        rows.append({"id": f"row{number}", "conversations": turns})
    Path("rows.json").write_text(json.dumps(rows))
    with Path("messy.jsonl").open("w") as out:
        for number, said in enumerate(MESSY):
            messages = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), said)]
            system = {"role": "system", "content": "Be exact, ¡por favor!"}
            row = {"id": f"messy{number}", "messages": messages if number else [system, *messages]}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    tokenizer = make_tokenizer(texts + ["".join(rng.choices("abcdefghij", k=6)) for _ in range(200)])
    tokenizer.save_pretrained("tokenizer")
    target, t5 = random_model(0, 0.3, **LLAMA), random_model(2, 0.3, **T5)
    for name, model in (("target", target), ("near", random_model(1, 0.05, target, **LLAMA)), ("whole-t5", t5)):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=LLAMA["vocab_size"], special_tokens=SPECIALS, **settings)
    backend.train_from_iterator(texts, trainer=trainer)
    names = {"bos_token": SPECIALS[0], "pad_token": SPECIALS[0], "eos_token": SPECIALS[-1]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=SPECIALS[1:-1], **names)
    tokenizer.chat_template = CHATML
    return tokenizer


@torch.no_grad()
def random_model(seed: int, scale: float, like: Any = None, **config: Any) -> Any:
    """A model of which no distribution is flat; or `like` another one, but for noise of this scale."""
    settings = AutoConfig.for_model(**config)
    kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
    model, generator = kind.from_config(settings).eval(), torch.Generator().manual_seed(1000 * SEED + seed)
    if like is not None:
        model.load_state_dict(like.state_dict())
    for weight in model.parameters():
        noise = scale * torch.randn(weight.shape, generator=generator)
        if like is not None or weight.dim() == 2:
            weight.copy_(noise if like is None else weight + noise)
    return model


# Commands, and what is kept of files


def draftsmith(*arguments: str) -> str:
    """`python -m draftsmith ARGUMENTS` in a fork of this process; what it printed."""
    said = Path("said.txt")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        with said.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.argv = ["draftsmith", *arguments]
        try:
            runpy.run_module("draftsmith", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code)
    code, text = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text(errors="replace")
    assert code == 0, f"draftsmith {' '.join(arguments)}: exit code {code}\n{text}"
    return text


def run_recipe(command: str, name: str, recipe: Options, *arguments: str) -> None:
    """Write a recipe and run a command with it."""
    Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    draftsmith(command, f"{name}.yaml", *arguments)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def read(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def timeless(value: Any) -> Any:
    """A JSON value without what differs from run to run, or tells of versions."""
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if not NOT_COMPARED.intersection(key.split("_"))}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def fingerprint(value: Any) -> str:
    return digest(json.dumps(timeless(value), sort_keys=True).encode())


def fingerprint_of(path: Path) -> Any:
    """Of a file: tensors and arrays by hash, JSON by the hash of its content, a manifest by its keys, text for people
    by its presence."""
    if path.name == "artifact.json":
        return sorted(read(path))
    if path.suffix == ".json":
        return fingerprint(read(path))
    if path.suffix == ".safetensors" and path.name != "table.safetensors":  # whose headers come in any order
        length = int.from_bytes((content := path.read_bytes())[:8], "little")
        header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True)
        return digest(header.encode() + content[8 + length :])
    if path.suffix in (".pt", ".npz"):  # archives, which hold more than their tensors
        loaded = torch.load(path, weights_only=True) if path.suffix == ".pt" else np.load(path)
        return {key: digest(np.asarray(loaded[key]).tobytes()) for key in sorted(loaded)}
    return "there" if path.suffix in (".md", ".py", ".yaml") else digest(path.read_bytes())


def files(folder: Path | str, prefix: str) -> Golden:
    """Fingerprints of a folder's files by prefix and name."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {f"{prefix}{path.relative_to(folder)}": fingerprint_of(path) for path in paths}


# Part 1: every method, by the engine itself


class RandomHeads(torch.nn.Module):
    """Heads near a target's own projection."""

    def __init__(self, head_VD: torch.Tensor, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        generator = torch.Generator().manual_seed(1000 * SEED + 5)
        self.weight_KVD = head_VD + 0.3 * torch.randn(num_heads, *head_VD.shape, generator=generator)

    def forward(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("kvd,...d->...kv", self.weight_KVD, hidden_XD)


def decode() -> Golden:
    """Tokens and counts of every method, at batch 1 and 4, greedily and sampled in two ways; some methods with other
    forwards of the target, and within `generate` of transformers."""
    from draftsmith.checkpoints.table.table import BigramTable
    from draftsmith.decode import method
    from draftsmith.decode.engine import Limits, generate
    from draftsmith.decode.methods import METHODS, Parts, build_method
    from draftsmith.decode.models.loading import wrap_model
    from draftsmith.decode.rng import Rng
    from draftsmith.decode.warpers import Sampling

    vocab, numbers = 24, np.random.default_rng(SEED)
    table = BigramTable.from_documents([numbers.integers(0, vocab, 200)], vocab)
    prompts = [numbers.integers(0, vocab, length).tolist() for length in (5, 1, 9, 3)]
    llama, t5 = (sizes | {"vocab_size": vocab} for sizes in (LLAMA | {"hidden_size": 32}, T5 | {"d_model": 32}))
    decoder, seq2seq = random_model(10, 0.4, **llama), random_model(13, 1.5, **t5)
    drafters = [random_model(seed, 0.05, decoder, **llama) for seed in (11, 12)]
    heads = RandomHeads(decoder.lm_head.weight.detach(), 4)
    samplings = {"T=0": Sampling(0.0), "T=1": Sampling(1.0), "T=0.8 k=9 p=0.9": Sampling(0.8, top_k=9, top_p=0.9)}
    few: list[Any] = [[name, {}] for name in ("autoregressive", "speculative", "multi-candidate", "mjsd")]
    forms: dict[str, tuple[list[Any], bool, list[Any]]] = {
        "": ([decoder, *drafters], True, [[name, {}] for name in METHODS] + RUNS["cases"]),
        "plain forward, ": ([decoder, *drafters], False, [*few, ["slim-s", {}]]),
        "T5, ": ([seq2seq, random_model(14, 0.1, seq2seq, **t5)], True, few),
    }
    found: Golden = {}
    for form, (scored, fast, cases) in forms.items():
        target, drafter, *more = (wrap_model(model, fast=fast) for model in scored)
        parts = Parts(drafter, heads, table, tuple(more))
        for (name, options), warping, rows in product(cases, samplings, (prompts[:1], prompts)):
            made, limits = build_method(name, parts, samplings[warping], **options), Limits(20, (vocab - 1,))
            rng = Rng.for_rows(SEED + 7, len(rows))
            steps = list(generate(target, *made, rows, limits, samplings[warping], rng))
            tokens = [[token for step in steps for token in step.new_ids[row]] for row in range(len(rows))]
            accepted = [step.accepted.tolist() for step in steps]
            others = [[step.examined.tolist(), step.nodes, step.forwards] for step in steps]
            key = " ".join([f"{form}{name}", *(f"{option}={options[option]}" for option in options), warping])
            everything = digest(json.dumps([tokens, accepted, others]).encode())
            found[f"{key}, batch {len(rows)}"] = [tokens[0], [row[0] for row in accepted], everything]
    for name, sample in product(("speculative", "medusa", "bigram"), (False, True)):
        custom = method(name, drafter=drafters[0], heads=heads, table=table)
        torch.manual_seed(SEED)
        ids = decoder.generate(torch.tensor(prompts[:1]), max_new_tokens=20, do_sample=sample, custom_generate=custom)
        found[f"{name} in transformers, do_sample={sample}"] = ids[0].tolist()
    return found


# The other parts: commands, and what they leave

COMMON: Options = RUNS["common"]
RECIPES: dict[str, Options] = RUNS["recipes"]


@cache
def trained(name: str) -> Path:
    """Run a training recipe; its folder."""
    recipe = COMMON | {"out": name} | RECIPES[name] | {"train": COMMON["train"] | {"seed": SEED}}
    recipe["data"] = COMMON["data"] | RECIPES[name].get("data", {})
    if recipe["kind"] == "table":
        recipe = {key: value for key, value in recipe.items() if key not in ("target", "train", "measure")}
    if any("cache" in recipe.get(section, {}) for section in ("teacher", "hidden")):
        run_recipe("prepare", name, recipe, "--teacher")
    run_recipe("train", name, recipe)
    return Path(name)


def train() -> Golden:
    """Losses and held-out measurements of ten steps of each training task."""
    found: Golden = {}
    for name in (name for name, recipe in RECIPES.items() if recipe["kind"] != "table"):
        log = trained(name).with_name(f"{name}.state") / "log.jsonl"
        lines = [timeless(json.loads(line)) for line in log.read_text().splitlines()]
        for key in ("loss", "grad_norm", "learning_rate"):
            found[f"{name} {key}"] = [line[key] for line in lines if key in line]
        assert len(found[f"{name} loss"]) == COMMON["train"]["steps"], name
        found |= {f"{name} after {line['step']}": line["evaluation"] for line in lines if "evaluation" in line}
    return found


def artifacts() -> Golden:
    """Files of every artifact."""
    folders = [str(trained(name)) for name in RECIPES]
    for folder in folders:
        draftsmith("doctor", folder)
    return {name: value for folder in folders for name, value in files(folder, f"{folder}/").items()}


def data() -> Golden:
    """Token ids, labels and blocks of messy conversations, and what became of the rows, in every template."""
    common = COMMON["data"] | {"source": "messy.jsonl", "heldout_source": "rows.json", "block_tokens": 256}
    found: Golden = {}
    for name, changes in RUNS["data"].items():
        own = f"prepared {name}"
        section = common | {"cache": own, "min_clean_share": 0.0} | changes
        run_recipe("prepare", own, {"kind": "table", "out": "none", "tokenizer": "tokenizer", "data": section})
        for part in ("train", "heldout"):
            (folder,) = Path(own).glob(f"*/{part}")
            for path in sorted(folder.glob("*.npy")):
                found[f"{name}, {part} {path.stem}"] = digest(np.load(path).astype(np.int64).tobytes())
            manifest = read(folder / "data.json")
            found[f"{name}, {part} counts"] = {key: manifest[key] for key in manifest.keys() - {"source", "sha256"}}
        (report,) = Path(own).glob("*/report.json")
        found[f"{name}, report"] = read(report)
    return found


def exports() -> Golden:
    """Files of every format that needs no other program."""
    found: Golden = {}
    for name, forms in RUNS["exports"].items():
        for form, options in forms.items():
            out = f"{name}-as-{form}"
            draftsmith("export", str(trained(name)), "--to", form, "--out", out, *options.split())
            found |= files(out, f"{form} of {name}: ")
    return found


def evaluation(out: str) -> Options:
    """A recipe of kind evaluate over the trained artifacts."""
    recipe: Options = RUNS["evaluate"] | {"out": out, "seed": SEED}
    rows = [{"method": name} for name in recipe.pop("greedy")]
    recipe["methods"] = rows + [{"method": name, "temperature": 1} for name in recipe.pop("drawn")]
    return recipe | {"heads": str(trained("medusa-1")), "table": str(trained("table"))}


def evaluate() -> Golden:
    """What `evaluate` counts of a handful of methods, and what replay predicts of them; answers by `regenerate`."""
    run_recipe("evaluate", "evaluate", evaluation("results.json"))
    results = read("results.json")
    found = {f"{row['label']} {key}": row.get(key) for row in results["methods"] for key in RUNS["counted"]}
    found["prompts"] = [results[key] for key in ("prompts", "prompts_sha256", "greedy_equals_transformers")]
    run_recipe("regenerate", "regenerate", RUNS["regenerate"] | {"seed": SEED})
    found["regenerated"] = sorted(digest(line) for line in Path("answers.jsonl").read_bytes().splitlines())
    return found


def certify() -> Golden:
    """Certificates, the pair's findings, a diagnosis, traces."""
    asked = ("--tokens", "200", "--batch", "2", "--out", "certificate.json")
    run_recipe("certify", "certify", evaluation("certified/results.json"), *asked)
    certificates = read("certificate.json")["certificates"]
    found = {f"certificate of {one['label']}": timeless(one) for one in certificates}
    draftsmith("trace", "certify.yaml", "--limit", "1")
    found["trace"] = fingerprint(read("certified/trace.json"))
    draftsmith("diagnose", "certify.yaml", "--out", "diagnosis.json")
    for part in read("diagnosis.json")["parts"]:
        found |= {f"diagnosis of the {part['part']}: {key}": value for key, value in timeless(part).items()}
    said = draftsmith("doctor", "target", "near", "--json")
    found["doctor"] = timeless(json.loads(said[said.index("{") :]))
    return found


PARTS: dict[str, Callable[[], Golden]] = {
    part.__name__: part for part in (decode, data, train, artifacts, exports, evaluate, certify)
}


def compute(names: Iterable[str]) -> Golden:
    """The outputs of some parts, each by its part's name and its own."""
    torch.set_num_threads(1)
    disable_progress_bar()
    found: Golden = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        make_folder()
        for name in names:
            began = time.monotonic()
            part = PARTS[name]()
            found |= {f"{name}: {key}": json.loads(json.dumps(value)) for key, value in part.items()}
            print(f"{name}: {len(part)} outputs in {time.monotonic() - began:.1f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Record or compare golden outputs.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE")
    what.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; again for more")
    asked = parser.parse_args()
    names = [name for name in PARTS if not asked.only or name in asked.only]
    file = (asked.record or asked.compare).resolve()
    known = json.loads(file.read_text()) if asked.compare else {}
    found = compute(names)
    if asked.record:
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"recorded {len(found)} outputs in {file}")
        return 0
    known = {name: value for name, value in known.items() if name.partition(":")[0] in names}
    sides = {name: [json.dumps(side.get(name), sort_keys=True) for side in (known, found)] for name in known | found}
    different = [name for name, (before, after) in sides.items() if before != after]
    for name in different:
        print(name, *(f"  {side[:300]}" for side in sides[name]), sep="\n")
    print(f"{len(different)} of {len(known | found)} outputs differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
