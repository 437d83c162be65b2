"""Formats of `draftsmith export`."""

from ....checkpoints.export.base import Format
from ....checkpoints.export.dflash import DFLASH_FORMAT, DFLASH_TRANSFORMERS, DSPARK_FORMAT
from ....checkpoints.export.drafter import ASSISTANT, DRAFT_MODEL
from ....checkpoints.export.eagle import EAGLE_FORMAT
from ....checkpoints.export.gguf import EAGLE_GGUF, GGUF
from ....checkpoints.export.heads import MEDUSA
from ....checkpoints.export.table import TABLE

_ALL = (
    *(ASSISTANT, DRAFT_MODEL, GGUF, MEDUSA, EAGLE_FORMAT, EAGLE_GGUF),
    *(DFLASH_FORMAT, DFLASH_TRANSFORMERS, DSPARK_FORMAT, TABLE),
)
FORMATS: dict[str, Format] = {form.name: form for form in _ALL}
