"""What an export asks of the target that it is served with: its configuration, a fitting vocabulary, its projection.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from ..artifact.locate import model_source
from ..artifact.model_ref import resolve_model
from ..pairs.checks import examine
from ..pairs.sides import REFUSED, open_side
from ..storage.messages import first_line
from ..verify.model_files import UNLOADABLE, load_config, meta_model, names_of_embeddings, read_tensor
from .base import ExportOptions, Source, target_name
from .tokenizer import load_tokenizer


def needed_target(source: Source, options: ExportOptions, why: str) -> str:
    """The target's name; ValueError where neither the user nor the manifest gives one: `why` says what for."""
    name = target_name(source, options)
    if name is None:
        raise ValueError(f"{source.folder} does not name its target, and {why}: say which it is with --target")
    return name


def check_vocabulary(source: Source, target: str) -> None:
    """ValueError where the artifact's vocabulary has another size than the target's."""
    theirs = load_config(target).get_text_config(decoder=True).vocab_size
    if theirs != source.manifest.vocab_size:
        raise ValueError(
            f"{source.folder} has a vocabulary of {source.manifest.vocab_size} tokens, the target {target} of "
            f"{theirs}; {_doctor(source, target)}"
        )


def check_pair(
    source: Source, folder: Path, target: str, consumers: Collection[str], also: Collection[str] = ()
) -> None:
    """Compare a drafter, as it was written to `folder`, with its target as `draftsmith doctor` does: those `consumers`
    of `pairs.sides.CONSUMERS` shall accept the two, and the checks `also` find nothing. Raises ValueError: a target
    that cannot be read; what is refused, with both sides."""
    findings = examine(open_side(target, load_tokenizer), open_side(str(folder), load_tokenizer)).findings
    refused = []
    for found in findings:
        effects = [found.effects[name] for name in consumers if name in found.effects]
        if found.check in also or any(effect.outcome == REFUSED for effect in effects):
            reasons = dict.fromkeys(effect.reason for effect in effects)
            both = f"target: {found.target}; drafter: {found.drafter}"
            refused.append(f"{found.check}: {found.what} ({both}): {'; '.join(reasons)}")
    if refused:
        listed = "\n- ".join(refused)
        raise ValueError(
            f"{source.folder} is no pair with the target {target} for {', '.join(consumers)}:\n- {listed}\n"
            f"{_doctor(source, target)}"
        )


def _doctor(source: Source, target: str) -> str:
    command = shlex.join(["draftsmith", "doctor", target, str(source.folder), "--fix"])
    return f"`{command}` says all that differs, and repairs what can be"


def output_projection(target: str, source: Source | None = None) -> Tensor:
    """The target's output projection [V, D] as its files have it; nothing else of them is read. Raises ValueError:
    another target than the one that the artifact `source` was made for; no configuration, or no safetensors files that
    hold it."""
    folder = model_source(target)
    wanted = ((source.manifest.target if source else None) or {}).get("sha256")
    if source is not None and wanted is not None and any(Path(folder).glob("model*.safetensors")):
        found = resolve_model(target, folder).sha256 or ""
        if found != wanted:
            raise ValueError(f"{source.folder} was made for {wanted[:16]}…, {target} is {found[:16]}…: see --target")
    config = load_config(target).get_text_config(decoder=True)
    try:
        model = meta_model(config)
        name = names_of_embeddings(model)[1]
        weight_VD = read_tensor(folder, name, f"{model.base_model_prefix}.")
    except UNLOADABLE as error:
        raise ValueError(f"the output projection of {target} cannot be read: {first_line(error)}") from error
    if weight_VD is None:
        raise ValueError(f"the output projection of the target {target}, {name}, is in no safetensors file of it")
    return weight_VD
