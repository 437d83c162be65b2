r"""Exported heads in the loaders and runtimes that they are for, unmodified, each in an environment of its own, on CPU.

FasterDecoding's runtime (github.com/FasterDecoding/Medusa, main, commit e2a5d20): `DRAFTSMITH_MEDUSA` names its Python.

    python3.11 -m venv medusa && . medusa/bin/activate
    pip install torch==2.13.0 transformers==4.36.2 'numpy<2' sentencepiece protobuf
    pip install --no-deps CHECKOUT

text-generation-inference (github.com/huggingface/text-generation-inference, v3.3.7): `DRAFTSMITH_TGI` names its Python.

    python3.11 -m venv tgi && . tgi/bin/activate && cd CHECKOUT/server
    pip install torch==2.13.0 transformers==4.51.3 'huggingface-hub<1' 'click<8.2' einops grpc-interceptor \
        grpcio-tools grpcio-reflection grpcio-status hf-transfer loguru 'numpy<3' opentelemetry-api pillow pydantic \
        opentelemetry-exporter-otlp opentelemetry-instrumentation-grpc prometheus-client py-cpuinfo rich scipy typer \
        sentencepiece interegular lark nest_asyncio cloudpickle diskcache referencing jsonschema airportsdata pycountry
    pip install --no-deps accelerate kernels==0.5.0 peft==0.15.2 outlines==0.1.13 outlines_core==0.1.26 \
        compressed-tensors==0.9.4
    mkdir text_generation_server/pb
    python -m grpc_tools.protoc -I../proto/v3 --python_out=text_generation_server/pb \
        --grpc_python_out=text_generation_server/pb ../proto/v3/generate.proto
    sed -i 's/^\(import.*pb2\)/from . \1/' text_generation_server/pb/*.py && touch text_generation_server/pb/__init__.py
    pwd > $(python -c 'import site; print(site.getsitepackages()[0])')/tgi.pth

TensorRT-LLM's converter: `DRAFTSMITH_TENSORRT` names a Python with torch 2.13.0, transformers 4.57.6, accelerate,
safetensors and tqdm, `DRAFTSMITH_TENSORRT_SOURCE` a checkout of TensorRT-LLM (tried: 0.10.0.dev2024043000).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import model_fingerprint, save_artifact
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.export.heads import HEADS_FORMATS
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads, save_heads
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
FORMATS = {form.name: form for form in HEADS_FORMATS}
VOCAB, HIDDEN, STEPS = 32, 32, 12
WORDS = {f"w{token}": token for token in range(VOCAB)}
PATHS = "0, 1, 2, 0.0, 0.1, 1.0, 0.0.0, 0.0.1, 0.0.0.0"
CHOICES = [[int(rank) for rank in path.split(".")] for path in PATHS.split(",")]
DEPTH = max(map(len, CHOICES))
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


pytestmark = pytest.mark.slow


def engine(variable: str, script: str, **asked: Any) -> dict[str, Any]:
    """What a script of this folder answers, run by an engine's own Python."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python of that engine (see the head of this file)")
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [python, str(HERE / script)],
        input=json.dumps(asked),
        env=kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def target(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """A target that says each token's successor in a fixed order: heads can be exact. Attention speaks along, so that a
    cache that is wrong shows; it never outvotes."""
    model = make_llama(VOCAB, hidden_size=HIDDEN)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(8 * torch.eye(VOCAB))
        model.lm_head.weight.copy_(torch.eye(VOCAB).roll(7, 0))
    return model


def save_target(model: LlamaForCausalLM, folder: Path) -> Path:
    """With a tokenizer as hubs have it: that transformers 5 writes cannot be read by older ones."""
    model.save_pretrained(folder)
    Tokenizer(WordLevel(WORDS, unk_token="w0")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save(heads: PredictionHeads, target: Path, folder: Path) -> Path:
    about: dict[str, Any] = {name: {} for name in ("shapes", "recipe", "data", "training")}
    about |= {"vocab_size": VOCAB, "tokenizer_fingerprint": None}
    about |= {"target": {"id": str(target), "fingerprint": model_fingerprint(target)}}
    save_artifact(folder, kind="heads", write=lambda place: save_heads(heads, place, str(target)), **about)
    return folder


def export(artifact: Path, form: str, **options: Any) -> Path:
    out = artifact.with_name(form)
    export_artifact(artifact, form, out, FORMATS, ExportOptions(**options))
    return out


def make_heads(version: str, noise: float = 0.0, count: int = 5, layers: int = 1) -> PredictionHeads:
    """Head k says what comes k + 2 tokens later; with noise, often something else."""
    torch.manual_seed(2)
    projection = "own" if version == "1" else "target"
    heads = PredictionHeads(count, layers, HIDDEN, VOCAB, projection).eval()
    with torch.no_grad():
        for name, tensor in heads.named_parameters():
            k = int(name.split(".")[0])
            if ".linear." not in name:
                tensor.copy_(torch.eye(VOCAB).roll(7 * (k + 2), 0) + noise * torch.randn(VOCAB, HIDDEN))
            elif version == "1" or name.endswith("bias") or ".0." not in name:
                tensor.normal_(0, 0.02)
            else:  # the projection goes the last step
                tensor.copy_(4 * torch.eye(VOCAB).roll(7 * (k + 1), 0) + 4 * noise * torch.randn(HIDDEN, HIDDEN))
    return heads


def own_steps(model: LlamaForCausalLM, heads: PredictionHeads, prompt: list[int]) -> list[list[int]]:
    """The tokens of each step after the first, by this package's engine; and those of the first before them."""
    scorer, sampling = wrap_model(model), Sampling()
    method = build_method("medusa", Parts(heads=heads), sampling, tree=PATHS)
    steps = generate(scorer, *method, [prompt], Limits(200), sampling, Rng.for_rows(0, 1))
    return [step.new_ids[0] for step in steps]


@pytest.mark.parametrize("noise", [0.0, 0.35])
def test_faster_decoding_drafts_what_the_heads_say(noise: float, target: LlamaForCausalLM, tmp_path: Path) -> None:
    place, heads = save_target(target, tmp_path / "target"), make_heads("2", noise)
    out = export(save(heads, place, tmp_path / "heads"), "medusa-2")
    # what its trainer writes its loader does not read
    torch.save(load_file(out / "medusa_lm_head.safetensors"), out / "medusa_lm_head.pt")
    asked = {"folder": str(out), "prompts": PROMPTS, "choices": CHOICES, "steps": STEPS}
    answer = engine("DRAFTSMITH_MEDUSA", "faster_decoding_run.py", **asked)
    heads.attach(target.lm_head.weight.detach())
    lengths = []
    for prompt, steps, greedy in zip(PROMPTS, answer["steps"], answer["greedy"], strict=True):
        found = [token for step in steps for token in step]
        assert found == greedy, "lossless"
        own = own_steps(target, heads, prompt)
        assert [token for step in own for token in step][: len(found)] == found
        # there a step is a token that is known and what was accepted after it, here what was accepted and one more
        assert [len(step) for step in steps] == [len(step) for step in own[1 : STEPS + 1]]
        lengths += [len(step) for step in steps]
    if noise:
        assert len(set(lengths)) > 2, "heads that are always right or always wrong would say nothing of the tree"
    else:
        assert set(lengths) == {1 + DEPTH}, "every draft is accepted"
    stored = {name: tensor.double().sum().item() for name, tensor in heads.state_dict().items()}
    assert answer["heads"] == pytest.approx(stored), "each tensor arrived, under its own name"
    assert answer["words"][-1] == " ".join(f"w{token}" for token in PROMPTS[0])


STATES = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("form", "version", "layers", "tied", "speculate"),
    [
        ("medusa", "1", 1, False, 3),
        ("medusa", "1", 2, False, 2),
        ("medusa", "2", 1, True, 3),
        ("medusa-2", "2", 1, False, 3),
        ("medusa-2", "2", 1, True, 2),
    ],
)
def test_tgi_computes_the_logits_of_the_heads(
    form: str,
    version: str,
    layers: int,
    tied: bool,
    speculate: int,
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    """The file, the tokenizer, the number of heads and the logits of each; drafting with them takes a GPU there."""
    model = make_llama(VOCAB, hidden_size=HIDDEN, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "target")
    backend = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", extra_special_tokens=["w1"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "target")
    assert '"TokenizersBackend"' in (tmp_path / "target" / "tokenizer_config.json").read_text(), "unknown there"
    artifact = save(make_heads(version, 0.3, 3, layers), tmp_path / "target", tmp_path / "heads")
    heads = load_heads(artifact)
    if heads.projection_kind == "target":
        heads.attach(model.lm_head.weight.detach())
    asked = {"folder": str(export(artifact, form)), "states": STATES.tolist(), "text": "w5 w1 w7 w0"}
    answer = engine("DRAFTSMITH_TGI", "tgi_run.py", speculate=speculate, **asked)
    assert (answer["class"], answer["speculate"]) == (
        "MedusaHeadV2" if form == "medusa-2" else "MedusaHeadV1",
        speculate,
    )
    assert answer["model_id"] == str(tmp_path / "target")
    with torch.inference_mode():
        expected, own = heads(STATES)[:, :speculate], model.lm_head(STATES)
    torch.testing.assert_close(torch.tensor(answer["heads"]), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(answer["target"]), own, rtol=1e-5, atol=1e-5)
    assert answer["tokenizer"] == {"ids": [5, 1, 7, 0], "template": tokenizer.chat_template}
    assert "Speculator decoding is not enabled for AutoModel" in answer["refused"], "as far as a CPU goes there"


@pytest.mark.parametrize(("count", "layers"), [(3, 1), (5, 2)])
def test_tensorrt_converts_the_heads_that_there_are(
    count: int, layers: int, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """With SERVING.md's command: every head's tensors under the names of its model, and as many in its config."""
    python, source = (os.environ.get(f"DRAFTSMITH_TENSORRT{end}") for end in ("", "_SOURCE"))
    if not python or not source:
        pytest.skip("DRAFTSMITH_TENSORRT and DRAFTSMITH_TENSORRT_SOURCE name no Python and checkout")
    place, heads = save_target(target, tmp_path / "target"), make_heads("1", 0.3, count, layers)
    out = export(save(heads, place, tmp_path / "heads"), "medusa")
    command = (
        (out / SERVING_FILE).read_text().partition("python convert_checkpoint.py ")[2].partition("\ntrtllm-build")[0]
    )
    converter = Path(source) / "examples" / "medusa" / "convert_checkpoint.py"
    loader = Path(source) / "tensorrt_llm" / "models" / "medusa" / "weight.py"
    if "medusa_lm_head.safetensors" not in converter.read_text() + loader.read_text():  # before 0.11
        torch.save(load_file(out / "medusa_lm_head.safetensors"), out / "medusa_lm_head.pt")
    arguments = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run(
        [python, str(HERE / "tensorrt_run.py"), source, *arguments],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert (config["num_medusa_heads"], config["num_medusa_layers"]) == (count, layers)
    found = load_file(tmp_path / "checkpoint" / "rank0.safetensors")
    expected = {}
    for name, tensor in heads.state_dict().items():
        k, layer, part = name.split(".", 2)
        inner = f"medusa_layers.{layer}.{part}" if part.startswith("linear") else "lm_head.weight"
        expected[f"medusa_heads.{k}.{inner}"] = tensor.half()
    assert {name for name in found if name.startswith("medusa")} == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["lm_head.weight"], target.lm_head.weight.half())
