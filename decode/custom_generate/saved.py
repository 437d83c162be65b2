"""Saved methods: `custom_generate.json` names the method, its options and parts, which lie in folders beside it.

`custom_generate/generate.py` is what transformers runs for `generate(custom_generate=FOLDER, trust_remote_code=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ... import __version__
from ...checkpoints.artifact.artifact import verify_artifact
from ...checkpoints.heads.files import PredictionHeads, save_heads
from ...checkpoints.storage.names import MANIFEST_FILE
from ...checkpoints.storage.safe_read import read_json
from ...checkpoints.table.table import BigramTable

SETTINGS_FILE = "custom_generate.json"
CODE_FOLDER = "custom_generate"
_GENERATE = '''"""Decode with the method that custom_generate.json in the parent folder names."""

from draftsmith.decode.custom_generate.method import generate_attached


def generate(inputs=None, *, model, **asked):
    """Run the saved method for `generate(custom_generate=FOLDER, trust_remote_code=True)`."""
    return generate_attached(model, inputs, **asked)
'''
_FIELDS = {"method": str, "options": dict, "parts": list, "drafters": list}


def write_method(
    folder: Path,
    name: str,
    options: dict[str, Any],
    drafters: Sequence[PreTrainedModel | str],
    heads: Any,
    table: BigramTable | None,
) -> None:
    """Write a method to an empty folder. Drafters are models, which are written too, or ids on the hub.

    Raises:
        ValueError: Heads other than `PredictionHeads`; a drafter with adapters.
    """
    named: list[dict[str, str]] = []
    for number, drafter in enumerate(drafters, 1):
        if isinstance(drafter, str):
            named.append({"id": drafter})
            continue
        if getattr(drafter, "_hf_peft_config_loaded", False):
            raise ValueError("the drafter has adapters, which would be saved without it: merge them into its weights")
        drafter.save_pretrained(folder / f"drafter-{number}")
        named.append({"folder": f"drafter-{number}"})
    heads = getattr(heads, "_orig_mod", heads)  # of torch.compile
    if heads is not None:
        if not isinstance(heads, PredictionHeads):
            raise ValueError(f"heads of type {type(heads).__name__} cannot be saved, only PredictionHeads can")
        save_heads(heads, folder / "heads", "")
    if table is not None:
        (folder / "table").mkdir()
        table.save(folder / "table")
    (folder / CODE_FOLDER).mkdir()
    (folder / CODE_FOLDER / "generate.py").write_text(_GENERATE, encoding="utf-8")
    (folder / CODE_FOLDER / "requirements.txt").write_text(f"draftsmith>={__version__}\n", encoding="utf-8")
    parts = [part for part, value in (("heads", heads), ("table", table)) if value is not None]
    settings = {"method": name, "options": options, "parts": parts, "drafters": named}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_replaceable(folder: Path) -> None:
    """Raise ValueError where a folder holds other files than those of an earlier saved method."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: a method is saved to a folder")
    ours = {SETTINGS_FILE, CODE_FOLDER}
    if (folder / SETTINGS_FILE).is_file():
        settings = read_settings(folder)
        ours |= {*settings["parts"], *(entry["folder"] for entry in settings["drafters"] if "folder" in entry)}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        raise ValueError(f"{folder} holds other files ({', '.join(others[:3])}): save the method elsewhere")


def read_method(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name, the options and the parts (folders, or ids on the hub) of a saved method.

    Raises:
        ValueError: A damaged artifact, settings that are none, or a missing part.
    """
    if (folder / MANIFEST_FILE).is_file():
        verify_artifact(folder)
    settings = read_settings(folder)
    parts: dict[str, Any] = {part: folder / part for part in settings["parts"] if part in ("heads", "table")}
    drafters = [folder / entry["folder"] if "folder" in entry else entry["id"] for entry in settings["drafters"]]
    for path in (*parts.values(), *drafters):
        if isinstance(path, Path) and not (path.parent == folder and path.is_dir()):
            raise ValueError(f"{folder / SETTINGS_FILE} names {path}, expected a folder beside it")
    if drafters:
        parts |= {"drafter": drafters[0], "more_drafters": drafters[1:]}
    return settings["method"], settings["options"], parts


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of `custom_generate.json`; ValueError where there is none, or of another form."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no saved method: it has no {SETTINGS_FILE}")
    settings = read_json(path)
    for name, kind in _FIELDS.items():
        if type(settings.get(name)) is not kind:
            raise ValueError(f"{path}: {name} is {settings.get(name)!r}, expected a {kind.__name__}")
    return settings
