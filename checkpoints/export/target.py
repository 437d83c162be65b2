"""What an export asks of the target that it is served with: its name, configuration, tokenizer, output projection.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..artifact.fingerprints import model_fingerprint
from ..artifact.locate import at_revision
from ..heads.layouts import read_heads
from ..pairs.checks import examine
from ..pairs.sides import REFUSED, open_side
from ..storage.messages import first_line
from ..verify.model_files import names_of_embeddings, read_tensors
from .base import ExportOptions, Source


def target_name(source: Source, options: ExportOptions) -> str | None:
    """Folder or hub id of the target: the user's choice, else the one in the manifest, if it names one."""
    if options.target:
        return options.target
    known = source.manifest.target or {}
    at = f"@{known['revision']}" if known.get("revision") else ""
    return f"{known['id']}{at}" if known.get("id") else None


def needed_target(source: Source, options: ExportOptions, why: str) -> str:
    """The same, where there is no doing without it.

    Raises:
        ValueError: neither the user nor the manifest names one; `why` says what for.
    """
    name = target_name(source, options)
    if name is None:
        raise ValueError(f"{source.folder} does not name its target, and {why}: say which it is with --target")
    return name


def heads_target_name(source: Source, options: ExportOptions) -> str:
    """The target's name, under which engines look for it when they are given heads.

    Raises:
        ValueError: neither the user, nor the manifest, nor the heads' own config names one.
    """
    named = target_name(source, options) or read_heads(source.folder).base_model
    return named or needed_target(source, options, "engines look for its name in the heads' config")


def check_target_of(source: Source, target: str) -> None:
    """ValueError where the weights at `target` are not those that the artifact was made for, as far as both are known.

    For exports that take weights from the target.
    """
    target = at_revision(target)
    made_for = (source.manifest.target or {}).get("fingerprint")
    if made_for is None or not any(Path(target).glob("model*.safetensors")):
        return
    found = model_fingerprint(Path(target))
    if found != made_for:
        raise ValueError(
            f"{source.folder} was made for a model with the fingerprint {made_for[:16]}…, and that of {target} is "
            f"{found[:16]}…: name the right one with --target"
        )


def target_config(target: str) -> Any:
    """The configuration of a target's text model.

    Raises:
        ValueError: there is none to be read.
    """
    try:
        place = at_revision(target, weights=False)
        return AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_unreadable("configuration", target, error)) from error


def check_vocabulary(source: Source, target: str) -> None:
    """ValueError where the artifact's vocabulary has another size than the target's."""
    theirs = target_config(target).vocab_size
    if theirs != source.manifest.vocab_size:
        raise ValueError(
            f"{source.folder} has a vocabulary of {source.manifest.vocab_size} tokens, the target {target} of {theirs}"
            f"{_doctor(source, target)}"
        )


def check_pair(
    source: Source, folder: Path, target: str, consumers: Collection[str], also: Collection[str] = ()
) -> None:
    """Compare a written drafter with its target as `draftsmith doctor` does.

    Args:
        folder: the drafter as it was written.
        consumers: of `pairs.CONSUMERS`, those who shall accept the two.
        also: checks that shall find nothing, whatever the consumers make of it.

    Raises:
        ValueError: a target that cannot be read; what one of the consumers refuses, with both sides.
    """
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
            f"{_doctor(source, target).removeprefix('; ')}"
        )


def _doctor(source: Source, target: str) -> str:
    command = shlex.join(["draftsmith", "doctor", target, str(source.folder), "--fix"])
    return f"; `{command}` says all that differs, and repairs what can be"


def load_tokenizer(place: str) -> Any:
    """The tokenizer in a folder or of a hub id; ValueError where it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(_unreadable("tokenizer", place, error)) from error


def output_projection(target: str) -> Tensor:
    """The target's output projection [V, D] as its files have it; nothing else of them is read.

    Raises:
        ValueError: a configuration that cannot be read, or no safetensors files that hold it.
    """
    config = target_config(target)
    try:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError) as error:
        raise ValueError(_unreadable("model", target, error)) from error
    name = names_of_embeddings(outline)[1]
    try:
        found = read_tensors(at_revision(target), [name], f"{outline.base_model_prefix}.")
    except ValueError as error:
        raise ValueError(_unreadable("output projection", target, error)) from error
    if found is None:
        raise ValueError(f"the output projection of the target {target}, {name}, is in no safetensors file of it")
    return found[name]


def _unreadable(what: str, target: str, error: Exception) -> str:
    return f"the {what} of {target} cannot be read: {first_line(error)}; name the target's folder with --target"
