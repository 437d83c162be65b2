"""Exported drafters in llama.cpp, on a CPU. `DRAFTSMITH_LLAMA_CPP` is the path of its source code with programs in
`build/bin`:

    git clone https://github.com/ggml-org/llama.cpp && cd llama.cpp && git checkout 0c1e57098
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build -t llama-completion llama-tokenize llama-speculative llama-speculative-simple \\
        llama-server

The sdist of llama-cpp-python 0.3.36 contains the same source in vendor/llama.cpp. The converter runs in this Python.

The target predicts the successor of each token in a fixed cycle, which is longer than the decoded texts. Nothing is
repeated, so that llama.cpp cannot draft from the text itself, and the correct draft tokens are known.
"""

import json
import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.eagle import EagleHeads, save_eagle
from draftsmith.data.tokenizers import train_bpe
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.serving.engines import running
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config

ENGINE = Path(os.environ.get("DRAFTSMITH_LLAMA_CPP", ""))
VOCAB, HIDDEN, NEW, GAMMA = 300, 64, 40, 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PROMPTS = ["the target checks", " what the drafter", "drafts; and"]
TEXT = [str(__doc__)]
EXACT = ["-c", "256", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
"""32-bit key-value caches: with 16 bits, near-ties depend on the number of tokens that are scored at a time."""
TRIES = 100
GREEDY = [*EXACT, "--temp", "0", "-n", str(NEW)]
EXACT_DRAFTER = ["-td", "1", "-ctkd", "f32", "-ctvd", "f32"]
NASTY = (
    "def f(x):\n    return x  # it's, they're, I'LL, we've; don't\n\n\n\tif 1 < 23 <= 456.789e-10:\r\n  pass   \n",
    "naïve Größe, 東京とパリ, Ελλάδα, हिन्दी, עברית, 🙂👨‍👩‍👧, e\u0301, \u00a0\u2003 nb,  \u3000x\u0085y",
    "   leading and   inner    spaces   ",
    "'s 't '' \"quoted\" ``code`` ~~~ === \u2014 \u2026 \u20ac 1\u00bd \u2163 x\u00b2",
    "<|im_start|> is not a token here\ttab\t\t\n \n  \n",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ENGINE / "build" / "bin").is_dir(), reason="set DRAFTSMITH_LLAMA_CPP to run it"),
]


def successors(wrong_every: int = 0) -> list[int]:
    """Return each token's successor in a cycle of ordinary tokens; every `wrong_every`th is changed (0: none)."""
    order = np.random.default_rng(0).permutation(np.arange(len(SPECIAL), VOCAB))
    following = np.arange(VOCAB)
    following[order] = np.roll(order, -1)
    if wrong_every:
        following[order[::wrong_every]] = np.roll(following[order[::wrong_every]], 1)
    result: list[int] = following.tolist()
    return result


def model_of(following: list[int], layers: int = 2) -> LlamaForCausalLM:
    """Return a model that mostly predicts `following[token]`, but whose output also depends on its cache."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, bos_token_id=0, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embedding_VD = model.get_input_embeddings().weight.normal_(0, 1)
        model.lm_head.weight[torch.tensor(following)] = embedding_VD / embedding_VD.norm(dim=1, keepdim=True)
    return model


class Works:
    """Exported models and the target's outputs."""

    def __init__(self, folder: Path, serving: ModuleType) -> None:
        self.folder, self.serving = folder, serving
        self.tokenizer = train_bpe(TEXT, VOCAB, SPECIAL)
        self.following = successors()
        self.other = successors(wrong_every=7)
        self.target = model_of(self.following)
        self.gguf = {"target": self.gguf_of("target", self.target)}
        self.gguf["copy"] = self.gguf_of("copy", self.target)
        self.gguf["other"] = self.gguf_of("other", model_of(self.other))

    def save(self, name: str, kind: str, write: Any) -> None:
        manifest: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
        manifest |= {"vocab_size": VOCAB, "tokenizer_fingerprint": None}
        manifest["target"] = None if name == "target" else {"id": str(self.folder / "target")}
        save_artifact(self.folder / name, kind=kind, write=write, **manifest)

    def export(self, name: str, form: str) -> Path:
        options = ExportOptions(llama_cpp=ENGINE) if form.endswith("gguf") else ExportOptions()
        export_artifact(self.folder / name, form, self.folder / f"{name}-{form}", FORMATS, options)
        return self.folder / f"{name}-{form}"

    def gguf_of(self, name: str, model: Any) -> Path:
        def write(folder: Path) -> None:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        self.save(name, "drafter", write)
        return self.export(name, "gguf") / "model.gguf"

    def greedy_tokens(self, prompt: str) -> list[int]:
        """Return the target's greedy tokens, decoded by transformers."""
        ids = torch.tensor([self.tokenizer.encode(prompt)])
        tokens: list[int] = self.target.generate(ids, do_sample=False, max_new_tokens=NEW)[
            0, ids.shape[1] - 1 :
        ].tolist()
        assert tokens[1:] == [self.following[token] for token in tokens[:-1]]
        assert len(set(tokens)) == 1 + NEW
        return tokens[1:]

    def bytes_of(self, ids: list[int]) -> bytes:
        plain = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (32, 173)]
        others = [byte for byte in range(256) if byte not in plain]
        characters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
        return bytes(characters[c] for token in self.tokenizer.convert_ids_to_tokens(ids) for c in token)


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory, serving: ModuleType) -> Works:
    torch.set_num_threads(1)
    return Works(tmp_path_factory.mktemp("llama_cpp"), serving)


