"""What an artifact's manifest says of its training: what was measured on which blocks, the target, the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import MANIFEST_FILE, Manifest, load_manifest
from ....data.blocks.packing import IGNORED, PADDING
from ....data.blocks.prepared import PreparedData
from ....data.conversations import Conversation, Turn
from ....data.prompts import stop_ids
from ....data.rendering.render import render
from ....data.rendering.templates import Template, get_template
from ....decode.evaluation.diagnose.agreement import Passage
from ....decode.evaluation.diagnose.stages import ENDS
from ...schema.evaluation import EvaluateRecipe

_SHOWN = 6
"""Ids on either side of the first that differs."""
_COMPARED = 8
"""Conversations that are written both ways, to find one that differs."""
_PROBE = Conversation("probe", (Turn("user", "What is it?"), Turn("assistant", "It is a test.")))
Difference = dict[str, Any]
"""`what`, `trained`, `evaluated` (texts), and `example` (None or `conversation`, `index` of the first id that differs,
and `ids` and `tokens` about it of either side)."""


@dataclass(frozen=True)
class TrainingRecord:
    """What is known of how an artifact was made."""

    folder: Path
    manifest: Manifest
    metrics: dict[str, float] = field(default_factory=dict)
    """What training measured of the weights in memory."""

    @property
    def data(self) -> dict[str, Any]:
        """The data section of its recipe."""
        return dict(self.manifest.recipe.get("data") or {})

    @property
    def block_tokens(self) -> int | None:
        """Length of a training block; of a table, which counts whole conversations, None."""
        return None if self.manifest.kind == "table" else self.data.get("block_tokens")

    @property
    def template(self) -> Template | None:
        """The template that conversations were written with, as it was then."""
        saved = (self.manifest.data.get("source") or {}).get("template")
        if not isinstance(saved, dict) or set(saved) != {each.name for each in fields(Template)}:
            return None
        values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in saved.items()}
        return Template(**values)

    @property
    def rounds(self) -> bool:
        """Whether training's own measurement was taken in 16 bits."""
        return (self.manifest.recipe.get("train") or {}).get("precision", "no") != "no"

    def passages(self) -> list[Passage] | str:
        """The held-out documents that training measured on; where they are not here, why."""
        measured = (self.manifest.recipe.get("measure") or {}).get("blocks")
        if not self.metrics or not measured:
            return f"training measured nothing of {self.folder} on held-out blocks"
        wanted, cache = self.manifest.data.get("source"), Path(str(self.data.get("cache")))
        for found in sorted(cache.glob("*/heldout/data.json")):
            try:
                same = json.loads(found.read_text(encoding="utf-8")).get("source") == wanted
            except json.JSONDecodeError:
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


def differences(
    trained: TrainingRecord, recipe: EvaluateRecipe, tokenizer: Any, conversations: Sequence[Conversation], longest: int
) -> list[Difference]:
    """How conversations were written for training, and how the evaluation writes them, where ids or positions differ.

    Args:
        conversations: of the evaluation, with an answer each.
        longest: tokens of the longest text that was decoded.
    """
    found = []
    evaluated, theirs = get_template(recipe.template, tokenizer), trained.template
    if theirs is not None and theirs != evaluated:
        example = _first_difference([*conversations[:_COMPARED], _PROBE], theirs, evaluated, tokenizer)
        if example is not None:
            then, now = theirs.name, evaluated.name
            if then == now:
                then, now = f"{then} as it was then", f"{now} as it is now"
            found.append(_difference("template", then, now, example))
    rendered = render(_PROBE, evaluated, tokenizer)
    end = int(rendered.ids[rendered.spans[0][1] - 1])
    if end not in stop_ids(tokenizer):
        stops = ", ".join(_tokens(tokenizer, stop_ids(tokenizer))) or "nothing"
        ends = f"{recipe.template} ends it with {_tokens(tokenizer, [end])[0]}"
        found.append(_difference(ENDS, ends, f"decoding stops at {stops}"))
    if trained.block_tokens and longest > trained.block_tokens:
        found.append(_difference("length", f"blocks of {trained.block_tokens} tokens", f"texts of up to {longest}"))
    return found


def _difference(what: str, trained: str, evaluated: str, example: Any = None) -> Difference:
    return {"what": what, "trained": trained, "evaluated": evaluated, "example": example}


def _first_difference(
    conversations: Sequence[Conversation], trained: Template, evaluated: Template, tokenizer: Any
) -> dict[str, Any] | None:
    """The first of some conversations that two templates write with other ids, and where."""
    for conversation in conversations:
        theirs, mine = (render(conversation, each, tokenizer).ids.tolist() for each in (trained, evaluated))
        if theirs != mine:
            pairs = enumerate(zip(theirs, mine, strict=False))
            shorter = min(len(theirs), len(mine))
            index = next((at for at, (one, other) in pairs if one != other), shorter)
            about = slice(max(0, index - _SHOWN // 2), index + _SHOWN)
            sides = {
                side: {"ids": ids[about], "tokens": _tokens(tokenizer, ids[about])}
                for side, ids in (("trained", theirs), ("evaluated", mine))
            }
            return {"conversation": conversation.id, "index": index} | sides
    return None


def _tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
