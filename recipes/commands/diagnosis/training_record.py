"""What an artifact's manifest says of its training: what was measured on which blocks, the target, the template."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.storage.names import MANIFEST_FILE
from ....checkpoints.storage.safe_read import load_json
from ....data.blocks.packing import IGNORED, PADDING
from ....data.blocks.prepared import PreparedData
from ....data.conversations import Conversation, Turn
from ....data.rendering.render import render
from ....data.rendering.templates import Template, get_template
from ....decode.evaluation.diagnose.agreement import Passage

_PROBE = Conversation("probe", 2 * (Turn("user", "What is it?"), Turn("assistant", "It is a test.")))


@dataclass(frozen=True)
class TrainingRecord:
    """What is known of how an artifact was made."""

    folder: Path
    manifest: Manifest
    metrics: dict[str, float] = field(default_factory=dict)
    """What training measured of the weights in memory."""

    @property
    def rounds(self) -> bool:
        """Whether training's own measurement was taken in 16 bits."""
        return str((self.manifest.recipe.get("train") or {}).get("precision", "no")) != "no"

    def writes_otherwise(self, template: str, tokenizer: Any) -> bool:
        """Whether conversations were written with another template, as far as is known."""
        saved = (self.manifest.data.get("source") or {}).get("template")
        if not isinstance(saved, dict) or set(saved) != {each.name for each in fields(Template)}:
            return False
        values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in saved.items()}
        theirs = Template(**values)
        before, now = (render(_PROBE, each, tokenizer).ids for each in (theirs, get_template(template, tokenizer)))
        return before.tolist() != now.tolist()

    def passages(self) -> list[Passage] | str:
        """The held-out documents that training measured on; where they are not here, why."""
        measured = (self.manifest.recipe.get("measure") or {}).get("blocks")
        if not self.metrics or not measured:
            return f"training measured nothing of {self.folder} on held-out blocks"
        wanted = self.manifest.data.get("source")
        cache = Path(str((self.manifest.recipe.get("data") or {}).get("cache")))
        for found in sorted(cache.glob("*/heldout/data.json")):
            try:
                same = load_json(found).get("source") == wanted
            except ValueError:
                continue
            if same:
                data = PreparedData.load(found.parent)
                return block_passages(data, min(data.blocks, int(measured)))
        return f"training's held-out blocks are not in {cache} any more (`draftsmith prepare` brings them back)"


def training_record(folder: str) -> TrainingRecord | None:
    """What is known of an artifact; None of a hub id or a folder without a manifest."""
    if not (Path(folder) / MANIFEST_FILE).is_file():
        return None
    manifest = load_manifest(Path(folder))
    metrics = (manifest.training or {}).get("metrics") or {}
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
    return TrainingRecord(Path(folder), manifest, numbers)


def block_passages(data: PreparedData, blocks: int) -> list[Passage]:
    """The documents of the first blocks, of which the tokens that are trained on are judged."""
    passages = []
    for block in range(blocks):
        batch = data.batch([block])
        rows = (batch.tokens_BT[0], batch.labels_BT[0] != IGNORED, batch.documents_BT[0])
        tokens_T, trained_T, number_T = (row.numpy() for row in rows)
        for number in dict.fromkeys(number_T[number_T != PADDING].tolist()):
            ids, judged = tokens_T[number_T == number].tolist(), trained_T[number_T == number].tolist()
            if any(judged[1:]):
                passages.append(Passage(ids[:1], ids[1:], judged[1:]))
    return passages
