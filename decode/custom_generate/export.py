"""Heads or a table exported as one file for this engine inside transformers' `generate`.

Letters: V vocabulary, D hidden, X some states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoints.export.base import ExportOptions, Format, Source
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.table.table import BigramTable
from ..models.loading import load_model
from .method import CustomGenerate, method
from .saved import write_method

_STATES = 16
_PROMPTS, _PROMPT, _NEW = 3, 8, 32


def _method_of(source: Source, options: ExportOptions) -> CustomGenerate:
    if source.manifest.kind == "heads":
        return method("medusa", heads=source.folder)
    gamma: dict[str, Any] = {} if options.speculative_tokens is None else {"gamma": options.speculative_tokens}
    return method("bigram", table=source.folder, **gamma)


def _write(source: Source, folder: Path, options: ExportOptions) -> None:
    write_method(_method_of(source, options).stored(), folder)


def _compare_heads(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    mine, theirs = _method_of(source, options), CustomGenerate.from_pretrained(folder)
    assert isinstance(mine.heads, PredictionHeads)
    assert isinstance(theirs.heads, PredictionHeads)
    known, found = mine.heads.state_dict(), theirs.heads.state_dict()
    sizes = ("num_heads", "num_layers", "hidden_size", "projection_kind", "rank", "states", "scale")
    same = all(getattr(mine.heads, name) == getattr(theirs.heads, name) for name in sizes)
    if not same or list(known) != list(found) or not all(torch.equal(known[name], found[name]) for name in known):
        raise ValueError(f"the heads read back from {folder} differ from those of {source.folder}")
    generator = torch.Generator().manual_seed(0)
    dtype, hidden = next(iter(known.values())).dtype, mine.heads.hidden_size
    if mine.heads.projection_kind == "target":
        weight_VD = torch.randn(source.manifest.vocab_size, hidden, generator=generator).to(dtype)
        for heads in (mine.heads, theirs.heads):
            heads.attach(weight_VD)
    hidden_XD = torch.randn(_STATES, hidden, generator=generator).to(dtype)
    with torch.inference_mode():
        if not torch.equal(mine.heads(hidden_XD), theirs.heads(hidden_XD)):
            raise ValueError(f"logits of the heads read back from {folder} differ from those of {source.folder}")
    found_equal = [f"all {len(known)} tensors of the heads, and their logits of {_STATES} hidden states"]
    return [*found_equal, *_same_text(mine, theirs, options)]


def _compare_table(source: Source, folder: Path, options: ExportOptions) -> list[str]:
    mine, theirs = _method_of(source, options), CustomGenerate.from_pretrained(folder)
    known, found = mine.table, theirs.table
    assert isinstance(known, BigramTable)
    assert isinstance(found, BigramTable)
    names = ("row_ptr", "col", "count", "unigram")
    same = all(torch.equal(getattr(known, name), getattr(found, name)) for name in names)
    same = same and torch.equal(known.left_counts(), found.left_counts())
    same = same and torch.equal(known.right_counts(), found.right_counts()) and known.pruning == found.pruning
    if not same or theirs.options != mine.options:
        raise ValueError(f"the table read back from {folder} differs from that of {source.folder}")
    tokens_V = torch.arange(known.vocab_size)
    drafts = [table.distributions("cpu", mine.options["prior"]).most_likely(tokens_V) for table in (known, found)]
    if not torch.equal(*drafts):
        raise ValueError(f"drafts from {folder} differ from those of {source.folder}")
    found_equal = [f"all {known.entries:,} counts, and the likeliest token after each of {known.vocab_size:,} tokens"]
    return [*found_equal, *_same_text(mine, theirs, options)]


def _same_text(mine: CustomGenerate, theirs: CustomGenerate, options: ExportOptions) -> list[str]:
    """Greedy text of both and of the target alone, where `--target` is a folder."""
    if options.target is None or not Path(options.target).is_dir():
        return []
    target = load_model(options.target)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.config.get_text_config().vocab_size, (_PROMPTS, _PROMPT), generator=generator)
    asked: dict[str, Any] = {"inputs": prompts, "attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
    asked |= {"max_new_tokens": _NEW, "do_sample": False, "num_beams": 1}
    texts = [target.generate(**asked, custom_generate=one).tolist() for one in (mine, theirs, None)]
    if texts[0] != texts[1]:
        raise ValueError(f"greedy text of {options.target} differs between the artifact and its export")
    plain = sum(one == other for one, other in zip(texts[1], texts[2], strict=True))
    return [f"greedy text of {options.target} after {_PROMPTS} prompts; {plain} of them as without the export"]


_READERS = "draftsmith, inside generate of transformers ≥ 5.17"
ATTACHED_FORMATS = (
    Format(
        name="custom-generate",
        kind="heads",
        summary="Heads with the method medusa, for `generate(custom_generate=…)`",
        readers=_READERS,
        write=_write,
        compare=_compare_heads,
        options=("target",),
    ),
    Format(
        name="custom-generate-bigrams",
        kind="table",
        summary="A table with the method bigram, for `generate(custom_generate=…)`",
        readers=_READERS,
        write=_write,
        compare=_compare_table,
        options=("target", "speculative_tokens"),
    ),
)
