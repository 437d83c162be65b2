"""File names of artifacts and of published models, heads and tables."""

from pathlib import Path

MANIFEST_FILE = "artifact.json"
TABLE_FILE = "table.safetensors"
HEADS_FILE = "medusa_lm_head.safetensors"
PICKLED_FILE = "medusa_lm_head.pt"
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
DRAFT_VOCABULARY = "draft_vocabulary.safetensors"
WHOLE_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLED_WHOLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
PREFIX = "medusa_head."
"""Prefix of the heads' tensor names in checkpoints of a model with heads."""


def other_kind(folder: Path) -> str:
    """Return "heads" or "a table" if a folder contains either instead of a language model, otherwise ""."""
    if any((folder / name).is_file() for name in (HEADS_FILE, PICKLED_FILE)):
        return "heads"
    if (folder / TABLE_FILE).is_file():
        return "a table"
    manifest = folder / MANIFEST_FILE
    return "heads" if manifest.is_file() and '"kind": "heads"' in manifest.read_text("utf-8", "replace") else ""
