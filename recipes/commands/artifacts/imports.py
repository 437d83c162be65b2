"""Conversion of published drafters and prediction heads to artifacts, and of GGUF files to model directories."""

import glob
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....checkpoints.artifact.artifact import check_new, save_artifact
from ....checkpoints.artifact.compat import patch_model, patch_tokenizer
from ....checkpoints.artifact.locate import fetch, find_folder
from ....checkpoints.artifact.model_ref import resolve_model, target_record, tokenizer_fingerprint
from ....checkpoints.heads.auxiliary import AuxiliaryHeads
from ....checkpoints.heads.dflash import DFlashHeads, save_dflash
from ....checkpoints.heads.dspark import DSparkHeads
from ....checkpoints.heads.eagle import save_eagle
from ....checkpoints.heads.files import save_heads
from ....checkpoints.heads.layouts import StoredHeads, holds_heads, read_heads, shards_of_heads
from ....checkpoints.heads.published import MASK_EMBEDDING, published_kind, read_auxiliary
from ....checkpoints.hub.push_pull import pull
from ....checkpoints.pairs.checks import check_pair
from ....checkpoints.pairs.sides import WEIGHTS, read_model_info
from ....checkpoints.storage.atomic import atomic_dir
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
from ....checkpoints.storage.places import find_local, parse_hub_id
from ....checkpoints.storage.safe_read import copy_files, read_json
from ....checkpoints.verify import model_files
from ....checkpoints.verify.model_files import UNLOADABLE, base_of, is_adapter, load_config, read_tensor
from ....data.tokenizers import load_tokenizer
from ....decode.models.loading import load_model
from ...session.terminal import bar, log
from ...session.typed import typed_command

_SMALL = ("generation_config.json", *TOKENIZER_FILES, "LICENSE*", "NOTICE*")
_FETCHED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_SHAPES = ("num_heads", "num_layers", "hidden_size", "vocab_size", "projection_kind", "rank", "states")
_PICKLED = "pytorch_model*.bin"


def import_published(
    source: str,
    out: Path,
    target: str | None = None,
    *,
    unpickle: bool = False,
    states: str | None = None,
    dtype: str | None = None,
) -> None:
    """Import a directory or hub id as an artifact, or a GGUF file as a model.

    An artifact on the hub is downloaded unchanged. Other drafters and prediction heads are converted to artifacts.

    Args:
        source: Directory, hub id or GGUF file.
        out: Output directory, which must not exist or must be empty.
        target: Target of the drafter or the heads.
        unpickle: Whether to load pickled weights; only tensors are loaded from them.
        states: Hidden states that Medusa heads use as input: `after-norm` or `before-norm`.
        dtype: Data type of the model weights if `source` is a GGUF file (default: `auto`, see `convert_gguf`).
    """
    check_new(out)
    if is_gguf(source):
        if target is not None:
            raise ValueError(f"--target {target} does not apply to the GGUF file {source}: remove the option")
        import_gguf(gguf_file(source), out, dtype or "auto")
        return
    if dtype is not None:
        raise ValueError(f"--dtype {dtype} applies only to GGUF files, not to {source}: remove the option")
    folder = find_folder(source, [MANIFEST_FILE, CONFIG_FILE, ADAPTER_CONFIG, "*.index.json", HEADS_FILE])
    if find_local(source) is None and (folder / MANIFEST_FILE).is_file():
        manifest, commit = pull(source, out)
        log(f"import: wrote {out}: the {manifest.role} of {source} at {commit}, {len(manifest.files)} verified files")
        return
    is_model = _may_be_model(folder) and not published_kind(folder) and not holds_heads(folder)
    if is_model:
        folder = find_folder(source, [*_FETCHED, *([_PICKLED] if unpickle else [])])
        is_model = not holds_heads(folder)
    if not is_model:
        import_heads(source, out, target, unpickle=unpickle, states=states)
        return
    if states is not None:
        raise ValueError(f"--states applies only to Medusa heads, but {source} is a model: remove the option")
    import_drafter(source, folder, out, target, unpickle=unpickle)


def import_gguf(file: Path, out: Path, dtype: str = "auto") -> None:
    """Convert a GGUF file to a model directory; see `convert_gguf` for the values of `dtype`."""
    with atomic_dir(out) as folder, bar(f"reading {file.name}", "tensors") as advance:
        convert_gguf(file, folder, dtype, advance)
        patch_model(folder)
        patch_tokenizer(folder)
    log(f"model: wrote {out}")


