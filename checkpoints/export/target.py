"""Loading and comparison of an export's target: configuration, vocabulary, tokenizer and output projection.

Shape letters: V vocabulary, D hidden size.
"""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from ..artifact.compat import CONFIG_FILE, patch_tokenizer, write_config
from ..artifact.locate import SETTINGS_FILES, find_folder, model_source
from ..artifact.model_ref import resolve_model, tokenizer_fingerprint
from ..heads.logits import LogitShape
from ..pairs.checks import check_pair
from ..pairs.sides import read_model_info
from ..storage.messages import first_line
from ..storage.names import TOKENIZER_FILES
from ..storage.safe_read import copy_files, read_json
from ..verify.model_files import UNLOADABLE, load_config, meta_model, names_of_embeddings, read_tensor
from .base import Source

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_PROBES = (
    *("The quick brown fox", "  indented\n\ttabs\n\n", "naïve Größe 東京 🙂", "1234567890 3.14 x_1 = [a, b];"),
    *("", " "),
)


def has_tokenizer(folder: Path) -> bool:
    """Check if a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a folder or a hub id. Raises ValueError if it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = first_line(error)
        raise ValueError(f"the tokenizer of {source} cannot be read: {reason}; check --target") from error


def compare_tokenizers(artifact: Path, folder: Path) -> list[str]:
    """Compare the tokenizers in two folders, and return a line that describes the check.

    The result is empty if `artifact` contains no tokenizer. Raises ValueError if the tokenizers differ.
    """
    if not has_tokenizer(artifact):
        return []

    def describe(path: Path) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        ids = [tokenizer(text)["input_ids"] for text in (*_PROBES, *tokenizer.all_special_tokens)]
        return tokenizer_fingerprint(tokenizer), tokenizer.chat_template, ids

    if describe(artifact) != describe(folder):
        raise ValueError(f"the tokenizer in {folder} differs from the artifact's")
    return [
        f"the tokenizer is identical: vocabulary, special tokens, chat template, and ids of {len(_PROBES)} texts and "
        "every special token"
    ]


def copy_tokenizer(target: str, folder: Path) -> None:
    """Copy the target's tokenizer to a folder if it is available locally or on the hub."""
    source = _find_tokenizer(target)
    if source is None:
        return
    copy_files(source, folder, TOKENIZER_FILES)
    config = read_json(source / CONFIG_FILE) if (source / CONFIG_FILE).is_file() else {}
    # otherwise, transformers derives the class from the model in the folder, which is a different one
    config.setdefault("tokenizer_class", type(load_tokenizer(str(source))).__name__)
    write_config(folder / CONFIG_FILE, config)
    patch_tokenizer(folder)


def _find_tokenizer(target: str) -> Path | None:
    try:
        folder = find_folder(target, SETTINGS_FILES)
    except ValueError:
        return None
    return folder if has_tokenizer(folder) else None


def compare_copy(target: str, folder: Path) -> list[str]:
    """Compare a copied tokenizer with the target's, and return a line that describes the result."""
    source = _find_tokenizer(target)
    if source is None:
        return [f"tokenizer not compared with the target's, because {target} is not available"]
    return [f"compared with the target, {line}" for line in compare_tokenizers(source, folder)]


def check_vocabulary(source: Source, target: str) -> None:
    """Raise ValueError if the artifact's vocabulary size differs from the target's."""
    expected = load_config(target).get_text_config(decoder=True).vocab_size
    if expected != source.manifest.vocab_size:
        raise ValueError(
            f"{source.folder} has a vocabulary of {source.manifest.vocab_size} tokens, but the target {target} has "
            f"{expected}: repair it with `{_doctor(source, target)}`"
        )


def check_drafter(
    source: Source, folder: Path, target: str, consumers: Collection[str], also: Collection[str] = ()
) -> None:
    """Raise ValueError if an engine does not support the drafter in `folder` with `target`; see `check_pair`."""
    sides = read_model_info(target, load_tokenizer), read_model_info(str(folder), load_tokenizer)
    check_pair(*sides, consumers, str(source.folder), _doctor(source, target), also)


def _doctor(source: Source, target: str) -> str:
    return shlex.join(["draftsmith", "doctor", target, str(source.folder), "--fix", "OUT"])


def output_projection(target: str, source: Source | None = None) -> Tensor:
    """Load the target's output projection [V, D], multiplied by its logit scale, without loading the model.

    Raises ValueError if `source` was made for a different target, or the projection cannot be read from safetensors
    files or has a bias.
    """
    folder = model_source(target)
    expected = ((source.manifest.target if source else None) or {}).get("sha256")
    if source is not None and expected is not None and any(Path(folder).glob("model*.safetensors")):
        actual = resolve_model(target, folder).sha256 or ""
        if actual != expected:
            hashes = f"SHA-256 {expected[:16]}…, but {target} has {actual[:16]}…"
            raise ValueError(f"{source.folder} was made for a target with {hashes}: pass the right one with --target")
    config = load_config(target).get_text_config(decoder=True)
    try:
        model = meta_model(config)
        _, name, bias = names_of_embeddings(model)
        weight_VD = read_tensor(folder, name, f"{model.base_model_prefix}.")
    except UNLOADABLE as error:
        raise ValueError(f"the output projection of {target} cannot be read: {first_line(error)}") from error
    if bias is not None:
        raise ValueError(f"the output projection of {target} has a bias ({bias}), which engines do not support")
    if weight_VD is None:
        raise ValueError(f"the safetensors files of the target {target} do not contain its output projection {name}")
    scale = LogitShape.of(config).scale  # a soft cap is ignored, because it does not change the ranking of tokens
    return weight_VD if scale == 1 else weight_VD * scale
