"""`draftsmith table show`, without what it takes to decode with a table, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ....checkpoints.artifact.artifact import open_artifact
from ....checkpoints.artifact.fingerprints import tokenizer_fingerprint
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.storage.safe_read import read_json
from ....checkpoints.table.counts import BigramCounts
from ....checkpoints.table.report import report
from ....data.tokenizers import load_tokenizer
from ...report.terminal.table import show_report

_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


def show_table(folder: Path, tokenizer: str | None) -> None:
    """Print what a table holds: sizes, where its counts come from, its most extreme correlations."""
    manifest, table = open_artifact(folder, BigramCounts.load, "table")
    texts = table_tokenizer(folder, manifest, tokenizer)
    source = manifest.recipe.get("tokenizer") or "MODEL"
    hint = f"tokens are shown by their ids: --tokenizer {source} shows their texts" if texts is None else None
    show_report(folder, manifest, report(table, texts), hint)


def table_tokenizer(folder: Path, manifest: Manifest, given: str | None) -> Any:
    """The tokenizer that shows a table's tokens: the one given, or the recipe's where it lies here; else None."""
    source = given or manifest.recipe.get("tokenizer")
    if source is None or (given is None and not Path(source).is_dir()):
        return None
    mine = manifest.tokenizer_fingerprint
    quick = _quick_tokenizer(Path(source))
    if quick is not None and tokenizer_fingerprint(quick) == mine:
        return quick
    tokenizer = load_tokenizer(source)
    theirs = tokenizer_fingerprint(tokenizer)
    if mine is None or mine == theirs:
        return tokenizer
    if given is None:
        return None
    raise ValueError(
        f"{folder} was counted with another tokenizer than {given}: the fingerprints are {mine[:16]}… and "
        f"{str(theirs)[:16]}…"
    )


def _quick_tokenizer(folder: Path) -> Any:
    """What a fingerprint and a report ask of a tokenizer, read without transformers; None where that is not all that
    the files say. It is the right one where the fingerprint is."""
    from tokenizers import Tokenizer

    try:
        backend, settings = (
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            read_json(folder / "tokenizer_config.json"),
        )
    except Exception:  # tokenizers raises nothing narrower
        return None
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [settings.get(name) for name in _SPECIAL] + list(more.values() if isinstance(more, dict) else more)
    texts = [one.get("content") if isinstance(one, dict) else one for one in named]
    numbers = [None if text is None else backend.token_to_id(text) for text in texts]
    return SimpleNamespace(
        get_vocab=backend.get_vocab,
        all_special_ids=[number for number in numbers if number is not None],
        bos_token_id=numbers[0],
        eos_token_id=numbers[1],
        convert_ids_to_tokens=lambda ids: [backend.id_to_token(number) for number in ids],
    )
