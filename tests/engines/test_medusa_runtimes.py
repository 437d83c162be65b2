r"""Exported heads in the loaders that they are for, unmodified, each in an environment of its own, on CPU.

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
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.export.heads import MEDUSA
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads, save_heads
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCAB, HIDDEN = 32, 32
WORDS = {f"w{token}": token for token in range(VOCAB)}
STATES = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))

pytestmark = pytest.mark.slow


def save(heads: PredictionHeads, target: Path, folder: Path) -> Path:
    about: dict[str, Any] = {name: {} for name in ("shapes", "recipe", "data", "training")}
    about |= {"vocab_size": VOCAB, "tokenizer_fingerprint": None}
    about |= {"target": {"id": str(target), "sha256": resolve_model(str(target)).sha256}}
    save_artifact(folder, kind="heads", write=lambda place: save_heads(heads, place, str(target)), **about)
    return folder


def export(artifact: Path) -> Path:
    out = artifact.with_name("medusa")
    export_artifact(artifact, "medusa", out, {"medusa": MEDUSA}, ExportOptions())
    return out


def random_heads(version: str, count: int, layers: int) -> PredictionHeads:
    torch.manual_seed(2)
    heads = PredictionHeads(count, layers, HIDDEN, VOCAB, "own" if version == "1" else "target").eval()
    with torch.no_grad():
        for tensor in heads.parameters():
            tensor.normal_(0, 0.3)
    return heads


@pytest.mark.parametrize(
    ("version", "layers", "tied", "speculate"), [("1", 1, False, 3), ("1", 2, False, 2), ("2", 1, True, 3)]
)
def test_tgi_computes_the_logits_of_the_heads(
    version: str,
    layers: int,
    tied: bool,
    speculate: int,
    serving: ModuleType,
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    """The file, the tokenizer, the number of heads and the logits of each; drafting with them takes a GPU there."""
    python = os.environ.get("DRAFTSMITH_TGI")
    if not python:
        pytest.skip("DRAFTSMITH_TGI names no Python of that engine (see the head of this file)")
    model = make_llama(VOCAB, hidden_size=HIDDEN, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "target")
    backend = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", extra_special_tokens=["w1"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "target")
    assert '"TokenizersBackend"' in (tmp_path / "target" / "tokenizer_config.json").read_text(), "unknown there"
    artifact = save(random_heads(version, 3, layers), tmp_path / "target", tmp_path / "heads")
    heads = load_heads(artifact)
    if heads.projection_kind == "target":
        heads.attach(model.lm_head.weight.detach())
    asked = {"folder": str(export(artifact)), "states": STATES.tolist(), "text": "w5 w1 w7 w0"}
    answer = serving.answer_of(python, "tgi_run.py", asked | {"speculate": speculate}, PYTHONWARNINGS="ignore")
    assert answer["class"] == "MedusaHeadV1"
    assert answer["speculate"] == speculate
    assert answer["model_id"] == str(tmp_path / "target")
    with torch.inference_mode():
        expected, own = heads(STATES)[:, :speculate], model.lm_head(STATES)
    torch.testing.assert_close(torch.tensor(answer["heads"]), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(answer["target"]), own, rtol=1e-5, atol=1e-5)
    assert answer["tokenizer"] == {"ids": [5, 1, 7, 0], "template": tokenizer.chat_template}
    assert "Speculator decoding is not enabled for AutoModel" in answer["refused"], "as far as a CPU goes there"


@pytest.mark.parametrize(("count", "layers"), [(3, 1), (5, 2)])
def test_tensorrt_converts_the_heads_that_there_are(
    count: int, layers: int, serving: ModuleType, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    """With SERVING.md's command: every head's tensors under the names of its model, and as many in its config."""
    python, source = (os.environ.get(f"DRAFTSMITH_TENSORRT{end}") for end in ("", "_SOURCE"))
    if not python or not source:
        pytest.skip("DRAFTSMITH_TENSORRT and DRAFTSMITH_TENSORRT_SOURCE name no Python and checkout")
    target, heads = make_llama(VOCAB, hidden_size=HIDDEN), random_heads("1", count, layers)
    target.save_pretrained(tmp_path / "target")
    out = export(save(heads, tmp_path / "target", tmp_path / "heads"))
    serving_text = (out / SERVING_FILE).read_text()
    command = serving_text.partition("python convert_checkpoint.py ")[2].partition("\ntrtllm-build")[0]
    converter = Path(source) / "examples" / "medusa" / "convert_checkpoint.py"
    loader = Path(source) / "tensorrt_llm" / "models" / "medusa" / "weight.py"
    if "medusa_lm_head.safetensors" not in converter.read_text() + loader.read_text():  # before 0.11
        torch.save(load_file(out / "medusa_lm_head.safetensors"), out / "medusa_lm_head.pt")
    arguments = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run(
        [python, str(HERE / "tensorrt_run.py"), source, *arguments],
        cwd=tmp_path,
        env=serving.environment(),
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
