"""llama.cpp, by the package xllamacpp, with a pair's models in a number format of ours; realpair.py runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import Decoded
from draftsmith.decode.evaluation.metrics import Tally
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
import serving

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
NGRAM = 3
"""Tokens that must stand in the prompt for what followed them to be drafted, as in this engine."""


def written(source: Path, out: Path, dtype: str, drafter: Path | None = None) -> Path:
    """A GGUF file of another number format: a target's own tensors, or with its settings those of an exported drafter,
    a Llama of fewer layers."""
    reader = gguf.GGUFReader(source)
    family = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, family)
    own = ((tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors)
    changed = {"general.file_type": 0}
    if drafter is not None:
        changed[f"{family}.block_count"] = json.loads((drafter / "config.json").read_text())["num_hidden_layers"]
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            value = changed.get(field.name, field.contents())
            within = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, field.types[0], within)
    for name, values in own if drafter is None else of_drafter(drafter):
        kind = TYPES[dtype] if values.ndim > 1 else TYPES["float32"]
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def of_drafter(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a Llama as GGUF has them: queries and keys turned in pairs, where transformers turns halves."""
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in load_file(folder / "model.safetensors").items():
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        count = heads.get(known.split(".")[-2])
        if count is not None:
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        yield known, values


def ways(
    source: Path, exported: Path, scratch: Path, dtype: str, gammas: Sequence[int], threads: int, context: int
) -> list[tuple[str, int, Any]]:
    """Name, γ and job of each way of decoding, from the target's own GGUF file and the drafter for transformers."""
    target = written(source, scratch / f"target-{dtype}.gguf", dtype)
    drafter = written(source, scratch / f"drafter-{dtype}.gguf", dtype, exported)

    def given() -> Any:
        asked = xllamacpp.CommonParams()
        asked.model.path, asked.port, asked.n_ctx, asked.n_parallel, asked.warmup = str(target), 0, context, 1, False
        asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
        asked.verbosity = 1
        if dtype == "float32":
            asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        return asked

    found = [("llama.cpp", 0, given())]
    for gamma in gammas:
        drafting, looking = given(), given()
        draft = drafting.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = str(drafter), gamma, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        drafting.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        ngram = looking.speculative.ngram_simple
        ngram.size_n, ngram.size_m, ngram.min_hits = NGRAM, gamma, 1
        looking.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        found += [("llama.cpp, drafter", gamma, drafting), ("llama.cpp, prompt look-up", gamma, looking)]
    return [(name, gamma, partial(run, xllamacpp.Server(asked))) for name, gamma, asked in found]


def run(engine: Any, prompt: Sequence[int], limits: Limits) -> Decoded:
    """One prompt greedily, by the server's own times."""
    asked = {"prompt": list(prompt), "n_predict": limits.max_new_tokens, "temperature": 0, "return_tokens": True}
    answer = serving.ask(f"{engine.listening_address}/completion", **asked, cache_prompt=False, ignore_eos=True)
    ids, times = answer["tokens"], answer["timings"]
    return Decoded(ids, Tally(tokens=len(ids), steps=len(ids)), (times["prompt_ms"] + times["predicted_ms"]) / 1e3, 0.0)
