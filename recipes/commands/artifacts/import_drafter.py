"""A drafter that was made elsewhere, made an artifact: compared with its target, copied or converted, written; and a
GGUF file, made a model folder that everything here, and transformers, can load."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....checkpoints.artifact.artifact import save_artifact
from ....checkpoints.artifact.compat import patch_model, patch_tokenizer, read_config
from ....checkpoints.artifact.locate import find_folder
from ....checkpoints.artifact.model_ref import record_target, tokenizer_fingerprint
from ....checkpoints.heads.layouts import holds_heads
from ....checkpoints.heads.published import is_published_eagle
from ....checkpoints.pairs.checks import examine
from ....checkpoints.pairs.sides import REFUSED, WEIGHTS, Side, open_side
from ....checkpoints.storage.atomic import atomic_dir
from ....checkpoints.storage.gguf import convert_gguf, gguf_file, is_gguf
from ....checkpoints.storage.names import CONFIG_FILE, HEADS_FILE, MANIFEST_FILE, TOKENIZER_FILES
from ....checkpoints.storage.places import here
from ....checkpoints.storage.safe_read import UNPICKLE, copy_files
from ....checkpoints.verify.model_files import (
    ADAPTER_CONFIG,
    UNLOADABLE,
    base_of,
    is_adapter,
    load_config,
    load_whole,
    model_class,
    reason,
)
from ....checkpoints.verify.tensors import adapter_faults
from ....data.tokenizers import load_tokenizer
from ....decode.models.loading import load_model
from ...session.terminal import log
from ...session.typed import typed_command
from .import_heads import check_new, import_heads

_SMALL = ("generation_config.json", *TOKENIZER_FILES, "LICENSE*", "NOTICE*")
_FETCHED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
PICKLED = "pytorch_model*.bin"


def import_published(
    source: str, out: Path, target: str | None = None, *, unpickle: bool = False, states: str | None = None
) -> None:
    """Write an artifact of a drafter or of prediction heads, by what lies in a folder or in a repository of the hub; of
    a GGUF file a plain model."""
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
    from ....checkpoints.hub.push_pull import pull

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
    config = read_config(path)
    is_heads = config.get("model_type") == "medusa" or {"medusa_num_heads", "num_medusa_heads"} & set(config)
    return "model_type" in config and not is_heads


def import_drafter(source: str, folder: Path, out: Path, target: str | None, *, unpickle: bool = False) -> None:
    """Write an artifact of kind drafter from the folder of a model, called `source`, or of a LoRA adapter, merged into
    its model; with `unpickle` also of pickled weights, of which only tensors are loaded. Raises ValueError: no
    target; an artifact already; what differs where the two are no pair."""
    if target is None:
        raise ValueError(f"say with --target which model {source} drafts for")
    check_new(out)
    if (folder / MANIFEST_FILE).is_file():
        merged = f"; `{_typed('export', source, '--to', 'transformers')}` merges it" if is_adapter(folder) else ""
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
        return load_whole(model_class(config), folder, config=config, dtype="auto", **safe)
    except UNLOADABLE as error:
        raise ValueError(f"no language model could be loaded from {source}: {reason(str(folder), error)}") from error


def _check_pair(target: Side, drafter: Side, source: str, unpickled: bool) -> None:
    """ValueError where this engine would not decode with the two; what it minds less is logged."""
    fix = _typed("doctor", target.source, source, "--fix", "OUT")
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


def _typed(*words: str) -> str:
    return shlex.join(["draftsmith", *words])