def run(program: str, *arguments: str | Path, last: str = "") -> tuple[bytes, str]:
    """Run a llama.cpp program, again if its output was cut off before `last`; return stdout and the whole output."""
    command = [ENGINE / "build" / "bin" / program, *arguments]
    for _ in range(TRIES):
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=600)
        output = (process.stdout + process.stderr).decode(errors="replace")
        assert process.returncode == 0, output[-4000:]
        if last in output:
            return process.stdout, output
    raise AssertionError(f"{TRIES} times cut off:\n{output[-4000:]}")


def number(output: str, name: str) -> int:
    match = re.search(rf"\b{name}\s*=\s*(\d+)", output)
    assert match, output[-4000:]
    return int(match[1])


def drafts(following: list[int], target: list[int], last: int) -> tuple[int, int]:
    """Return the expected numbers of draft and accepted tokens of llama-speculative-simple after the token `last`."""
    drafted = accepted = decoded = 0
    while decoded <= NEW:
        left = NEW - decoded - 1
        length = min(GAMMA, left) if left > 0 else GAMMA
        count = 0
        while count < length and following[last] == target[last]:
            count, last = count + 1, target[last]
        last = target[last]
        drafted, accepted, decoded = drafted + length, accepted + count, decoded + count + 1
    return drafted, accepted


def test_tokens_equal_those_of_transformers(works: Works, tmp_path: Path) -> None:
    texts = [*NASTY, Path(__file__).read_text(encoding="utf-8")]
    for index, text in enumerate(texts):
        path = tmp_path / f"{index}.txt"
        path.write_bytes(text.encode())
        arguments = ("--ids", "--no-bos", "--no-parse-special", "--no-escape", "--log-disable", "-f", path)
        out, _ = run("llama-tokenize", "-m", works.gguf["target"], *arguments)
        tokens = json.loads(out.decode().strip().splitlines()[-1])
        assert tokens == works.tokenizer.encode(text, split_special_tokens=True), text


def test_models_generate_as_in_transformers(works: Works) -> None:
    for prompt in PROMPTS:
        out, _ = run(
            "llama-completion", "-m", works.gguf["target"], "-no-cnv", *GREEDY, "-p", prompt, last="total time"
        )
        assert works.bytes_of(works.greedy_tokens(prompt)) in out


SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "bfloat16": LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=True, dtype=torch.bfloat16),
    "qwen3": Qwen3Config(**SIZES, intermediate_size=96, head_dim=16, num_key_value_heads=2),
    "pythia": GPTNeoXConfig(**SIZES, intermediate_size=96),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_generate_as_in_transformers(works: Works, family: str) -> None:
    config = FAMILIES[family]
    config.bos_token_id, config.eos_token_id = 0, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # also biases and norms, to detect missing ones
            weight.add_(torch.randn_like(weight) * (0.1 if weight.dim() == 1 else weight.shape[1] ** -0.5))
    path = works.gguf_of(family, model)
    ids = torch.tensor([works.tokenizer.encode(PROMPTS[0])])
    greedy_tokens = model.float().generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
    out, _ = run("llama-completion", "-m", path, "-no-cnv", *GREEDY, "-p", PROMPTS[0], last="total time")
    assert works.bytes_of([token for token in greedy_tokens if token >= len(SPECIAL)]) in out


