"""`draftsmith table show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import open_artifact
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.artifact.model_ref import tokenizer_fingerprint
from ....checkpoints.table.facts import table_facts
from ....checkpoints.table.table import BigramTable
from ....data.tokenizers import load_tokenizer
from ...report.terminal.table import show_facts


def show_table(folder: Path, tokenizer: str | None) -> None:
    """Print what a table holds: sizes, where its counts come from, its most extreme correlations."""
    manifest, table = open_artifact(folder, BigramTable.load, "table")
    texts = table_tokenizer(folder, manifest, tokenizer)
    source = manifest.recipe.get("tokenizer") or "MODEL"
    hint = f"tokens are shown by their ids: --tokenizer {source} shows their texts" if texts is None else None
    show_facts(folder, manifest, table_facts(table, texts), hint)


def table_tokenizer(folder: Path, manifest: Manifest, given: str | None) -> Any:
    """The tokenizer that shows a table's tokens: the one given, or the recipe's where it lies here; else None."""
    source = given or manifest.recipe.get("tokenizer")
    if source is None or (given is None and not Path(source).is_dir()):
        return None
    mine = manifest.tokenizer_fingerprint
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
