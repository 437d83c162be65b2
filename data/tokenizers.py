"""Training of byte-level BPE tokenizers, and loading of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.storage.gguf import gguf_folder, is_gguf
from ..checkpoints.storage.messages import first_line, install_hint
from ..checkpoints.storage.names import TOKENIZER_FILES, other_kind
from ..checkpoints.storage.places import check_location, out_of_reach

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTES = 256
_NO_TOKENIZER = "the folder has no tokenizer: copy tokenizer.json and tokenizer_config.json of the original model"


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer. Special tokens get the lowest ids, followed by the bytes and the merges.

    The first special token is the BOS and padding token, and the last one is the EOS token.

    Raises ValueError if special tokens are missing or repeated, or if `vocab_size` is too small or too large.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = list(special_tokens)
    if not specials or len(set(specials)) != len(specials):
        raise ValueError(f"special_tokens must be one or more distinct strings, got {specials}")
    if vocab_size < _BYTES + len(specials):
        least = _BYTES + len(specials)
        raise ValueError(f"vocab_size must be at least {least} (bytes and special tokens), got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    if backend.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but the texts give {backend.get_vocab_size()}: use more texts")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[0],
        pad_token=specials[0],
        eos_token=specials[-1],
        extra_special_tokens=specials[1:-1],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str) -> Any:
    """Load a tokenizer from a local directory, a GGUF file or a hub id (`user/name`, `user/name@revision`).

    Remote code is never run. If there is only `tokenizer.model`, merges are sorted by score, as in sentencepiece,
    because transformers 5.23 sorts LLaMA's merges by id and therefore tokenizes indented text differently.

    Raises ValueError if there is no tokenizer, a required package is missing, or a local folder has a revision.
    """
    path = gguf_folder(source) if is_gguf(source) else Path(source).expanduser()
    if path.is_file():
        raise ValueError(f"{source} is a file: pass the folder of the tokenizer")
    description = f"the folder {source}" if path.is_dir() else f"{source} (not a local folder, so loaded as a hub id)"
    name, _, revision = (str(path), "", "") if path.is_dir() else source.partition("@")
    if revision and Path(name).is_dir():
        raise ValueError(f"{source}: {name} is a local folder, which has no revisions")
    check_location(name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or None, trust_remote_code=False)
        if path.is_dir() and _lacks_files(path, tokenizer):
            raise ValueError("transformers created an empty tokenizer from the configuration")
        return _with_its_own_merges(tokenizer, name, revision or None)
    except ImportError as error:
        raise ValueError(f"{description}: a required package is missing: {error}; {install_hint('train')}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error) if path.is_dir() else out_of_reach() or first_line(error)
        if path.is_dir() and _lacks_files(path):
            kind = other_kind(path)
            reason = f"it contains {kind}: pass a language model" if kind else _NO_TOKENIZER
        raise ValueError(f"no tokenizer could be loaded from {description}: {reason}") from error


def _lacks_files(folder: Path, tokenizer: Any = None) -> bool:
    """Check if a directory lacks the vocabulary files of `tokenizer`, or of any known tokenizer if it is None."""
    known = TOKENIZER_FILES if tokenizer is None else tokenizer.vocab_files_names.values()
    names = {"tokenizer.json", "tekken.json", *known} - {"tokenizer_config.json"}
    return (tokenizer is None or bool(known)) and not any((folder / name).is_file() for name in names)


def _with_its_own_merges(tokenizer: Any, name: str, revision: str | None) -> Any:
    """Sort the merges of a tokenizer by score if it has only a sentencepiece model, and return the tokenizer."""
    from transformers.utils import cached_file

    faults = ("missing_entries", "connection_errors", "gated_repo")
    lenient = {f"_raise_exceptions_for_{fault}": False for fault in faults}
    find_file = partial(cached_file, name, revision=revision, **lenient)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (model_file := find_file("tokenizer.model")) is None:
        return tokenizer
    state = json.loads(backend.to_str())
    if find_file("tokenizer.json") is None and state["model"]["type"] == "BPE":
        merges = _scored_merges(model_file, state["model"]["vocab"])
        if merges != [tuple(pair) for pair in state["model"]["merges"]]:
            state["model"]["merges"] = merges
            tokenizer._tokenizer = type(backend).from_str(json.dumps(state))
    if find_spec("sentencepiece") is not None:
        tokenizer.sentencepiece_file = model_file  # lets PieceEncoder use the faster sentencepiece library
    return tokenizer


def _scored_merges(model_file: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the BPE merges of a sentencepiece model, sorted by score and then by descending length.

    Only runs of spaces have equal scores. They are merged from the left.
    """
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=model_file)
    merges: list[tuple[float, int, str, str]] = []
    for number in range(model.get_piece_size()):
        piece, score = model.id_to_piece(number), model.get_score(number)
        if model.is_control(number) or model.is_unknown(number) or model.is_byte(number):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, -len(piece), left, right))
    merges.sort(key=lambda pair: pair[:2])
    return [pair[2:] for pair in merges]
