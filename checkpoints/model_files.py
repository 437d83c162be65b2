"""Some tensors of a model, read from its files without the rest of it.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file


def names_of_embeddings(outline: PreTrainedModel) -> tuple[str, str, str | None]:
    """Names of a model's token embeddings, output projection (the same where they are tied) and its bias.

    Args:
        outline: the model, with or without weights.
    """
    head = outline.get_output_embeddings()
    wanted = (outline.get_input_embeddings().weight, head.weight, getattr(head, "bias", None))
    names = [next((name for name, one in outline.named_parameters() if one is weight), None) for weight in wanted]
    assert names[0] is not None
    assert names[1] is not None
    return names[0], names[1], names[2]


def read_tensors(source: str, names: Collection[str]) -> dict[str, Tensor] | None:
    """Some tensors of a model's safetensors files; None where they are not there under these names, as numbers.

    Args:
        source: a folder, or a hub id, of which only the files with these tensors are fetched.
    """
    wanted, found = set(names), dict[str, Tensor]()
    try:
        for path in _weight_files(source, wanted):
            with safe_open(path, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118 (not a dictionary)
                    if stored in wanted:
                        found[stored] = opened.get_tensor(stored)
    except (OSError, ValueError, SafetensorError):
        return None
    complete = set(found) == wanted and all(tensor.is_floating_point() for tensor in found.values())
    return found if complete else None


def _weight_files(source: str, names: set[str]) -> Iterator[str]:
    """The safetensors files, local or fetched, that hold these tensors; none where the model has no such files."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(source, "model.safetensors.index.json", **quiet)
    if index is not None:
        places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({places[name] for name in names if name in places})
        yield from (path for shard in shards if (path := cached_file(source, shard, **quiet)) is not None)
        return
    whole = cached_file(source, "model.safetensors", **quiet)
    if whole is not None:
        yield whole
