"""What an artifact's manifest says of its training, beside the evaluation that it is diagnosed with: the measurement
that training took of it, the held-out blocks that it was taken of, and how conversations were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import MANIFEST_FILE, Manifest, load_manifest, model_fingerprint
from ....checkpoints.artifact.locate import at_revision
from ....data.blocks.packing import IGNORED, PADDING
from ....data.blocks.prepared import PreparedData
from ....data.conversations import Conversation, Turn
from ....data.prompts import stop_ids
from ....data.rendering.render import render
from ....data.rendering.templates import OWN, Template, get_template
from ....decode.evaluation.diagnose.agreement import Passage
from ....decode.models.loading import load_model
from ...assemble.data import encoder_hash
from ...assemble.evaluation import LoadedPair
from ...schema.evaluation import EvaluateRecipe

_SHOWN = 6
"""Ids on either side of the first that differs."""
_COMPARED = 8
"""Conversations that are written both ways, to find one that differs."""


@dataclass(frozen=True)
class Trained:
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
        said = (self.manifest.data.get("source") or {}).get("template")
        names = {each.name for each in fields(Template)}
        if not isinstance(said, dict) or set(said) != names:
            return None
        values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in said.items()}
        return Template(**values)

    @property
    def trained_type(self) -> str | None:
        """The type of the weights in training, where the recipe says it."""
        return (self.manifest.recipe.get("model") or {}).get("dtype")

    @property
    def heads(self) -> list[float | None]:
        """How often each head's best guess was right, as training measured it."""
        count = int(self.manifest.shapes.get("num_heads") or 0) if self.manifest.kind == "heads" else 0
        return [self.metrics.get(f"head{head}_top1") for head in range(count)]

    @property
    def rounds(self) -> bool:
        """Whether training's own measurement was taken in 16 bits."""
        return (self.manifest.recipe.get("train") or {}).get("precision", "no") != "no"

    def blocks(self) -> PreparedData | str:
        """The held-out blocks that training measured on; where they are not here, why."""
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
                return PreparedData.load(found.parent)
        return (
            f"training's held-out blocks are not in {cache} any more: what training measured of {self.folder} could "
            "not be measured again (`draftsmith prepare` with its recipe brings them back)"
        )

    def measured_blocks(self, data: PreparedData) -> int:
        """How many of them training looked at."""
        return min(data.blocks, int(self.manifest.recipe["measure"]["blocks"]))


def trained_of(folder: str | None) -> Trained | None:
    """What is known of an artifact; None of a hub id or a folder without a manifest."""
    if folder is None or not (Path(folder) / MANIFEST_FILE).is_file():
        return None
    manifest = load_manifest(Path(folder))
    found = (manifest.training or {}).get("metrics") or {}
    numbers = {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}
    return Trained(Path(folder), manifest, numbers)


def block_passages(data: PreparedData, blocks: int) -> list[Passage]:
    """The documents of the first blocks, of which the tokens that are trained on are judged."""
    passages = []
    for block in range(blocks):
        batch = data.batch([block])
        rows = (batch.tokens_BT[0], batch.labels_BT[0] != IGNORED, batch.documents_BT[0])
        tokens_T, trained_T, number_T = (row.numpy() for row in rows)
        for number in dict.fromkeys(number_T[number_T != PADDING].tolist()):
            ids, kept = tokens_T[number_T == number].tolist(), trained_T[number_T == number].tolist()
            if any(kept[1:]):
                passages.append(Passage(ids[:1], ids[1:], kept[1:]))
    return passages


@dataclass(frozen=True)
class OtherTarget:
    """Whether the target is the one that an artifact was made for."""

    known: bool
    """Whether that can be told."""
    same: bool = True
    made_for: str | None = None
    """Folder or hub id of the other one, as the manifest has it."""
    model: Any = None
    """That one, where it is here."""


