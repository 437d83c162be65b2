"""Import of drafters and prediction heads that were made elsewhere, as artifacts, and of GGUF files as models."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....checkpoints.artifact.artifact import save_artifact
from ....checkpoints.artifact.compat import patch_model, patch_tokenizer
from ....checkpoints.artifact.locate import fetch, find_folder
from ....checkpoints.artifact.model_ref import record_target, tokenizer_fingerprint
from ....checkpoints.heads.eagle import save_eagle
from ....checkpoints.heads.files import save_heads
from ....checkpoints.heads.layouts import StoredHeads, holds_heads, read_heads, shards_of_heads
from ....checkpoints.heads.published import is_published_eagle, read_published
from ....checkpoints.hub.push_pull import pull
from ....checkpoints.pairs.checks import examine
from ....checkpoints.pairs.sides import REFUSED, WEIGHTS, Side, open_side
from ....checkpoints.storage.atomic import atomic_dir, check_writable
from ....checkpoints.storage.gguf import convert_gguf, gguf_file, is_gguf
from ....checkpoints.storage.names import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    HEADS_FILE,
    MANIFEST_FILE,
    PICKLED_FILE,
    PICKLED_WHOLE_FILES,
    TOKENIZER_FILES,
    WHOLE_FILES,
)
from ....checkpoints.storage.places import here, hub_place
from ....checkpoints.storage.safe_read import UNPICKLE, copy_files, read_json
from ....checkpoints.verify import model_files
from ....checkpoints.verify.inspect import adapter_faults
from ....checkpoints.verify.model_files import UNLOADABLE, base_of, is_adapter, load_config, read_tensor
from ....data.tokenizers import load_tokenizer
from ....decode.models.loading import load_model
from ...session.terminal import log
from ...session.typed import typed_command

_SMALL = ("generation_config.json", *TOKENIZER_FILES, "LICENSE*", "NOTICE*")
_FETCHED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_SHAPES = ("num_heads", "num_layers", "hidden_size", "vocab_size", "projection_kind", "rank", "states")
PICKLED = "pytorch_model*.bin"


def check_new(out: Path) -> None:
    """ValueError where something lies at `out` already, or nothing can be written."""
    check_writable(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already and not empty: choose another --out")


def import_published(
    source: str, out: Path, target: str | None = None, *, unpickle: bool = False, states: str | None = None
) -> None:
    """Import a folder or hub id as a drafter or heads, an artifact unchanged, and a GGUF file as a model."""
    if is_gguf(source):
        import_gguf(gguf_file(source), out, target)
        return
    folder = find_folder(source, [MANIFEST_FILE, CONFIG_FILE, ADAPTER_CONFIG, "*.index.json", HEADS_FILE])
    if here(source) is None and (folder / MANIFEST_FILE).is_file():
        _import_artifact(source, out)
        return
    is_model = _may_be_model(folder) and not is_published_eagle(folder) and not holds_heads(folder, unpickle=unpickle)
    if is_model:
        folder = find_folder(source, [*_FETCHED, *([PICKLED] if unpickle else [])])
        is_model = not holds_heads(folder, unpickle=unpickle)
    if not is_model:
        import_heads(source, out, target, unpickle=unpickle, states=states)
        return
    if states is not None:
        raise ValueError(f"--states is for heads, and {source} holds a model")
    import_drafter(source, folder, out, target, unpickle=unpickle)


def _import_artifact(source: str, out: Path) -> None:
    """Download an artifact from the hub and check the hash of every file."""
    manifest, commit, is_new = pull(source, out)
    total = sum(entry["bytes"] for entry in manifest.files.values())
    done = "wrote" if is_new else "nothing to do, there is"
    log(f"import: {done} {out}: the {manifest.role} of {source} at {commit}")
    log(f"import: {len(manifest.files)} files, {total:,} bytes, each with the hash that its {MANIFEST_FILE} says")


def import_gguf(file: Path, out: Path, target: str | None = None) -> None:
    """Write the model of a GGUF file to a new folder, in float32, as a plain model that is for no `target`."""
    if target is not None:
        raise ValueError(f"--target {target}: {file} becomes a plain model folder, which is for no other model")
    check_new(out)
    with atomic_dir(out) as folder:
        convert_gguf(file, folder)
        patch_model(folder)
        patch_tokenizer(folder)
    log(f"model: wrote {out}")


def _may_be_model(folder: Path) -> bool:
    """Whether a folder has the configuration of a model or an adapter, which says nothing of heads."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return is_adapter(folder)
    config = read_json(path)
    is_heads = config.get("model_type") == "medusa" or {"medusa_num_heads", "num_medusa_heads"} & set(config)
    return "model_type" in config and not is_heads


