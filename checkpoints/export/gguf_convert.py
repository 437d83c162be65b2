"""llama.cpp's converter as a process of its own, with answers to what it would not find.

    python -P -m draftsmith.checkpoints.export.gguf_convert CONVERTER NAME SETTINGS ARGUMENTS…

NAME, if not empty, is how a tokenizer splits text (`tokenizer.ggml.pre`) that the converter does not know: it looks up
what a byte-level BPE makes of one text among published models. SETTINGS is a JSON object: what the converter asks of a
configuration, and transformers 5 has under another name.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
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


def main() -> None:
    path, name, settings, *arguments = sys.argv[1:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))  # as for a script: the converter has modules beside it
    converter = importlib.import_module(Path(path).stem)
    base = getattr(converter, "ModelBase", None)  # an old converter has other classes, and is left as it is
    if base is not None and name:
        _give_name(base, name)
    if base is not None and json.loads(settings):
        load = base.load_hparams
        base.load_hparams = staticmethod(lambda *asked: json.loads(settings) | load(*asked))
    converter.main()


if __name__ == "__main__":
    main()
