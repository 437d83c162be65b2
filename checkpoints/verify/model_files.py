"""Loading of models and of single tensors from files, with safety and completeness checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import cached_file, logging

from ..artifact.locate import model_source
from ..storage.messages import first_line, gigabytes, install_hint
from ..storage.names import ADAPTER_CONFIG, ADAPTER_FILE, other_kind
from ..storage.places import adapter_base, out_of_reach
from ..storage.safe_read import UNPICKLE, check_safetensors, pickles_allowed, read_json, shards_of

UNLOADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
    HTTPError,
    EOFError,
    UnpicklingError,
    # errors of model classes for configurations with wrong types or sizes
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)
"""Exceptions raised when a model is loaded from invalid files."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (
    f"pickled weights are not read: convert them with `save_pretrained`, or set {UNPICKLE}=1 to read them with "
    "`weights_only=True`"
)
_REFUSALS = ("missing_entries", "gated_repo", "connection_errors")
_LENIENT = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in _REFUSALS), False)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers within the context."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def model_class(config: Any) -> Any:
    """Return the auto class of transformers for a model configuration."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_language_model(source: str | Path, **settings: Any) -> PreTrainedModel:
    """Load a causal LM or an encoder-decoder in evaluation mode. `settings` are passed to `load_whole`.

    Raises ValueError if the model lacks weights, requires remote code or disallowed pickles, or is otherwise invalid.
    """
    source = model_source(str(source))
    config = load_config(source)
    try:
        if settings.get("device_map") is None and getattr(config, "quantization_config", None) is None:
            _check_room(Path(source), config, settings.get("dtype"))
        safe = {"use_safetensors": only_safetensors(source), "trust_remote_code": False}
        return load_whole(model_class(config), source, **safe, **settings).eval()
    except UNLOADABLE as error:
        raise ValueError(f"no language model could be loaded from {source!r}: {reason(source, error)}") from error


def _check_room(folder: Path, config: Any, dtype: Any) -> None:
    """Raise ValueError if a model does not fit into free memory. If its files are small, weights are not counted."""
    named = config.dtype if dtype in (None, "auto") else "int8" if dtype == "stored" else dtype
    width = (getattr(torch, named) if isinstance(named, str) else named or torch.float32).itemsize
    bound = sum(file.stat().st_size for file in folder.glob("*.safetensors")) * width / 2
    if not 0 < bound < psutil.virtual_memory().available:
        check_memory(config, width, "use a smaller dtype, such as bfloat16, or a smaller model")


def check_memory(config: Any, width: int, remedy: str) -> None:
    """Raise ValueError, with the advice `remedy`, if parameters of `width` bytes each exceed the host's free memory."""
    with torch.random.fork_rng(devices=[]):
        count = sum(weight.numel() for weight in meta_model(config).parameters())
    free = psutil.virtual_memory().available
    if count * width > free:
        raise ValueError(
            f"{count:,} parameters of {width} bytes require {gigabytes(count * width)} of memory, but "
            f"{gigabytes(free)} are free: {remedy}"
        )


def with_adapter(folder: Path, load: Callable[[str], PreTrainedModel], *, merged: bool = True) -> Any:
    """Load an adapter on top of its base model, and merge it unless `merged` is False. `load` loads the base model.

    Tied embeddings that the adapter changes are untied before merging.

    Raises ValueError if peft is missing, weights are pickled, or the adapter does not fit the model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"{folder} contains a LoRA adapter, which requires peft: {install_hint('train')}") from error
    base = base_of(folder)
    try:
        only_safetensors(str(folder))
    except ValueError as error:
        raise ValueError(f"the adapter in {folder} cannot be loaded: {error}") from error
    whole = load(base)
    _check_rows(folder, base, whole)
    try:
        model = PeftModel.from_pretrained(whole, str(folder))
        _untie(whole)
        return (model.merge_and_unload() if merged else model).eval()
    except UNLOADABLE as error:
        reason_text = reason(str(folder), error)
        raise ValueError(f"the adapter in {folder} does not fit the model {base!r}: {reason_text}") from error


def _check_rows(folder: Path, base: str, model: PreTrainedModel) -> None:
    """Raise ValueError if an adapter contains embeddings or an output projection for a different vocabulary size."""
    rows, path = len(model.get_input_embeddings().weight), folder / ADAPTER_FILE
    layers = {name.removesuffix(".weight") for name in names_of_embeddings(model)[:2]}
    ends = tuple(f".{layer}{end}" for layer in layers for end in (".weight", ".lora_B.weight"))
    for name, (_, shape) in (check_safetensors(path) if path.is_file() else {}).items():
        if name.endswith(ends) and shape[0] != rows:
            raise ValueError(
                f"the adapter in {folder} has {shape[0]:,} tokens ({name}), but the model {base!r} has {rows:,}: save "
                f"a copy of the model after `model.resize_token_embeddings({shape[0]})`, and set it as "
                f"base_model_name_or_path in {folder / ADAPTER_CONFIG}"
            )


def _untie(model: PreTrainedModel) -> None:
    """Give a model with tied embeddings a separate output projection if an adapter changes either of them."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    first, last = inner = [getattr(layer, "base_layer", layer) for layer in layers]
    if inner != layers and first.weight is last.weight:
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = model.config.get_text_config(decoder=True).tie_word_embeddings = False


