"""Training metrics, data and template recorded in an artifact's manifest."""

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
from ....data.rendering.templates import Template
from .agreement import Passage

_EXAMPLE = Conversation("example", 2 * (Turn("user", "What is it?"), Turn("assistant", "It is a test.")))


@dataclass(frozen=True)
class TrainingRecord:
    """Record of how an artifact was trained."""

    folder: Path
    manifest: Manifest
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that training measured with the weights in memory, before saving them."""

    @property
    def is_rounded(self) -> bool:
        """Return whether training used a 16-bit precision."""
        return str((self.manifest.recipe.get("train") or {}).get("precision", "no")) != "no"

    def has_other_template(self, template: Template, tokenizer: Any) -> bool:
        """Return whether training used a different chat template, or False if the manifest records none."""
        saved = (self.manifest.data.get("source") or {}).get("template")
        if not isinstance(saved, dict) or set(saved) != {value.name for value in fields(Template)}:
            return False
        values: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in saved.items()}
        before, after = (render(_EXAMPLE, value, tokenizer).ids.tolist() for value in (Template(**values), template))
        return bool(before != after)

    def passages(self) -> list[Passage] | str:
        """Return the held-out documents on which training measured metrics, or the reason why they are missing."""
        measured = (self.manifest.recipe.get("measure") or {}).get("blocks")
        if not self.metrics or not measured:
            return f"{self.folder} contains no training metrics on held-out blocks"
        cache = Path(str((self.manifest.recipe.get("data") or {}).get("cache")))
        for path in sorted(cache.glob("*/heldout/data.json")):
            try:
                is_same = load_json(path).get("source") == self.manifest.data.get("source")
            except ValueError:
                continue
            if is_same:
                data = PreparedData.load(path.parent)
                return block_passages(data, min(data.blocks, int(measured)))
        return f"the held-out blocks of the training are not in {cache}: run `draftsmith prepare` to write them again"


def load_training_record(folder: Path) -> TrainingRecord | None:
    """Load the training record of an artifact, or return None if the folder has no manifest."""
    if not (folder / MANIFEST_FILE).is_file():
        return None
    manifest = load_manifest(folder)
    metrics = (manifest.training or {}).get("metrics") or {}
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
    return TrainingRecord(folder, manifest, numbers)


def block_passages(data: PreparedData, blocks: int) -> list[Passage]:
    """Convert the documents in the first blocks to passages. Only supervised tokens are scored."""
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
