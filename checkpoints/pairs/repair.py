"""Make a drafter fit its target: rows moved, padded or trimmed, the target's tokenizer, settings, positions.

What is repaired is a copy. Weights are rewritten only where rows change; else their files are copied as they are.
Shape letters: V rows of a vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.artifact import file_faults, save_artifact
from ..artifact.compat import patch_model, patch_tokenizer
from ..artifact.locate import find_folder
from ..artifact.model_ref import target_record, tokenizer_fingerprint
from ..storage.draft_vocabulary import OUTER, TOKENS, read_vocabulary, write_vocabulary
from ..storage.names import MANIFEST_FILE, TOKENIZER_FILES
from ..storage.safe_read import copy_files, read_json
from ..verify.inspect import describe
from ..verify.model_files import load_config, load_language_model
from .checks import other_fingerprint
from .sides import KEPT_FILES, WEIGHTS, Finding, Side
from .speculation import generation_settings, speculation, write_settings
from .translation import Row, translated

NEVER = -1e4
"""The output bias of a row without a token, in models whose output layer has a bias."""
ASSISTANT = speculation()
"""What transformers reads from the drafter, where it says nothing itself."""
_OF_TOKENIZERS = ("tokenizer", "token texts", "missing tokens", "special ids", "vocabulary type")
_LEARNED = ("encoding", "bos and eos around a text", "chat template")
_KEEPS_ITS_FREQUENCIES = ("default", "linear", "llama3")


@dataclass
class Repairs:
    """What is done to a drafter, and what cannot be."""

    rows: list[Row] | None = None
    """For every row of the new embedding the drafter's row that it is, or whose mean it is, None for a new one; None
    where all stay."""
    proposed: list[int] | None = None
    """The ids that it proposes from now on; None where that is as it was."""
    same_tokens: bool = False
    """Whether every id means to the drafter, once repaired, what it means to the target."""
    positions: int | None = None
    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def repair(
    target: Side, drafter: Side, findings: Iterable[Finding], out: Path, command: str, whole: Path | None = None
) -> Repairs:
    """Write a drafter that fits its target to `out`, as an artifact, whole or not at all. `whole` has its files as a
    model in safetensors, where its own folder holds an adapter or pickled weights; `command` is for the manifest.

    Raises ValueError: an `out` that holds something, or is one of the two; a drafter without safetensors weights, or
    without some of its tensors; an artifact that is not what its manifest says; nothing that could be repaired.
    """
    if out.resolve() in (target.folder.resolve(), drafter.folder.resolve()):
        raise ValueError(f"{out} is one of the pair: choose another folder for the repaired drafter")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out} exists already; the repaired drafter is written to a new folder")
    if wrong := "; ".join(describe(drafter.fit, drafter.source)):
        raise ValueError(f"nothing repairs that {wrong}")
    plan = plan_repairs(target, drafter, findings)
    weights = whole or find_folder(drafter.source, [WEIGHTS, "*.json", *TOKENIZER_FILES, *KEPT_FILES])
    if drafter.manifest is not None and (faults := file_faults(drafter.folder, drafter.manifest)):
        record = drafter.folder / MANIFEST_FILE
        raise ValueError(f"{'; '.join(faults)}. If you changed that yourself, delete {record}: its record is of others")
    if not plan.done:
        raise ValueError(f"nothing of {drafter.source} is to be repaired: {'; '.join(plan.left) or 'the two fit'}")
    if not any(weights.glob(WEIGHTS)):
        raise ValueError(f"{drafter.source} has no safetensors weights ({WEIGHTS}), and pickled ones are not read")

    def write(folder: Path) -> None:
        _write(plan, target, drafter, weights, folder)

    about = _manifest_of(plan, target, drafter, is_merged=whole is not None)
    save_artifact(out, write=write, command=command, **about)
    return plan


def plan_repairs(target: Side, drafter: Side, findings: Iterable[Finding]) -> Repairs:
    """What would be done."""
    plan, found = Repairs(), {finding.check for finding in findings}
    _plan_rows(plan, target, drafter)
    _plan_positions(plan, target, drafter)
    if plan.same_tokens and found & {*_OF_TOKENIZERS, *_LEARNED}:
        plan.done.append("tokenizer, chat template and special ids: the target's")
    if plan.same_tokens and found & set(_LEARNED):
        plan.left.append("what the drafter learned from other ids or turns stays learned: more training would help")
    missing = [name for name in ASSISTANT if getattr(drafter.generation, name) is None]
    if missing:
        shown = ", ".join(f"{name} {ASSISTANT[name]}" for name in missing)
        plan.done.append(f"generation_config.json: {shown}, which transformers reads from the drafter")
    return plan


def _plan_rows(plan: Repairs, target: Side, drafter: Side) -> None:
    """Which row goes where, so that ids mean the same to both."""
    if target.tokenizer is None:
        plan.left.append("the target has no tokenizer: what its ids mean is not known")
        return
    mine, theirs = target.vocab, drafter.vocab
    made_with = drafter.manifest.tokenizer_fingerprint if drafter.manifest else None
    if drafter.tokenizer is not None and made_with not in (None, tokenizer_fingerprint(drafter.tokenizer)):
        plan.left.append("its manifest names another tokenizer than lies beside it: which its rows are of is not known")
        return
    if drafter.tokenizer is None:
        if made_with is None or other_fingerprint(target, drafter):
            plan.left.append("which tokenizer the drafter was trained with is not known, so its rows cannot be placed")
            return
        theirs = mine
    size, old = target.rows or target.vocab_size, drafter.rows or drafter.vocab_size
    rows: list[Row]
    if unknown := sorted(theirs.keys() - mine.keys(), key=theirs.__getitem__):
        found = translated(target.tokenizer, drafter.tokenizer, old)
        if found is None:
            some = ", ".join(map(repr, unknown[:3]))
            plan.left.append(
                f"{len(unknown):,} tokens of the drafter are not the target's ({some}), and what a token writes is not "
                "known of such tokenizers: it needs training with the target's"
            )
            return
        rows = [*found[:size], *[None] * (size - len(found))]
        own = read_vocabulary(drafter.folder, old).get(TOKENS)
        kept = range(old) if own is None else set(own.tolist())
        plan.proposed = [i for i, row in enumerate(rows) if isinstance(row, int) and row in kept]
        if not plan.proposed:
            plan.left.append("no token of the drafter is one of the target's")
            return
        plan.left.append(
            f"it proposes {len(plan.proposed):,} of the target's {len(mine):,} tokens alone, those that both have, and "
            "reads others as the mean of what it would write them with: training would help"
        )
    else:
        moves = {mine[text]: number for text, number in theirs.items() if number < old}
        taken = set(theirs.values())
        rows = [moves.get(i, i if i < old and i not in taken else None) for i in range(size)]
    if rows != list(range(old)):
        if getattr(drafter.config, "quantization_config", None):
            plan.left.append("its weights are quantised: rows of the vocabulary cannot be moved")
            return
        plan.rows = rows
        plan.done += _describe_rows(rows, old)
    if drafter.rows not in (None, drafter.vocab_size):
        plan.done.append(f"config.json: vocab_size, {drafter.vocab_size:,} where {old:,} rows are stored")
    plan.same_tokens = True


def _describe_rows(rows: list[Row], old: int) -> list[str]:
    moved = sum(isinstance(row, int) and row != i for i, row in enumerate(rows))
    means = sum(isinstance(row, tuple) for row in rows)
    new = sum(row is None for row in rows)
    lines = [f"{moved:,} rows moved, so that ids mean the same tokens"] if moved else []
    if new:
        lines.append(f"{new:,} rows added ({old:,} to {len(rows):,}): the mean of the others, which never comes first")
    if means:
        lines.append(f"{means:,} rows made of those of the drafter's tokens that write the same")
    if dropped := old - len({row for row in rows if isinstance(row, int)}):
        lines.append(f"{dropped:,} rows without a token of the target dropped")
    return lines


def _plan_positions(plan: Repairs, target: Side, drafter: Side) -> None:
    if drafter.window is not None and drafter.window < (target.limit or 0):
        plan.left.append(f"its sliding window of {drafter.window:,} tokens is part of how it attends")
    wanted, has = target.positions, drafter.positions
    if wanted is None or has is None or has >= wanted:
        return
    if drafter.rotary is None:
        plan.left.append(
            f"its {has:,} positions are not rotary: learned, one by one, there can be no more without training"
        )
    elif drafter.rotary not in _KEEPS_ITS_FREQUENCIES:
        plan.left.append(f"rotary positions of type {drafter.rotary!r} change with max_position_embeddings: not raised")
    else:
        plan.positions = wanted
        plan.done.append(
            f"max_position_embeddings: {has:,} to {wanted:,}, as positions are rotary; how well it drafts beyond "
            f"{has:,} is not known"
        )


def _write(plan: Repairs, target: Side, drafter: Side, weights: Path, folder: Path) -> None:
    if plan.rows is None:
        copy_files(weights, folder, (WEIGHTS, "model.safetensors.index.json", "config.json"))
    else:
        _write_weights(plan.rows, drafter, weights, folder)
    for one in dict.fromkeys((weights, drafter.folder)):  # a merged adapter's come before those of its model
        copy_files(one, folder, KEPT_FILES)
    if plan.rows is not None:
        _move_vocabulary(plan.rows, plan.proposed, drafter, folder)
    copy_files(target.folder if plan.same_tokens else weights, folder, TOKENIZER_FILES)
    patch_tokenizer(folder)
    patch_model(folder)
    _write_settings(plan, target, drafter, folder)


def _write_weights(rows: list[Row], drafter: Side, weights: Path, folder: Path) -> None:
    """The model anew, with its rows moved."""
    config = load_config(weights)
    if drafter.rows is not None:
        config.get_text_config(decoder=True).vocab_size = drafter.rows  # what is stored, whatever it says
    model = load_language_model(weights, config=config, dtype="auto")
    _move_rows(model, rows, drafter)
    model.save_pretrained(folder)


def _move_rows(model: Any, rows: list[Row], drafter: Side) -> None:
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = layers[0].weight is layers[1].weight
    old = [(layer.weight.detach().clone(), getattr(layer, "bias", None)) for layer in layers]
    size = len(old[0][0])
    used = sorted({number for number in drafter.vocab.values() if number < size}) or list(range(size))
    written: list[Row] = [row if tied or isinstance(row, int) else None for row in rows]
    with torch.no_grad():
        model.resize_token_embeddings(len(rows), mean_resizing=False)
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
        for layer, (weight_VD, bias_V), wanted in zip(layers, old, (rows, written), strict=True):
            layer.weight.copy_(arranged(weight_VD, wanted, used))
            if bias_V is not None:
                layer.bias.copy_(arranged(bias_V.detach(), written, used))


def _move_vocabulary(rows: list[Row], proposed: list[int] | None, drafter: Side, folder: Path) -> None:
    """The same in the file of a draft vocabulary, of which there is one from now on if not every token is proposed."""
    old = drafter.rows or drafter.vocab_size
    found = read_vocabulary(folder, old)
    if TOKENS in found and proposed is None:
        kept = set(found[TOKENS].tolist())
        proposed = [i for i, row in enumerate(rows) if row in kept]
    if proposed is not None:
        found[TOKENS] = torch.tensor(proposed)
    if OUTER in found:
        found[OUTER] = arranged(found[OUTER], rows, range(old))
    write_vocabulary(found, folder)


def arranged(old_VX: Tensor, rows: Sequence[Row], used: Sequence[int]) -> Tensor:
    """Rows in another order; one of several is their mean, a new one the mean of those `used`, which have a token.

    As a row of the output layer, the mean gives the mean of the other logits: never the largest, and at most a V-th of
    the probability. (A row of zeros gives 0, the largest where all others are negative; and no row without a bias is
    below the others for every hidden state.) Where there is a bias [V], it settles the matter.
    """
    is_bias = old_VX.dim() == 1
    added = old_VX.new_tensor(NEVER) if is_bias else old_VX[torch.tensor(used)].double().mean(0).to(old_VX.dtype)
    indices = torch.tensor([row if isinstance(row, int) else -1 for row in rows])
    new_VX = old_VX[indices.clamp(min=0)]
    new_VX[indices < 0] = added
    for i, row in enumerate(rows):
        if isinstance(row, tuple):
            new_VX[i] = old_VX[list(row)].double().mean(0).to(old_VX.dtype)
    return new_VX


def _write_settings(plan: Repairs, target: Side, drafter: Side, folder: Path) -> None:
    """config.json and generation_config.json."""
    path = folder / "config.json"
    whole = read_json(path)
    config = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    settings = generation_settings(drafter.generation)
    settings |= {name: value for name, value in ASSISTANT.items() if settings.get(name) is None}
    if plan.positions is not None:
        config["max_position_embeddings"] = plan.positions
    if plan.same_tokens:
        config["vocab_size"] = len(plan.rows) if plan.rows is not None else drafter.rows or drafter.vocab_size
        starts = ("decoder_start_token_id",) if drafter.config.is_encoder_decoder else ()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", *starts):
            config[name] = getattr(target.config, name, None)
            settings[name] = getattr(target.generation, name, None)
    write_settings(path, whole)
    write_settings(folder / "generation_config.json", settings)


def _manifest_of(plan: Repairs, target: Side, drafter: Side, *, is_merged: bool) -> dict[str, Any]:
    """What the repaired drafter's manifest says of it: what the drafter's own did, if it is an artifact."""
    known, size = drafter.manifest, drafter.rows or drafter.vocab_size
    fingerprint = None if drafter.tokenizer is None else tokenizer_fingerprint(drafter.tokenizer)
    about: dict[str, Any] = {"kind": "drafter", "recipe": {}, "data": {}, "training": {"repaired_from": drafter.source}}
    about |= {"shapes": {"vocab_size": size, "model_type": drafter.config.model_type}}
    about["target"] = target_record(target.source)
    if known is not None:
        size, fingerprint = known.vocab_size, known.tokenizer_fingerprint
        # an adapter's shapes count the adapter's parameters
        about |= {name: getattr(known, name) for name in about if name != "shapes" or not is_merged}
        about["evaluation"] = None if plan.rows is not None else known.evaluation  # measured on other rows
    if plan.same_tokens:
        size, fingerprint = target.rows or target.vocab_size, tokenizer_fingerprint(target.tokenizer)
        about["shapes"] = about["shapes"] | ({"vocab_size": size} if "vocab_size" in about["shapes"] else {})
    if plan.proposed is not None:
        about["shapes"] = about["shapes"] | {"proposed_tokens": len(plan.proposed)}
    about["training"] = about["training"] | {"repairs": plan.done}
    return about | {"vocab_size": size, "tokenizer_fingerprint": fingerprint}