def import_drafter(source: str, folder: Path, out: Path, target: str | None, *, unpickle: bool = False) -> None:
    """Write an artifact of kind drafter from a model or a LoRA adapter, which is merged.

    Args:
        source: Name of the model in messages and in the manifest.
        folder: Folder of its files.
        out: Folder to write.
        target: Target that it drafts for.
        unpickle: Whether to read pickled weights, of which only tensors are loaded.

    Raises:
        ValueError: No target is named, the source is an artifact already, or the two are not a pair.
    """
    if target is None:
        raise ValueError(f"say with --target which model {source} drafts for")
    check_new(out)
    if (folder / MANIFEST_FILE).is_file():
        merged = (
            f"; `{shlex.join(['draftsmith', 'export', source, '--to', 'transformers'])}` merges it"
            if is_adapter(folder)
            else ""
        )
        raise ValueError(f"{source} is an artifact already, and used as it is{merged}")
    mine = open_side(target, load_tokenizer)
    with whole_model(source, folder, unpickle=unpickle) as whole:
        theirs = open_side(str(whole), load_tokenizer)
        _check_pair(mine, theirs, source, unpickle and not is_adapter(folder) and whole != folder)
        _save(whole, out, mine, theirs, source)
    log(f"drafter: wrote {out}")


@contextmanager
def whole_model(source: str, folder: Path, *, unpickle: bool = False) -> Iterator[Path]:
    """The folder of a model in safetensors: this one, or a temporary one with an adapter merged or pickles converted.
    Raises ValueError: no weights, pickled ones without `unpickle`, an adapter that does not fit."""
    if not is_adapter(folder) and any(folder.glob(WEIGHTS)):
        yield folder
        return
    with TemporaryDirectory(prefix="draftsmith-") as place:
        whole = Path(place)
        if is_adapter(folder):
            if faults := adapter_faults(folder):
                raise ValueError("; ".join(faults))
            base = base_of(folder)
            log(f"{source} is a LoRA adapter: it is merged into its model, {base}")
            load_model(str(folder)).save_pretrained(whole)
            copy_files(find_folder(base, _SMALL), whole, _SMALL)
        else:
            if not unpickle:
                raise ValueError(f"{source} has no safetensors weights ({WEIGHTS}); pickled ones need --unpickle")
            _unpickled(source, folder).save_pretrained(whole)
        copy_files(folder, whole, _SMALL)  # an adapter's own tokenizer comes before its model's
        yield whole


def _unpickled(source: str, folder: Path) -> Any:
    """The model of pickled weights, of which only tensors are loaded."""
    config = load_config(folder)
    safe = {"weights_only": True, "trust_remote_code": False}
    try:
        return model_files.load_whole(model_files.model_class(config), folder, config=config, dtype="auto", **safe)
    except UNLOADABLE as error:
        raise ValueError(
            f"no language model could be loaded from {source}: {model_files.reason(str(folder), error)}"
        ) from error


def _check_pair(target: Side, drafter: Side, source: str, unpickled: bool) -> None:
    """ValueError where this engine would not decode with the two; what it minds less is logged."""
    fix = shlex.join(["draftsmith", "doctor", target.source, source, "--fix", "OUT"])
    fix = f"{UNPICKLE}=1 {fix}" if unpickled else fix
    refused = []
    for finding in examine(target, drafter).findings:
        effect = finding.effects.get("draftsmith")
        line = f"{finding.check}: {finding.what} (target: {finding.target}; drafter: {finding.drafter})"
        if finding.check == "weights" and finding.drafter == "–":
            continue  # the target's: it need not be loaded for this
        if effect is not None and effect.outcome == REFUSED:
            refused.append(line)
        elif effect is not None:
            log(f"drafter: {line}; {effect.reason}")
    mine, theirs = _fingerprint(target), _fingerprint(drafter)
    if None not in (mine, theirs) and mine != theirs:
        refused.append("tokenizer: the drafter's has another fingerprint, and an artifact is for one tokenizer alone")
    if refused:
        listed = "\n- ".join(refused)
        raise ValueError(
            f"{source} is no pair with the target {target.source}:\n- {listed}\n"
            f"`{fix}` repairs what can be, and writes an artifact of it"
        )


def _fingerprint(side: Side) -> str | None:
    return None if side.tokenizer is None else tokenizer_fingerprint(side.tokenizer)


def _save(whole: Path, out: Path, target: Side, drafter: Side, source: str) -> None:
    files = (CONFIG_FILE, WEIGHTS, "model.safetensors.index.json", *_SMALL)
    size = drafter.rows or drafter.vocab_size
    save_artifact(
        out,
        kind="drafter",
        write=lambda folder: copy_files(whole, folder, files),
        vocab_size=size,
        tokenizer_fingerprint=_fingerprint(drafter),
        target=record_target(target.source),
        shapes={"vocab_size": size, "model_type": drafter.config.model_type},
        training={"imported_from": source},
        command=typed_command(),
    )


def import_heads(
    source: str, out: Path, target: str | None = None, *, unpickle: bool = False, states: str | None = None
) -> None:
    """Write an artifact of kind heads from published ones (see `layouts.read_heads`).

    The target is by default the whole model in the same folder.
    """
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