def load_whole(kind: Any, source: str | Path, progress: Any = None, **settings: Any) -> PreTrainedModel:
    """Load a model with `kind.from_pretrained`. Raises ValueError for missing weights, or an exception in `UNLOADABLE`.

    Weights are copied to memory, so that later changes to the files do not affect the model. With dtype "stored", they
    stay memory-mapped, which saves memory if the caller converts them. `progress` receives (percent, 100).
    """
    model: PreTrainedModel
    config = settings.get("config") or load_config(source)
    if tensors := _stored_tensors(str(source), config, settings, progress):
        shape = meta_model(config)  # auto classes such as `kind` do not accept tensors
        settings |= {"config": shape.config, "state_dict": tensors}
        model, report = type(shape).from_pretrained(None, output_loading_info=True, **settings)
        model.config.name_or_path = model.name_or_path = str(source)
        names = dict.fromkeys(("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision"))
        model.adjust_generation_fn(None, True, False, source, subfolder="", trust_remote_code=False, **names)
    else:
        model, report = kind.from_pretrained(source, output_loading_info=True, **settings)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()
    if lacking := sorted(report["missing_keys"]):
        more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
        raise ValueError(f"the weights {lacking[0]}{more} are missing from its files")
    return model


class _Stored:
    """Tensor in a file, which is read when `from_pretrained` indexes it."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, key: Any) -> Tensor:
        return self._read()


def _stored_tensors(source: str, config: Any, settings: dict[str, Any], progress: Any) -> dict[str, _Stored] | None:
    """Return lazily loaded tensors of safetensors files and set `dtype`; None if transformers must load the files.

    transformers itself maps whole files, and their memory stays in use until the last tensor is converted.
    """
    is_mapped = settings.get("dtype") == "stored"
    settings |= {"dtype": torch.float32} if is_mapped else {}
    plain = not any(settings.get(name) for name in ("gguf_file", "device_map")) and not is_deepspeed_zero3_enabled()
    plain = plain and getattr(config, "quantization_config", None) is None and (config.dtype or is_mapped)
    if not plain or cached_file(source, ADAPTER_CONFIG, **_LENIENT):
        return None
    files = {file: safe_open(file, framework="pt", backend="pread") for file in _weight_files(source)}
    done, total = 0, sum(Path(file).stat().st_size for file in files)

    def read(file: str, name: str) -> Tensor:
        nonlocal done
        tensor: Tensor = (safe_open(file, framework="pt") if is_mapped else files[file]).get_tensor(name)
        done += tensor.nbytes
        if progress and not is_mapped:
            progress(100 * done // total, 100)
        return tensor

    names = [(file, name) for file, each in files.items() for name in each.keys()]  # noqa: SIM118
    dtypes = "".join({files[file].get_slice(name).get_dtype() for file, name in names} - {"I64", "BOOL"})
    if is_mapped:
        settings["dtype"] = {"BF16": torch.bfloat16, "F16": torch.float16}.get(dtypes, torch.float32)
    return {name: _Stored(partial(read, file, name)) for file, name in names}


def _weight_files(source: str, is_wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    if (path := cached_file(source, _WHOLE, **_LENIENT)) is not None:
        return [path]
    index = cached_file(source, _INDEX, **_LENIENT)
    names = sorted(set(shards_of(Path(index), is_wanted).values())) if index is not None else []
    return [cached_file(source, name) for name in names]


def meta_model(config: Any) -> PreTrainedModel:
    """Build the model of a configuration on the meta device. Raises an exception in `UNLOADABLE` on failure."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(config, trust_remote_code=False)
    return model


