"""The formats of `draftsmith export`."""

from __future__ import annotations

from ....checkpoints.export.base import Format
from ....checkpoints.export.drafter import ASSISTANT
from ....checkpoints.export.engines import DRAFT_MODEL, EAGLE_FORMAT
from ....checkpoints.export.gguf import EAGLE_GGUF, GGUF
from ....checkpoints.export.heads import HEADS_FORMATS
from ....checkpoints.export.table import TABLE_FORMATS
from ....decode.custom_generate.export import ATTACHED_FORMATS

_SINGLE = (ASSISTANT, DRAFT_MODEL, GGUF, EAGLE_FORMAT, EAGLE_GGUF)
FORMATS: dict[str, Format] = {form.name: form for form in (*_SINGLE, *HEADS_FORMATS, *TABLE_FORMATS, *ATTACHED_FORMATS)}
