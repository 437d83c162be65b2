"""Prediction heads that others have published, made an artifact: read, compared with their target, written."""

from __future__ import annotations

import glob
from pathlib import Path

from ....checkpoints.artifact.artifact import save_artifact
from ....checkpoints.artifact.locate import fetch, find_folder
from ....checkpoints.artifact.model_ref import record_target, tokenizer_fingerprint
from ....checkpoints.heads.eagle import save_eagle
from ....checkpoints.heads.files import save_heads
from ....checkpoints.heads.layouts import StoredHeads, read_heads, shards_of_heads
from ....checkpoints.heads.published import is_published_eagle, read_published
from ....checkpoints.storage.atomic import check_writable
from ....checkpoints.storage.names import CONFIG_FILE, HEADS_FILE, PICKLED_FILE, PICKLED_WHOLE_FILES, WHOLE_FILES
from ....checkpoints.storage.places import here, hub_place
from ....checkpoints.verify.model_files import load_config, read_tensor
from ....data.tokenizers import load_tokenizer
from ...session.terminal import log
from ...session.typed import typed_command

_SHAPES = ("num_heads", "num_layers", "hidden_size", "vocab_size", "projection_kind", "rank", "states")


def import_heads(
    source: str, out: Path, target: str | None = None, *, unpickle: bool = False, states: str | None = None
) -> None:
    """Write an artifact of kind heads from published ones (folder or hub id), which are for `target`, by default the
    whole model that they lie beside; see `layouts.read_heads`."""
    check_new(out)
    if is_published_eagle(find_folder(source, [CONFIG_FILE])):
        _import_eagle(source, out, target, states, unpickle=unpickle)
        return
    stored = read_heads(_folder(source, unpickle), unpickle=unpickle, states=states)
    log(_description(source, stored))
    for disagreement in stored.disagreements:
        log(f"warning: {disagreement}")
    target = _choose_target(source, target, stored)
    vocab_size = _check_target(target, stored)
    heads = stored.build(vocab_size)
    save_artifact(
        out,
        kind="heads",
        write=lambda folder: save_heads(heads, folder, target),
        vocab_size=vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(target)),
        target=record_target(target),
        shapes={name: getattr(heads, name) for name in _SHAPES},
        training={"imported_from": source, "imported_file": stored.path.name},
        command=typed_command(),
    )
    log(f"heads: wrote {out}")


def _import_eagle(source: str, out: Path, target: str | None, states: str | None, *, unpickle: bool) -> None:
    """EAGLE-3 heads, plain or of speculators, in the form that all engines read alike."""
    if target is None:
        raise ValueError(f"say with --target which model the EAGLE-3 heads in {source} are for")
    if states is not None:
        raise ValueError(f"--states is for Medusa's heads, and {source} holds EAGLE-3's, which read inner layers")
    wanted = [CONFIG_FILE, WHOLE_FILES[0], *([PICKLED_WHOLE_FILES[0]] if unpickle else [])]
    config = load_config(target).get_text_config(decoder=True)
    embedding_VD = read_tensor(target, "model.embed_tokens.weight")
    heads = read_published(find_folder(source, wanted), config, embedding_VD, unpickle=unpickle)
    shapes = {name: getattr(heads, name) for name in ("hidden_size", "vocab_size", "projection_kind", "states")}
    shapes["architecture"] = "eagle3"
    if heads.proposed is not None:
        shapes["proposed_tokens"] = len(heads.proposed)
    save_artifact(
        out,
        kind="heads",
        write=lambda folder: save_eagle(heads, folder),
        vocab_size=heads.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(target)),
        target=record_target(target),
        shapes=shapes,
        training={"imported_from": source},
        command=typed_command(),
    )
    log(f"heads: wrote {out}, which read layers {', '.join(map(str, heads.layers))}; `draftsmith doctor` has the rest")


def check_new(out: Path) -> None:
    """ValueError where something lies at `out` already, or nothing can be written."""
    check_writable(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already and not empty: choose another --out")


def _choose_target(source: str, target: str | None, stored: StoredHeads) -> str:
    """The model that the heads are for."""
    if not stored.whole_model:
        if target is None:
            named = f"; their config names {stored.base_model!r}" if stored.base_model else ""
            raise ValueError(f"say with --target which model the heads in {source} are for{named}")
        return target
    log(
        f"{source} holds a whole model beside these heads: if it was trained together with them (Medusa-2), they "
        "belong to it, and not to the model that it was made from"
    )
    if target not in (None, source):
        log(f"warning: --target {target} is not that model; the heads may be worth less with it")
    return target or source


def _description(source: str, stored: StoredHeads) -> str:
    where = f"{'inside the whole model' if stored.inside else 'in'} {stored.path.name}"
    return (
        f"{source}: {stored.num_heads} heads, {stored.num_layers} blocks in each, {where}; "
        f"projection {stored.projection}, hidden size {stored.hidden_size:,}, states {stored.states}"
    )


def _check_target(target: str, stored: StoredHeads) -> int:
    """The target's vocabulary size; ValueError where a size differs, or the target cannot be read."""
    config = load_config(target)
    if config.is_encoder_decoder:
        raise ValueError(f"the target {target} is an encoder-decoder; heads are for decoders")
    text = config.get_text_config(decoder=True)
    sizes = {"hidden_size": stored.hidden_size}
    # without a projection of their own, the heads' vocabulary is the target's, whatever their config says
    if stored.projection != "target" and stored.vocab_size is not None:
        sizes["vocab_size"] = stored.vocab_size
    for name, size in sizes.items():
        if getattr(text, name, None) != size:
            theirs = getattr(text, name, None)
            raise ValueError(f"{name} of the heads in {stored.path} is {size}, of the target {target} {theirs}")
    return int(text.vocab_size)


def _folder(source: str, unpickle: bool) -> Path:
    """The local folder; or that of a hub id, of which no more is fetched than what holds the heads."""
    path = here(source)
    if path is not None:
        return path
    repo, revision = hub_place(source)
    folder = fetch(repo, [CONFIG_FILE, HEADS_FILE, WHOLE_FILES[1], PICKLED_WHOLE_FILES[1]], revision)
    if not (folder / HEADS_FILE).is_file() and unpickle:
        folder = fetch(repo, [PICKLED_FILE], revision)
    known = [HEADS_FILE, *([PICKLED_FILE] if unpickle else [])]
    for whole, index in (WHOLE_FILES, PICKLED_WHOLE_FILES) if unpickle else (WHOLE_FILES,):
        if not any((folder / name).is_file() for name in known):
            shards = list(shards_of_heads(folder / index)) if (folder / index).is_file() else []
            folder = fetch(repo, [glob.escape(shard) for shard in shards] or [whole], revision)
        known += [whole, index]
    if not unpickle and not any((folder / name).is_file() for name in known):
        raise ValueError(f"{source} on the hub holds no heads in safetensors; pickled ones are read with --unpickle")
    return folder
