"""TensorRT-LLM's Medusa converter over a folder of heads, on a machine without TensorRT.

Its `examples/medusa/convert_checkpoint.py` is run as it is, on a command line, with those of its own modules that need
no TensorRT (`REAL`). For all others, and for `datasets`, a stand-in takes any name and does nothing; of `_utils` the
two conversions of types are written out.

Arguments: a checkout of TensorRT-LLM, then those of the converter.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

REAL = ("tensorrt_llm.mapping", "tensorrt_llm.models.convert_utils", "tensorrt_llm.models.medusa.weight")
STOOD_IN = ("tensorrt", "tensorrt_llm", "datasets")


class StandIn(ModuleType):
    """A module that has everything."""

    __path__ = ()  # a package
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {
            "str_dtype_to_torch": lambda dtype: getattr(torch, dtype),
            "numpy_to_torch": torch.from_numpy,
        }
        return known.get(name, MagicMock(name=name))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds real modules in the checkout, and stand-ins for the others."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        place = self.source / (name.replace(".", "/") + ".py")
        if name in REAL and place.is_file():
            return importlib.util.spec_from_file_location(name, place)
        if name.partition(".")[0] in STOOD_IN:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    import safetensors.torch  # noqa: F401 (the converter uses it, and imports only `safetensors`)
    import transformers.models.llama.modeling_llama  # noqa: F401 (before there are stand-ins)

    source = Path(sys.argv[1])
    sys.meta_path.insert(0, Finder(source))
    sys.argv = ["convert_checkpoint.py", *sys.argv[2:]]
    runpy.run_path(str(source / "examples" / "medusa" / "convert_checkpoint.py"), run_name="__main__")


if __name__ == "__main__":
    main()