def other_target(trained: Trained | None, recipe: EvaluateRecipe, opened: LoadedPair) -> OtherTarget:
    """Compare the fingerprints of the target and of the one that an artifact was made for, and load that if they differ
    and it lies in its place."""
    made_for = trained.manifest.target if trained is not None else None
    if trained is None or not made_for or not made_for.get("fingerprint"):
        return OtherTarget(known=False)
    base, theirs = trained.folder / "base", made_for["fingerprint"]
    if (base / "config.json").is_file():
        made_for, theirs = {"id": str(base)}, model_fingerprint(base)
    target = Path(at_revision(recipe.target))
    if (target / "config.json").is_file():
        mine = model_fingerprint(target)
    elif recipe.dtype == "auto" and recipe.device_map is None:
        mine = model_fingerprint(opened.model)
    else:
        return OtherTarget(known=False)
    if mine == theirs:
        return OtherTarget(known=True)
    place, model = Path(str(made_for.get("id"))), None
    if (place / "config.json").is_file() and model_fingerprint(place) == theirs:
        model = load_model(str(place), dtype=recipe.dtype, device=str(opened.target.device))
    return OtherTarget(True, False, made_for.get("id"), model)


@dataclass(frozen=True)
class Writing:
    """A conversation as training and as the evaluation write it, where the two differ."""

    conversation: str
    place: int
    """Of the first id that differs."""
    trained: list[int]
    """Ids about that place."""
    evaluated: list[int]

    def as_dict(self, tokenizer: Any) -> dict[str, Any]:
        """With the tokens' texts."""
        return {
            "conversation": self.conversation,
            "place": self.place,
            "trained": {"ids": self.trained, "tokens": _tokens(tokenizer, self.trained)},
            "evaluated": {"ids": self.evaluated, "tokens": _tokens(tokenizer, self.evaluated)},
        }


def _tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]