@pytest.mark.parametrize("program", ["llama-speculative-simple", "llama-speculative"])
def test_drafters(works: Works, program: str) -> None:
    """All drafts of a copy of the target are accepted. Another drafter gives the same text."""
    settings = [*GREEDY, *EXACT_DRAFTER, "--spec-type", "draft-simple", "--spec-draft-n-max", str(GAMMA)]
    for prompt in PROMPTS:
        greedy_tokens = works.greedy_tokens(prompt)
        for name, following in (("copy", works.following), ("other", works.other)):
            out, log = run(
                program, "-m", works.gguf["target"], "-md", works.gguf[name], *settings, "-p", prompt, last="n_accept"
            )
            assert works.bytes_of(greedy_tokens) in out
            counts = number(log, "n_drafted"), number(log, "n_accept")
            if program == "llama-speculative-simple":
                assert counts == drafts(following, works.following, works.tokenizer.encode(prompt)[-1])
            assert counts[1] == counts[0] > 0 if name == "copy" else 0 < counts[1] < counts[0]


def check_served(command: str, works: Works, every_draft: bool) -> None:
    """Check that a server started by a command of SERVING.md gives the target's tokens and accepts drafts."""
    program, *arguments = shlex.split(command)
    full_command = [str(ENGINE / "build" / "bin" / program), *arguments, *EXACT]
    settings = {"n_predict": NEW, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    with running(full_command, works.folder / "server.log", cwd=works.folder) as server:
        for prompt in PROMPTS:
            answer = works.serving.ask(f"{server.url}/completion", **settings, prompt=works.tokenizer.encode(prompt))
            assert answer["tokens"] == works.greedy_tokens(prompt)
            drafted, accepted = (answer["timings"][key] for key in ("draft_n", "draft_n_accepted"))
            assert drafted > 0
            assert (accepted == drafted) is every_draft


def commands(folder: Path) -> list[str]:
    serving = (folder / "SERVING.md").read_text()
    return [line for line in serving.splitlines() if line.startswith("llama-server ")]


def test_serving_a_drafter_by_its_serving_md(works: Works) -> None:
    for name in ("copy", "other"):
        check_served(commands(works.folder / f"{name}-gguf")[0], works, every_draft=name == "copy")


@pytest.mark.parametrize("trimmed", [False, True])
def test_serving_eagle_heads_by_their_serving_md(works: Works, trimmed: bool) -> None:
    """If the engine reads the heads correctly, the first of two draft tokens is always accepted, the second never."""
    target, name = model_of(works.following, layers=4), "some" if trimmed else "all"
    works.gguf_of(f"{name}-target", target)
    proposed = torch.arange(len(SPECIAL), VOCAB) if trimmed else None
    heads = EagleHeads.for_target(target.config, (0, 1, 3), proposed, num_heads=2)
    with torch.no_grad():
        heads.fc.weight.zero_()[:, :HIDDEN] = torch.eye(HIDDEN)
        for silent in (heads.midlayer.self_attn.o_proj, heads.midlayer.mlp.down_proj):
            silent.weight.zero_()
        rows_VD = target.lm_head.weight[torch.tensor(works.following).argsort()]
    heads.own_head = (rows_VD if proposed is None else rows_VD[proposed]).clone()
    manifest = {"vocab_size": VOCAB, "shapes": {"num_heads": 2}, "recipe": {}, "data": {}, "training": {}}
    manifest |= {"tokenizer_fingerprint": None, "target": {"id": str(works.folder / f"{name}-target")}}
    save_artifact(works.folder / name, kind="heads", write=partial(save_eagle, heads), **manifest)
    (command,) = commands(works.export(name, "eagle3-gguf"))
    program, *arguments = shlex.split(command.replace("target-gguf", f"{name}-target-gguf"))
    settings = {"n_predict": NEW, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    with running(
        [str(ENGINE / "build" / "bin" / program), *arguments, *EXACT], works.folder / "e.log", cwd=works.folder
    ) as server:
        for prompt in PROMPTS:
            answer = works.serving.ask(f"{server.url}/completion", **settings, prompt=works.tokenizer.encode(prompt))
            assert answer["tokens"] == works.greedy_tokens(prompt)
            drafted, accepted = (answer["timings"][key] for key in ("draft_n", "draft_n_accepted"))
            assert drafted == 2 * accepted >= NEW - 4
