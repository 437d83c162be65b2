"""The file beside the weights of a drafter that proposes some tokens only; the weights are those of all tokens.

Letters: R tokens that are proposed, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..storage.messages import first_line
from ..storage.names import DRAFT_VOCABULARY
from ..storage.safe_read import UNREADABLE

_TOKENS = "d2t"


def check_tokens(ids_R: Tensor, vocab: int) -> None:
    """Raises ValueError: ids that do not rise, or of which a vocabulary lacks some."""
    whole = ids_R.dim() == 1 and not ids_R.is_floating_point() and len(ids_R) > 0
    if not whole or int(ids_R[0]) < 0 or int(ids_R[-1]) >= vocab or not bool((ids_R.diff() > 0).all()):
        raise ValueError(f"tokens of a draft vocabulary must rise from 0 or more to less than {vocab}")


def write_vocabulary(ids_R: Tensor, folder: Path) -> None:
    """Say in a drafter's folder that it proposes these tokens alone."""
    save_file({_TOKENS: ids_R.cpu()}, folder / DRAFT_VOCABULARY)


def read_vocabulary(folder: Path, vocab: int) -> Tensor | None:
    """The ids that the drafter in a folder proposes, int64 [R], rising; None: all. Raises ValueError: not such a file,
    or one for fewer tokens than `vocab`."""
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    try:
        found = load_file(path)
        if set(found) != {_TOKENS}:
            raise ValueError(f"it holds {', '.join(sorted(found))}, expected one list of tokens, {_TOKENS}")
        check_tokens(found[_TOKENS], vocab)
    except (ValueError, *UNREADABLE) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    return found[_TOKENS].long()
