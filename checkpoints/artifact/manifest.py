"""Manifest of an artifact (`artifact.json`): kind, provenance and file hashes."""

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..storage.messages import brief
from ..storage.names import MANIFEST_FILE
from ..storage.redaction import without_secrets
from ..storage.safe_read import name_fault, parse_json

SCHEMA_VERSION = 2
KINDS = ("drafter", "heads", "table", "target")

_LIBRARIES = (
    *("draftsmith", "torch", "transformers", "safetensors", "numpy"),
    *("accelerate", "peft", "datasets", "deepspeed"),
)


@dataclass(frozen=True)
class Manifest:
    """Contents of `artifact.json`. All dictionaries must be JSON-serialisable."""

    kind: str
    """Type of the artifact: `drafter`, `heads`, `table` or `target`."""
    vocab_size: int
    """Vocabulary size V of the artifact."""
    tokenizer_fingerprint: str | None
    """Fingerprint of the tokenizer (see `model_ref.tokenizer_fingerprint`); None if unknown."""
    target: dict[str, Any] | None
    """Target model: `id`, `sha256` and, if known, `revision`. None if there is no target."""
    shapes: dict[str, Any]
    """Sizes and types that describe the model, such as `num_heads` or `model_type`."""
    recipe: dict[str, Any]
    """Resolved recipe, without secrets."""
    data: dict[str, Any]
    """Provenance of the training data."""
    training: dict[str, Any]
    """Training results."""
    evaluation: dict[str, Any] | None
    """Evaluation results."""
    versions: dict[str, str | None]
    """Versions of Python and of the main libraries at creation; None if a library is not installed."""
    files: dict[str, dict[str, Any]]
    """Mapping from relative path to SHA-256 (hex) and size in bytes, for every file except `artifact.json`."""
    created: str | None = None
    """Creation time in UTC (ISO 8601)."""
    command: str | None = None
    """Command line that created the artifact."""
    export: dict[str, Any] | None = None
    """Export settings: `format`, supported engines (`readers`), whether this package can load it (`native`), and the
    file hashes of the exported artifact (`of`). None if this is not an export."""
    schema: int = SCHEMA_VERSION
    """Schema version of the manifest."""

    @property
    def role(self) -> str:
        """Kind to display: `target` for a language model that is not a draft model, otherwise `kind`."""
        return "target" if self.kind == "drafter" and self.target is None else self.kind

    def to_json(self) -> str:
        """Serialise the manifest to the JSON text of `artifact.json`."""
        values = asdict(self)
        ordered = {"schema": values.pop("schema")} | values
        return json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the output of `to_json`. Raises ValueError for invalid JSON, fields or schema version."""
        values = parse_json(text)
        if values.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"its schema version is {brief(values.get('schema'))}, expected {SCHEMA_VERSION}")
        names = {one.name for one in fields(cls)}
        if names != set(values):
            missing, unknown = (brief(sorted(one - other)) for one, other in ((names, {*values}), ({*values}, names)))
            raise ValueError(f"its fields differ from schema {SCHEMA_VERSION}: missing {missing}, unknown {unknown}")
        _check_types(values)
        return cls(**values)


def _check_types(values: dict[str, Any]) -> None:
    types: dict[str, Any] = {"kind": str, "vocab_size": int}
    types |= dict.fromkeys(("shapes", "recipe", "data", "training", "versions", "files"), dict)
    types |= dict.fromkeys(("target", "evaluation", "export"), dict | None)
    types |= dict.fromkeys(("tokenizer_fingerprint", "created", "command"), str | None)
    for name, kind in types.items():
        if not isinstance(values[name], kind):
            raise ValueError(f"{name} is {brief(values[name])}, expected {getattr(kind, '__name__', kind)}")
    if values["kind"] not in KINDS:
        raise ValueError(f"its kind is {brief(values['kind'])}, expected one of {', '.join(KINDS)}")
    for name, entry in values["files"].items():
        is_entry = isinstance(entry, dict) and set(entry) == {"sha256", "bytes"}
        if not is_entry or name_fault(name) or name == MANIFEST_FILE:
            raise ValueError(f"files lists {brief(name)}, expected a relative path with sha256 and bytes")


def to_json_safe(value: Any) -> Any:
    """Convert a value to JSON-serialisable types, and redact secrets. Raises ValueError for unsupported types.

    Paths become strings, tuples and sets become lists, NumPy scalars become numbers, non-finite numbers become null.
    """
    return without_secrets(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise ValueError(f"a {type(value).__name__} cannot be stored in {MANIFEST_FILE}: {value!r}")


def library_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the main libraries; None if a library is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
