"""llama.cpp's converter as a process of its own, with answers to what it would not find.

    python -P -m draftsmith.checkpoints.export.gguf_convert CONVERTER NAME SETTINGS ARGUMENTS…

NAME, if not empty, is how a tokenizer splits text (`tokenizer.ggml.pre`) that the converter does not know. It asks what
a byte-level BPE makes of one text, and looks the ids up among those of published models: one of one's own is not there.

SETTINGS is a JSON object: what the converter asks of a configuration, and transformers 5 has under another name.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def _give_name(base: Any, name: str) -> None:
    model = getattr(sys.modules[base.__module__], "TextModel", None)
    ask = getattr(model, "get_vocab_base_pre", None)
    if model is None or ask is None:
        return

    def known_or_given(self: Any, tokenizer: Any) -> Any:
        try:
            return ask(self, tokenizer)
        except NotImplementedError:
            return name

    model.get_vocab_base_pre = known_or_given


def _give_settings(base: Any, settings: dict[str, Any]) -> None:
    load = base.load_hparams
    base.load_hparams = staticmethod(lambda *asked: settings | load(*asked))


def _answer(converter: ModuleType, name: str, settings: dict[str, Any]) -> None:
    """An old converter has other classes than these: it is left as it is, and says itself what it does not find."""
    base = getattr(converter, "ModelBase", None)
    if base is not None and name:
        _give_name(base, name)
    if base is not None and settings:
        _give_settings(base, settings)


def main() -> None:
    path, name, settings, *arguments = sys.argv[1:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))  # as for a script: the converter has modules beside it
    converter = importlib.import_module(Path(path).stem)
    _answer(converter, name, json.loads(settings))
    converter.main()


if __name__ == "__main__":
    main()
