"""Datastore for suffix decoding: a suffix array over documents that finds the continuations of a context.

Shape letters: T tokens of all documents, N positions in them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ..storage.messages import first_line
from ..storage.safe_read import UNREADABLE

TEXTS_FILE = "texts.safetensors"
CONTEXT = 8
"""Maximum length of a match in tokens. Positions are sorted by this number of preceding tokens."""
_BETWEEN = -1
Ids = NDArray[np.int32]


class TextStore:
    """Datastore of concatenated documents with a suffix array: positions sorted by the preceding tokens.

    Args:
        ids_T: Token ids, int32, with −1 as the separator of documents, and `CONTEXT` separators at both ends.
        places_N: Sorted positions, int32, of all tokens with a preceding token in the same document.
    """

    def __init__(self, ids_T: Ids, places_N: Ids) -> None:
        self.ids_T, self.places_N = ids_T, places_N

    @classmethod
    def from_documents(cls, documents: Iterable[NDArray[np.int32]]) -> Self:
        """Build the datastore from tokenized documents."""
        parts = [np.full(CONTEXT, _BETWEEN, dtype=np.int32)]
        for ids in documents:
            parts += [ids.astype(np.int32), np.array([_BETWEEN], dtype=np.int32)]
        ids_T = np.concatenate([*parts, parts[0]])
        held_T = ids_T >= 0
        places_N = np.flatnonzero(held_T[1:] & held_T[:-1]).astype(np.int32) + 1
        before = [ids_T[places_N - back] for back in range(CONTEXT, 0, -1)]
        return cls(ids_T, places_N[np.lexsort(before)])

    def matches(self, context: Sequence[int] | NDArray[Any]) -> tuple[int, Ids]:
        """Find the longest suffix of `context` in the documents. Return its length and the positions after matches."""
        low, high, length = 0, len(self.places_N), 0
        for back in range(1, 1 + min(CONTEXT, len(context))):
            token = context[-back]
            first = self._bisect(low, high, back, token)
            last = self._bisect(first, high, back, token + 1)
            if first == last:
                break
            low, high, length = first, last, back
        return length, self.places_N[low:high] if length else self.places_N[:0]

    def _bisect(self, low: int, high: int, back: int, token: int) -> int:
        """Return the first i in [low, high) for which the token at `places_N[i] - back` is at least `token`."""
        ids_T, places_N = self.ids_T, self.places_N
        while low < high:
            middle = (low + high) // 2
            if ids_T[places_N[middle] - back] < token:
                low = middle + 1
            else:
                high = middle
        return low

    def save(self, directory: Path) -> None:
        """Write the datastore to a directory."""
        save_file({"ids": self.ids_T, "places": self.places_N}, Path(directory) / TEXTS_FILE)

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> Self | None:
        """Load the datastore from a directory; None if there is none. Raises ValueError if the file is invalid."""
        path = Path(directory) / TEXTS_FILE
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
            ids_T, places_N = tensors["ids"], tensors["places"]
        except (KeyError, *UNREADABLE) as error:
            raise ValueError(f"{path} is not a datastore: {first_line(error)}") from error
        ranges = (("ids", ids_T, _BETWEEN, vocab_size - 1), ("places", places_N, CONTEXT, len(ids_T) - 1 - CONTEXT))
        for name, array, least, most in ranges:
            if array.dtype != np.int32 or array.ndim != 1:
                raise ValueError(f"{path}: {name} must be one dimension of int32")
            if len(array) and not (least <= int(array.min()) and int(array.max()) <= most):
                raise ValueError(f"{path}: {name} must be between {least} and {most}, got {array.min()}, {array.max()}")
        return cls(ids_T, places_N)
