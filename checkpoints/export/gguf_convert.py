"""Wrapper around llama.cpp's converter that supplies the pre-tokenizer and missing configuration values.

    python -P -m draftsmith.checkpoints.export.gguf_convert CONVERTER NAME SETTINGS ARGUMENTS…

NAME is the pre-tokenizer (`tokenizer.ggml.pre`) for tokenizers that the converter does not recognise by its hashes of
published models, or an empty string. SETTINGS is a JSON object of configuration values that the converter expects and
transformers 5 stores under another name.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def _set_pre_tokenizer_name(base: Any, name: str) -> None:
    model = getattr(sys.modules[base.__module__], "TextModel", None)
    ask = getattr(model, "get_vocab_base_pre", None)
    if model is None or ask is None:
        return

    def name_pre_tokenizer(self: Any, tokenizer: Any) -> Any:
        try:
            return ask(self, tokenizer)
        except NotImplementedError:
            return name

    model.get_vocab_base_pre = name_pre_tokenizer


def main() -> None:
    """Run the converter with the command-line arguments."""
    path, name, settings, *arguments = sys.argv[1:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))  # the converter imports modules from its folder
    converter = importlib.import_module(Path(path).stem)
    base = getattr(converter, "ModelBase", None)  # old converters have different classes and are not patched
    if base is not None and name:
        _set_pre_tokenizer_name(base, name)
    if base is not None and json.loads(settings):
        load = base.load_hparams
        base.load_hparams = staticmethod(lambda *arguments: json.loads(settings) | load(*arguments))
    converter.main()


if __name__ == "__main__":
    main()
