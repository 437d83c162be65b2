"""The memory of this process that no file backs, sampled; imports nothing of ours, for environments without it."""

from __future__ import annotations

import threading
from typing import Self

from children import kilobytes


class Anonymous:
    """The largest `RssAnon` while it is open: what files back, such as weights and hidden states that are mapped, the
    system may drop."""

    before_mb = peak_mb = 0.0

    def __enter__(self) -> Self:
        self.before_mb = kilobytes("RssAnon") / 1e3
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak_mb = max(self.peak_mb, kilobytes("RssAnon") / 1e3)
