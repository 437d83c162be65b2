"""Trees of messages, as OpenAssistant's: of each the path along the best answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .files import Row

FLAT = ("message_id", "parent_id", "role", "text", "rank", "deleted")
"""Columns of a tree whose messages are rows: a first one without a parent, then those below it."""


def is_flat(value: Any) -> bool:
    """Whether a row is one message of a tree."""
    return isinstance(value, Mapping) and set(FLAT[:4]) <= value.keys()


def best_path(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Messages from the first one down: of the replies to each that with the lowest rank, without ranks the first."""
    path, replies = [root], root.get("replies")
    while isinstance(replies, list) and (left := [one for one in replies if isinstance(one, Mapping)]):
        path.append(min(left, key=lambda one: one["rank"] if isinstance(one.get("rank"), int | float) else math.inf))
        replies = path[-1].get("replies")
    return path


def assembled(rows: Iterable[Row]) -> Iterator[Row]:
    """One row a tree: its first message's, with `replies` in the messages; deleted ones are left out with theirs.
    Raises ValueError: a message whose parent does not stand before it in the same tree."""
    tree: list[Row] = []
    replies: dict[Any, list[Any]] = {}
    for row in rows:
        if not is_flat(row.value):
            raise ValueError(f"{row.location}: expected {', '.join(FLAT[:4])}, as in the rows before")
        message, parent = {**row.value, "replies": []}, row.value["parent_id"]
        if parent is None:
            yield from tree
            tree, replies = [Row(message, row.location, row.name, row.number)], {}
        elif parent not in replies:
            raise ValueError(
                f"{row.location}: parent_id {parent} is no message_id of the {len(replies)} messages before it in its "
                "tree; a tree's messages must stand together, parents first"
            )
        elif not message.get("deleted"):
            replies[parent].append(message)
        replies[row.value["message_id"]] = message["replies"]
    yield from tree