def _may_be_model(folder: Path) -> bool:
    """Check if a directory contains a LoRA adapter, or the configuration of a model without Medusa heads."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return is_adapter(folder)
    config = read_json(path)
    is_heads = config.get("model_type") == "medusa" or {"medusa_num_heads", "num_medusa_heads"} & set(config)
    return "model_type" in config and not is_heads


def import_drafter(source: str, folder: Path, out: Path, target: str | None, *, unpickle: bool = False) -> None:
    """Convert a model or a LoRA adapter in `folder` to a drafter artifact. An adapter is merged into its base model.

    `source` is its name in messages and in the manifest. The other arguments are as in `import_published`.

    Raises ValueError if `target` is None, if the source is an artifact, or if drafter and target are incompatible.
    """
    check_new(out)
    if target is None:
        raise ValueError(f"the target of {source} is missing: pass --target")
    if (folder / MANIFEST_FILE).is_file():
        raise ValueError(f"{source} is already an artifact: use it without importing it")
    target_model = read_model_info(target, load_tokenizer)
    with _whole_model(source, folder, unpickle=unpickle) as whole:
        drafter = read_model_info(str(whole), load_tokenizer)
        fix = shlex.join(["draftsmith", "doctor", target, source, "--fix", "OUT"])
        check_pair(target_model, drafter, ("draftsmith",), source, fix)
        fingerprint = None if drafter.tokenizer is None else tokenizer_fingerprint(drafter.tokenizer)
        size = drafter.rows or drafter.vocab_size
        files = (CONFIG_FILE, WEIGHTS, "model.safetensors.index.json", *_SMALL)
        save_artifact(
            out,
            kind="drafter",
            write=lambda folder: copy_files(whole, folder, files),
            vocab_size=size,
            tokenizer_fingerprint=fingerprint,
            target=_record_target(target),
            shapes={"vocab_size": size, "model_type": drafter.config.model_type},
            training={"imported_from": source},
            command=typed_command(),
        )
    log(f"drafter: wrote {out}")


@contextmanager
def _whole_model(source: str, folder: Path, *, unpickle: bool) -> Iterator[Path]:
    """Yield a directory with the complete model as safetensors (temporary for adapters and pickled weights)."""
    if not is_adapter(folder) and any(folder.glob(WEIGHTS)):
        yield folder
        return
    with TemporaryDirectory(prefix="draftsmith-") as temporary:
        whole = Path(temporary)
        if is_adapter(folder):
            base = base_of(folder)
            log(f"merging the LoRA adapter {source} into {base}")
            load_model(str(folder)).save_pretrained(whole)
            copy_files(find_folder(base, _SMALL), whole, _SMALL)
        elif not unpickle:
            raise ValueError(f"{source} has no safetensors weights ({WEIGHTS}): pass --unpickle to load pickled files")
        else:
            config, safe = load_config(folder), {"weights_only": True, "trust_remote_code": False}
            try:
                kind = model_files.model_class(config)
                model_files.load_whole(kind, folder, config=config, dtype="auto", **safe).save_pretrained(whole)
            except UNLOADABLE as error:
                reason = model_files.reason(str(folder), error)
                raise ValueError(f"no language model could be loaded from {source}: {reason}") from error
        copy_files(folder, whole, _SMALL)  # the tokenizer of an adapter replaces that of its base model
        yield whole


def import_heads(
    source: str, out: Path, target: str | None = None, *, unpickle: bool = False, states: str | None = None
) -> None:
    """Convert published prediction heads to an artifact (see `layouts.read_heads` and `read_published`).

    If a directory contains both Medusa heads and the complete target, `target` is optional.
    """
    check_new(out)
    folder = find_folder(source, [CONFIG_FILE])
    if published_kind(folder):
        _import_auxiliary(source, folder, out, target, states, unpickle=unpickle)
        return
    stored = read_heads(_heads_folder(source, unpickle), unpickle=unpickle, states=states)
    log(
        f"{source}: {stored.num_heads} heads of {stored.num_layers} blocks in {stored.path.name}; "
        f"projection {stored.projection}, hidden size {stored.hidden_size:,}, states {stored.states}"
    )
    for disagreement in stored.disagreements:
        log(f"warning: {disagreement}")
    if target is None and not stored.whole_model:
        named = f" (their config names {stored.base_model!r})" if stored.base_model else ""
        raise ValueError(f"the target of the heads in {source} is missing: pass --target{named}")
    target = target or source  # Medusa-2: the source contains the target that was trained jointly with the heads
    vocab_size = _check_target(target, stored)
    heads = stored.build(vocab_size)
    shapes = {name: getattr(heads, name) for name in _SHAPES}
    training = {"imported_from": source, "imported_file": stored.path.name}
    _save_as_heads(out, lambda folder: save_heads(heads, folder, target), target, shapes, training)
    log(f"heads: wrote {out}, for {target}")


def _import_auxiliary(
    source: str, folder: Path, out: Path, target: str | None, states: str | None, *, unpickle: bool
) -> None:
    """Convert EAGLE-3 heads, a DFlash or a DSpark drafter to an artifact, the former two also from `speculators`."""
    names = {"dflash": "the DFlash drafter", "dspark": "the DSpark drafter", "eagle3": "the EAGLE-3 heads"}
    what = names[published_kind(folder) or ""]
    if target is None:
        raise ValueError(f"the target of {what} in {source} is missing: pass --target")
    if states is not None:
        raise ValueError(f"--states applies only to Medusa heads, but {source} has {what[4:]}: remove the option")
    files = [CONFIG_FILE, WHOLE_FILES[0], MASK_EMBEDDING, *([PICKLED_WHOLE_FILES[0]] if unpickle else [])]
    config = load_config(target).get_text_config(decoder=True)
    embedding_VD = read_tensor(target, "model.embed_tokens.weight")
    heads = read_auxiliary(find_folder(source, files), config, embedding_VD, unpickle=unpickle)
    save_auxiliary(heads, out, target, {"imported_from": source})
    log(f"heads: wrote {out} for layers {', '.join(map(str, heads.layers))}; check them with `draftsmith doctor`")


def save_auxiliary(heads: AuxiliaryHeads, out: Path, target: str, training: dict[str, Any]) -> None:
    """Write EAGLE-3 heads, a DFlash or a DSpark drafter as an artifact; `training` describes their origin."""
    shapes = {name: getattr(heads, name) for name in ("hidden_size", "vocab_size", "projection_kind", "states")}
    shapes["architecture"] = "eagle3"
    write: Callable[[Path], None] = partial(save_eagle, heads)  # type: ignore[arg-type]
    if isinstance(heads, DFlashHeads):
        kind = "dspark" if isinstance(heads, DSparkHeads) else "dflash"
        shapes |= {"architecture": kind, "num_heads": heads.num_heads, **heads.facts}
        write = partial(save_dflash, heads)
    if heads.proposed is not None:
        shapes["proposed_tokens"] = len(heads.proposed)
    _save_as_heads(out, write, target, shapes, training)


def _save_as_heads(
    out: Path, write: Callable[[Path], None], target: str, shapes: dict[str, Any], training: dict[str, Any]
) -> None:
    save_artifact(
        out,
        kind="heads",
        write=write,
        vocab_size=shapes["vocab_size"],
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(target)),
        target=_record_target(target),
        shapes=shapes,
        training=training,
        command=typed_command(),
    )


def _record_target(target: str) -> dict[str, str | None]:
    """Return the manifest entry of a target, including a hash of the weights if they are in a local directory."""
    is_here = any(Path(target).glob(WEIGHTS))
    return target_record(target, resolve_model(target).sha256 if is_here else None)


def _check_target(target: str, stored: StoredHeads) -> int:
    """Return the vocabulary size of a target; raise ValueError if the heads do not fit the target."""
    config = load_config(target)
    if config.is_encoder_decoder:
        raise ValueError(f"heads require a decoder, but the target {target} is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    sizes = {"hidden_size": stored.hidden_size}
    # heads without their own projection use the target's vocabulary, regardless of their config
    if stored.projection != "target" and stored.vocab_size is not None:
        sizes["vocab_size"] = stored.vocab_size
    for name, size in sizes.items():
        if (expected := getattr(text, name, None)) != size:
            raise ValueError(f"{name} of the heads in {stored.path} is {size}, but the target {target} has {expected}")
    return int(text.vocab_size)


def _heads_folder(source: str, unpickle: bool) -> Path:
    """Return the local directory of prediction heads, after downloading their files from the hub if necessary."""
    path = find_local(source)
    if path is not None:
        return path
    repo, revision = parse_hub_id(source)
    index, whole = WHOLE_FILES[1], WHOLE_FILES[0]
    folder = fetch(repo, [CONFIG_FILE, HEADS_FILE, index, *([PICKLED_FILE] if unpickle else [])], revision)
    if not any((folder / name).is_file() for name in (HEADS_FILE, PICKLED_FILE)):
        shards = list(shards_of_heads(folder / index)) if (folder / index).is_file() else []
        folder = fetch(repo, [glob.escape(shard) for shard in shards] or [whole], revision)
        if not any((folder / name).is_file() for name in (whole, index)):
            raise ValueError(f"{source} has no safetensors heads on the hub: pass --unpickle to load {PICKLED_FILE}")
    return folder
