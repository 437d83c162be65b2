"""Repair of drafters whose vocabulary differs from the target's, by moving, adding or dropping vocabulary rows.

Shape letters: V vocabulary, X any shape.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.artifact import save_artifact, verify_artifact
from ..artifact.compat import patch_model, patch_tokenizer
from ..artifact.locate import find_folder
from ..artifact.model_ref import target_record, tokenizer_fingerprint
from ..storage.names import DRAFT_VOCABULARY, MANIFEST_FILE, TOKENIZER_FILES
from ..storage.safe_read import copy_files, read_json
from ..verify.model_files import base_of, is_adapter, load_config, load_language_model, with_adapter
from .sides import ModelInfo
from .speculation import write_settings

NEVER = -1e4
"""Bias of output rows that have no token, for models with an output bias."""
_LICENCES = ("LICENSE*", "NOTICE*")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def repair(target: ModelInfo, drafter: ModelInfo, out: Path, command: str) -> list[str]:
    """Convert a drafter to the target's tokenizer and vocabulary, and write the result to `out` as an artifact.

    All tokens of the drafter must be in the target's vocabulary. `command` is the command line to store in the
    manifest. Returns descriptions of the changes.

    Raises ValueError if the drafter cannot be converted or `out` is not empty.
    """
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not empty: choose another --fix")
    if (drafter.folder / DRAFT_VOCABULARY).is_file():
        raise ValueError(f"{drafter.source} has a draft vocabulary: use `draftsmith export --to transformers`")
    if drafter.manifest is not None:
        verify_artifact(drafter.folder)
    rows, used, old = _match_rows(target, drafter)
    moved = sum(row not in (None, number) for number, row in enumerate(rows))
    copied = sum(row is not None for row in rows)
    done = [f"{moved:,} rows moved, {len(rows) - copied:,} added, {old - copied:,} dropped", "the target's tokenizer"]

    def write(folder: Path) -> None:
        model = _load_model(drafter, old)
        _move_rows(model, rows, used)
        model.save_pretrained(folder)
        copy_files(target.folder, folder, TOKENIZER_FILES)
        origin = base_of(drafter.folder) if is_adapter(drafter.folder) else drafter.source
        copy_files(find_folder(origin, _LICENCES), folder, _LICENCES)
        _write_ids(target, drafter, folder)
        patch_tokenizer(folder)
        patch_model(folder)

    training: dict[str, Any] = dict(drafter.manifest.training) if drafter.manifest else {}
    save_artifact(
        out,
        kind="drafter",
        write=write,
        vocab_size=len(rows),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        target=target_record(target.source),
        shapes={"vocab_size": len(rows), "model_type": drafter.config.model_type},
        recipe=drafter.manifest.recipe if drafter.manifest else {},
        data=drafter.manifest.data if drafter.manifest else {},
        training=training | {"repaired_from": drafter.source, "repairs": done},
        command=command,
    )
    return done


def _load_model(drafter: ModelInfo, rows: int) -> Any:
    if is_adapter(drafter.folder):
        return with_adapter(drafter.folder, partial(load_language_model, dtype="auto"))
    config = load_config(drafter.source)
    config.get_text_config(decoder=True).vocab_size = rows  # the stored size, which may contradict the configuration
    return load_language_model(drafter.source, config=config, dtype="auto")


def _match_rows(target: ModelInfo, drafter: ModelInfo) -> tuple[list[int | None], list[int], int]:
    """Return the drafter's row (or None) for each target row, its rows that have a token, and its number of rows."""
    if target.tokenizer is None or drafter.tokenizer is None:
        raise ValueError(f"{target.source} and {drafter.source} must both have a tokenizer for matching rows")
    made_with = drafter.manifest.tokenizer_fingerprint if drafter.manifest else None
    if made_with not in (None, tokenizer_fingerprint(drafter.tokenizer)):
        raise ValueError(f"{drafter.folder / MANIFEST_FILE} has the fingerprint of a different tokenizer")
    target_ids, drafter_ids = target.vocab, drafter.vocab
    if unknown := drafter_ids.keys() - target_ids.keys():
        some = ", ".join(map(repr, sorted(unknown)[:3]))
        raise ValueError(
            f"{len(unknown):,} tokens of {drafter.source} are missing from the target's vocabulary ({some}): train it "
            "with the target's tokenizer, or decode with `speculative`, which re-encodes drafts as text"
        )
    old = drafter.rows or drafter.vocab_size
    moves = {target_ids[text]: number for text, number in drafter_ids.items() if number < old}
    used = set(drafter_ids.values())
    size = target.rows or target.vocab_size
    rows = [moves.get(number, number if number < old and number not in used else None) for number in range(size)]
    return rows, sorted(number for number in used if number < old), old


def _move_rows(model: Any, rows: Sequence[int | None], used: Sequence[int]) -> None:
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    old = [(layer.weight.detach().clone(), getattr(layer, "bias", None)) for layer in layers]
    with torch.no_grad():
        model.resize_token_embeddings(len(rows), mean_resizing=False)
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
        for layer, (weight_VD, bias_V) in zip(layers, old, strict=True):
            layer.weight.copy_(arrange_rows(weight_VD, rows, used))
            if bias_V is not None:
                layer.bias.copy_(arrange_rows(bias_V.detach(), rows, used))


def arrange_rows(old_VX: Tensor, rows: Sequence[int | None], used: Sequence[int]) -> Tensor:
    """Reorder the rows of a weight or bias. New rows (None) are the mean of the rows in `used`, which have a token.

    In an output layer, the logit of a mean row is the mean of the other logits, so it is never the largest. A zero row
    would have the largest logit if all others were negative. New entries of a bias are `NEVER` (−10⁴).
    """
    is_bias = old_VX.dim() == 1
    added = old_VX.new_tensor(NEVER) if is_bias else old_VX[torch.tensor(used)].double().mean(0).to(old_VX.dtype)
    indices = torch.tensor([-1 if row is None else row for row in rows])
    new_VX = old_VX[indices.clamp(min=0)]
    new_VX[indices < 0] = added
    return new_VX


def _write_ids(target: ModelInfo, drafter: ModelInfo, folder: Path) -> None:
    """Set the special token ids of `config.json` and `generation_config.json` to the target's."""
    starts = ("decoder_start_token_id",) if drafter.config.is_encoder_decoder else ()
    for name, settings in (("config.json", target.config), ("generation_config.json", target.generation)):
        values = read_json(folder / name) if (folder / name).is_file() else {}
        inner = values["text_config"] if isinstance(values.get("text_config"), dict) else values
        inner.update({key: getattr(settings, key, None) for key in (*_IDS, *starts)})
        write_settings(folder / name, values)
