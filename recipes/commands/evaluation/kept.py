"""Work of a command by name, each done once: what a journal holds is not done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ...session.stopping import Stoppable
from .journal import Journal

Found = TypeVar("Found")


class Kept:
    """Does work, or finds what an earlier process made of it; ends before work where a signal has come. Raises
    ValueError: a line of the journal that has another form."""

    def __init__(self, journal: Journal, signals: Stoppable) -> None:
        self._journal, self._signals = journal, signals
        lines = journal.parsed(TypeAdapter(tuple[str, Any]))
        self._found = {name: (number, value) for number, (name, value) in enumerate(lines, 2)}

    def __call__(self, name: str, form: TypeAdapter[Found], work: Callable[[], Found]) -> Found:
        """What the work of this name gives, of this form."""
        if name in self:
            return self.known(name, form)
        self._signals.check()
        found = work()
        self.add(name, form, found)
        return found

    def each(self, name: str, form: TypeAdapter[Found]) -> Callable[[int, Callable[[], Found]], Found]:
        """The same of works with numbers."""
        return lambda number, work: self(f"{name} {number}", form, work)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def known(self, name: str, form: TypeAdapter[Found]) -> Found:
        """What an earlier process found."""
        number, value = self._found[name]
        try:
            return form.validate_python(value)
        except ValidationError as error:
            raise self._journal.damaged(number, "it has another form") from error

    def add(self, name: str, form: TypeAdapter[Found], found: Found) -> None:
        """Keep what was found."""
        self._journal.add([name, form.dump_python(found, mode="json")])