def is_adapter(folder: Path) -> bool:
    """Check if a folder contains a LoRA adapter instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def load_config(source: str | Path) -> Any:
    """Load a model's configuration. Raises ValueError if it is missing, or is not the configuration of a model."""
    location = model_source(str(source), weights=False)
    try:
        return AutoConfig.from_pretrained(location, trust_remote_code=False)
    except UNLOADABLE as error:
        kind = other_kind(Path(source))
        reason_text = f"it contains {kind}" if kind else reason(str(source), error)
        raise ValueError(f"no language model could be loaded from {str(source)!r}: {reason_text}") from error


def base_of(folder: Path) -> str:
    """Return the base model of an adapter. Raises ValueError if it is missing or is itself an adapter."""
    path = folder / ADAPTER_CONFIG
    settings = read_json(path)
    base = adapter_base(settings)
    if base is None or Path(base).resolve() == folder.resolve():
        raise ValueError(f"base_model_name_or_path in {path} must be the adapter's base model, got {base!r}")
    if is_adapter(Path(base)):
        raise ValueError(f"{path} refers to {base!r}, which is itself an adapter: merge it into its base model")
    return base


def only_safetensors(source: str) -> bool | None:
    """Return the argument `use_safetensors` for `from_pretrained`: True, or None if pickles are allowed.

    Raises ValueError for an adapter with pickled weights, for which the argument has no effect, or an invalid index.
    """
    if pickles_allowed():
        return None
    if cached_file(source, ADAPTER_CONFIG, **_LENIENT) and not cached_file(source, ADAPTER_FILE, **_LENIENT):
        raise ValueError(f"{ADAPTER_FILE} is missing; {_PICKLES}")
    if (index := cached_file(source, _INDEX, **_LENIENT)) is not None:
        shards_of(Path(index))
    return True


def weights_fault(folder: Path) -> str:
    """Return the reason why the weights in a folder cannot be loaded, or an empty string."""
    if any(folder.glob("*.safetensors")) or (pickles_allowed() and any(folder.glob("*.bin"))):
        return ""
    return f"safetensors weights are missing; {_PICKLES}"


def reason(source: str, error: Exception) -> str:
    """Summarise in one line why a model could not be loaded, with a remedy for pickled weights."""
    if isinstance(error, UnpicklingError):  # torch's message recommends unsafe loading
        return "its pickled weights are damaged or contain more than tensors, and were not loaded"
    if isinstance(error, OSError) and not Path(source).is_dir() and (away := out_of_reach()):
        return away
    is_missing = isinstance(error, OSError) and "safetensors" in str(error) and not pickles_allowed()
    return first_line(error) + (f"; {_PICKLES}" if is_missing else "")


def names_of_embeddings(model: PreTrainedModel) -> tuple[str, str, str | None]:
    """Return the names of token embeddings, output projection (the same if tied) and output bias (None if missing)."""
    head = model.get_output_embeddings()
    weights = (model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None))
    names = [next((name for name, one in model.named_parameters() if one is weight), None) for weight in weights]
    assert names[0] is not None
    assert names[1] is not None
    return names[0], names[1], names[2]


def read_tensor(source: str, name: str, prefix: str = "") -> Tensor | None:
    """Load a floating-point tensor from the safetensors files of a folder or hub id; None if it is missing.

    The name without `prefix`, as in files of a base model, is tried too. Raises ValueError for invalid files.
    """
    names = (name, name.removeprefix(prefix))
    path = next(iter(_weight_files(source, names.__contains__)), None)
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            tensor = next((file.get_tensor(each) for each in names if each in stored), None)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return tensor if tensor is not None and tensor.is_floating_point() else None
