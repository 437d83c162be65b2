"""From a recipe's data section to prepared blocks, kept in a cache that knows when it is stale."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.artifact import tokenizer_fingerprint
from ..data.conversations import Conversation, CorpusReport, write_conversations
from ..data.prepared import PreparedData, prepare
from ..data.reading import read_conversations
from ..data.templates import get_template
from .config import DataSection
from .terminal import counter, say


@dataclass(frozen=True)
class Prepared:
    """Blocks to train on, blocks and conversations held out, and what became of the source's rows."""

    train: PreparedData
    heldout: PreparedData
    folder: Path
    report: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """For an artifact's manifest: where the data came from, and how much of it there is."""
        manifest = self.train.manifest
        counts = {key: manifest[key] for key in ("rows", "documents", "blocks", "tokens", "trainable_tokens")}
        return {"source": manifest["source"], **counts, "sha256": manifest["sha256"], "corpus": self.report}


def prepare_data(section: DataSection, tokenizer: Any, *, quiet: bool = False) -> Prepared:
    """Render, split and pack a recipe's data, or reuse what an earlier run left.

    Reused when, and only when, source files, options and tokenizer are the same.

    Raises:
        ValueError: what reading, rendering and packing raise; nothing held out.
    """
    identity = {
        "options": section.model_dump(exclude={"cache"}),
        "source": _fingerprint(section.source),
        "heldout": _fingerprint(section.heldout_source) if section.heldout_source else None,
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(section.cache) / key
    if not (folder / "report.json").is_file():
        _prepare(section, tokenizer, identity, folder)
    elif not quiet:
        say(f"data: reusing {folder} (same source, options and tokenizer)")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Prepared(PreparedData.load(folder / "train"), PreparedData.load(folder / "heldout"), folder, report)


def _prepare(section: DataSection, tokenizer: Any, identity: dict[str, Any], folder: Path) -> None:
    template = get_template(section.template)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    source = {"rows_from": section.source, **identity["source"], "tokenizer": identity["tokenizer"]}
    report, heldout = CorpusReport(), []

    def to_train() -> Iterator[Conversation]:
        rows = read_conversations(
            section.source,
            split=section.split,
            revision=section.revision,
            file=section.file,
            limit=section.limit,
            report=report,
        )
        for conversation in rows:
            if section.heldout_source is None and _held_out(conversation, section.heldout_share):
                heldout.append(conversation)
            else:
                yield conversation

    try:
        with counter(f"preparing {section.source}", "conversations") as advance:
            train = prepare(
                to_train(),
                tokenizer,
                template,
                section.block_tokens,
                unfinished / "train",
                source=source,
                progress=advance,
            )
        if section.heldout_source is not None:
            heldout = list(read_conversations(section.heldout_source, limit=section.heldout_limit))
        if not heldout:
            raise ValueError(
                f"no conversation of {section.source} was held out: {train.manifest['rows']} rows at a share of "
                f"{section.heldout_share}; raise data.heldout_share or give data.heldout_source"
            )
        heldout = heldout[: section.heldout_limit]
        prepare(heldout, tokenizer, template, section.block_tokens, unfinished / "heldout", source=source)
        write_conversations(heldout, unfinished / "heldout.jsonl")
        (unfinished / "report.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"data: {report.summary()}")
    numbers = train.manifest
    say(
        f"data: {numbers['tokens']:,} tokens in {numbers['blocks']:,} blocks of {section.block_tokens} "
        f"({numbers['packing_density']:.1%} full), {numbers['trainable_share']:.1%} trained; {len(heldout)} held out"
    )


def _held_out(conversation: Conversation, share: float) -> bool:
    # ShareGPT's parts of one long conversation are called abcdefg_0, abcdefg_1 …: they must fall on one side.
    part = re.fullmatch(r"([A-Za-z0-9]{7})_\d+", conversation.id)
    whole = part[1] if part else conversation.id
    digest = hashlib.sha256(f"held out {whole}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _fingerprint(source: str) -> dict[str, Any]:
    """What a source is: its files' hashes where it is local, its name where it is on the hub."""
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    if not path.exists():
        return {"hub": source}
    hashes = {}
    for item in files:
        with item.open("rb") as opened:
            hashes[item.name if path.is_file() else str(item.relative_to(path))] = hashlib.file_digest(
                opened, "sha256"
            ).hexdigest()
    return {"files": hashes}