def first_difference(
    conversations: Sequence[Conversation], trained: Template, evaluated: Template, tokenizer: Any
) -> Writing | None:
    """The first of some conversations that two templates write with other ids."""
    for conversation in conversations[:_COMPARED]:
        theirs, mine = (render(conversation, each, tokenizer).ids.tolist() for each in (trained, evaluated))
        if theirs != mine:
            pairs = enumerate(zip(theirs, mine, strict=False))
            shorter = min(len(theirs), len(mine))
            place = next((at for at, (one, other) in pairs if one != other), shorter)
            about = slice(max(0, place - _SHOWN // 2), place + _SHOWN)
            return Writing(conversation.id, place, theirs[about], mine[about])
    return None


Difference = dict[str, Any]
"""`what`, `trained`, `evaluated` (texts), `matters` (whether ids, positions or states come out otherwise), and
`example` (`Writing.as_dict` or None)."""


def _difference(what: str, trained: Any, evaluated: Any, matters: bool = True, example: Any = None) -> Difference:
    return {"what": what, "trained": str(trained), "evaluated": str(evaluated), "matters": matters, "example": example}


def differences(
    trained: Trained,
    recipe: EvaluateRecipe,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    positions: Sequence[int],
) -> list[Difference]:
    """How conversations were written for training, and how the evaluation writes them, where that differs.

    Args:
        conversations: of the evaluation, with an answer each.
        positions: of all tokens that the evaluation had to predict.
    """
    found = _of_templates(trained, recipe, tokenizer, conversations)
    encoder = (trained.manifest.data.get("source") or {}).get("encoder")
    mine = encoder_hash(tokenizer)
    if encoder and encoder != mine:
        what = "tokenisation: the same vocabulary, but other merges, normaliser or added tokens"
        found.append(_difference(what, f"hash {encoder[:12]}…", f"hash {mine[:12]}… (of {recipe.target})"))
    block = trained.block_tokens
    if block and positions and max(positions) >= block:
        beyond = sum(position >= block for position in positions) / len(positions)
        now = f"positions up to {max(positions) + 1}; {beyond:.0%} of the tokens lie beyond"
        found.append(_difference("length", f"blocks of {block} tokens", now))
    if trained.data.get("last_turn_only"):
        found.append(_difference("turns", "last answers alone", "first answers", matters=False))
    for option in ("html", "escaped_markdown"):
        how = (trained.data.get("clean") or {}).get(option, "keep")
        if how != "keep":
            found.append(_difference(f"cleaning, {option}", how, "keep (prompts are not cleaned)", matters=False))
    return found


def _of_templates(
    trained: Trained, recipe: EvaluateRecipe, tokenizer: Any, conversations: Sequence[Conversation]
) -> list[Difference]:
    """Templates, beginnings and ends of sequences, and what stands before an answer."""
    evaluated, theirs = get_template(recipe.template, tokenizer), trained.template
    found, probe = [], Conversation("probe", (Turn("user", "What is it?"), Turn("assistant", "It is a test.")))
    if theirs is not None and theirs != evaluated:
        writing = first_difference([*conversations, probe], theirs, evaluated, tokenizer)
        example = None if writing is None else writing.as_dict(tokenizer)
        then, now = theirs.name, evaluated.name
        if then == now:
            then, now = f"{then} as it was then", f"{now} as it is now"
        found.append(_difference("template", then, now, writing is not None, example))
        if writing is not None:
            found += _details(probe, theirs, evaluated, tokenizer)
    ends = render(probe, evaluated, tokenizer)
    end = int(ends.ids[ends.spans[0][1] - 1])
    if end not in stop_ids(tokenizer):
        stops = ", ".join(_tokens(tokenizer, stop_ids(tokenizer))) or "nothing"
        what = f"end of an answer: {recipe.template} ends it with {_tokens(tokenizer, [end])[0]}"
        found.append(_difference(what, "–", f"decoding stops at {stops}"))
    if getattr(tokenizer, "chat_template", None) and recipe.template != OWN:
        own = get_template(OWN, tokenizer)
        writing = first_difference([probe], own, evaluated, tokenizer)
        if writing is not None:
            what = "template of the target: its tokenizer brings one of its own"
            found.append(_difference(what, "–", recipe.template, matters=False, example=writing.as_dict(tokenizer)))
    return found


def _details(probe: Conversation, trained: Template, evaluated: Template, tokenizer: Any) -> list[Difference]:
    """What of two templates' ids differs, by name."""
    both = [render(probe, each, tokenizer) for each in (trained, evaluated)]
    rows = [(each.ids.tolist(), *each.spans[0]) for each in both]
    bos = tokenizer.bos_token_id
    pieces: list[tuple[str, list[list[int]]]] = [
        ("beginning", [ids[: 1 + (ids[0] == bos)] for ids, _, _ in rows]),
        ("before the answer", [ids[max(0, start - 3) : start] for ids, start, _ in rows]),
        ("first token of the answer", [ids[start : start + 1] for ids, start, _ in rows]),
        ("end of the answer", [ids[end - 1 : end] for ids, _, end in rows]),
    ]
    said = [(what, *(" ".join(_tokens(tokenizer, ids)) for ids in pair)) for what, pair in pieces]
    return [_difference(what, theirs, mine) for what, theirs, mine in said if theirs != mine]


def counted_on(trained: Trained) -> str:
    """What a table's counts are of, for people."""
    data, counting = trained.data, trained.manifest.recipe.get("count") or {}
    sources = [data.get("source"), *(part.get("source") for part in data.get("mixture") or [])]
    tokens = trained.manifest.data.get("trainable_tokens") or trained.manifest.data.get("tokens")
    size = f", {tokens:,} tokens" if isinstance(tokens, int) else ""
    pairs = f", pairs of {counting['pairs']}" if counting.get("pairs") else ""
    return f"{', '.join(str(each) for each in sources if each)}{size}{pairs}, template {data.get('template')}"
