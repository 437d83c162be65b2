"""Train a byte-level BPE, or load the tokenizer a model came with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTES = 256


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` tokens: `special_tokens` first (ids 0, 1, …), all 256 bytes, then merges.

    The first special token is padding and beginning of sequence (never added by itself), the last is the end of
    sequence. The same texts in the same order give the same tokenizer.

    Raises:
        ValueError: no or repeated special tokens; `vocab_size` too small for bytes and special tokens, or larger
            than the texts have pairs to merge for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = list(special_tokens)
    if not specials or len(set(specials)) != len(specials):
        raise ValueError(f"special_tokens must be one or more different strings, found {specials}")
    if vocab_size < _BYTES + len(specials):
        raise ValueError(
            f"vocab_size is {vocab_size}, but {_BYTES} bytes and {len(specials)} special tokens need "
            f"{_BYTES + len(specials)}"
        )
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
        raise ValueError(
            f"the texts give a vocabulary of {backend.get_vocab_size()} tokens, not {vocab_size}: "
            "use more text or a smaller vocab_size"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[0],
        pad_token=specials[0],
        eos_token=specials[-1],
        extra_special_tokens=specials[1:-1],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a local folder or a hub id; code that a repository brings along is never run.

    Raises:
        ValueError: nothing there, nothing that is a tokenizer, or a package it needs is missing.
    """
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    if path.is_file():
        raise ValueError(f"{source} is a file; a tokenizer is loaded from the folder that holds its files")
    where = f"the folder {source}" if path.is_dir() else f"{source} (no such local folder, so taken as a hub id)"
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else source, trust_remote_code=False)
    except ImportError as error:
        raise ValueError(
            f"{where}: the tokenizer needs a missing package: {error}; pip install 'draftsmith[train]'"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"no tokenizer could be loaded from {where}: {reason[0]}") from error
