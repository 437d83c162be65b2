"""File names that artifacts, and what others publish in their place, are known by."""

from __future__ import annotations

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
"""What the heads' names begin with in the files of a whole model."""
