"""What SERVING.md says of exported prediction heads: who reads each form, and with which commands."""

from __future__ import annotations

from pathlib import Path

from ..artifact.markdown import shell, span
from ..heads.layouts import StoredHeads, read_heads
from ..storage.names import FASTER_DECODING_HEADS, PICKLED_FILE
from .base import FOLDER, FOLDER_IN_JSON, ExportOptions, Source
from .drafter import has_tokenizer
from .engines import named_otherwise
from .target import heads_target_name


def _heads_of(source: Source) -> StoredHeads:
    return read_heads(source.folder)


def serve_vllm(source: Source, options: ExportOptions) -> str:
    count, target = _heads_of(source).num_heads, shell(heads_target_name(source, options))
    return f"""
vLLM 0.10 to 0.32 (0.33 has no Medusa any more):

```bash
vllm serve {target} \\
    --speculative-config '{{"method": "medusa", "model": "{FOLDER_IN_JSON}", "num_speculative_tokens": {count}}}'
```

It drafts one token a head, the likeliest. `num_speculative_tokens` may be less than {count}, never more: vLLM makes as
many heads as that, and those without weights stop it, or without blocks are left as they are in memory.

{named_otherwise("the heads")}
"""


def _serve_tgi(source: Source, options: ExportOptions) -> str:
    base = heads_target_name(source, options)
    fetch = "" if Path(base).is_dir() else f"text-generation-server download-weights {shell(base)}\n"
    note = "Its router looks for the tokenizer beside the heads: the target's is there."
    if source.export is None or not has_tokenizer(source.export):
        note = """Its router looks for the tokenizer beside the heads: put the target's there, or export again with
`--target` and a folder that holds target and tokenizer."""
    if fetch:
        note = f"Of heads that lie in a folder it does not fetch the target: the first command does. {note}"
    return f"""
text-generation-inference (TGI) 2.0 or later, which loads the target from where `base_model_name_or_path` says
({span(base)}; another place: export again with `--target`):

```bash
{fetch}text-generation-launcher --model-id {FOLDER} --speculate {_heads_of(source).num_heads}
```

{note}""".strip()


def serve_medusa(source: Source, options: ExportOptions) -> str:
    stored, target = _heads_of(source), shell(heads_target_name(source, options))
    count = stored.num_heads
    return f"""
{_serve_tgi(source, options)}

TensorRT-LLM (its engines built from checkpoints, with `examples/medusa`), for targets of the Llama, Mixtral and Qwen2
families whose output projection is not their embedding:

```bash
python convert_checkpoint.py --model_dir {target} --medusa_model_dir {FOLDER} \\
    --num_medusa_heads {count} --num_medusa_layers {stored.num_layers} --output_dir checkpoint --dtype float16
trtllm-build --checkpoint_dir checkpoint --output_dir engine --gemm_plugin float16 \\
    --speculative_decoding_mode medusa
```

Without the two numbers it builds four heads of one block, whatever the heads' config says.

vLLM 0.25 to 0.32 (0.33 has no Medusa any more):

```bash
vllm serve {target} \\
    --speculative-config '{{"method": "medusa", "model": "{FOLDER_IN_JSON}", "num_speculative_tokens": {count}}}'
```

One before 0.25 does not know the names and says that weights were not initialized from the checkpoint (of heads without
blocks it says nothing, and none of their tokens are accepted); for it there is the format `medusa-vllm`.

{named_otherwise("the heads")}
"""


def serve_pickled(source: Source, options: ExportOptions) -> str:
    heads, made = _heads_of(source).num_heads, FASTER_DECODING_HEADS
    if heads < made:
        copies = "head is a copy" if made - heads == 1 else "heads are copies"
        drafts = (
            f"The runtime makes {made} heads, whatever the config says. The artifact has {heads}, so the last "
            f"{made - heads} {copies} of its last, trained for an earlier place: what they propose is seldom accepted."
        )
    elif heads > made:
        drafts = (
            f"The runtime makes {made} heads, whatever the config says. The artifact has {heads}, of which the first "
            f"{made} are here: the places after theirs are not drafted."
        )
    else:
        drafts = f"The runtime makes {made} heads, whatever the config says; the artifact has as many."
    return f"""
FasterDecoding's own runtime, which loads the target from {span(heads_target_name(source, options))}:

```bash
python -m medusa.inference.cli --model {FOLDER}
```

It needs transformers 4.34 to 4.37 and a Llama or Mistral target with files that those read.

`{PICKLED_FILE}` is a pickled file of tensors alone. Whoever loads it should say `torch.load(..., weights_only=True)`.
The runtime does not; that is the default from torch 2.6 on, and with an older one make sure that the file is this one
(`draftsmith artifact verify {FOLDER}`).

{drafts}
"""


def serve_second(source: Source, options: ExportOptions) -> str:
    heads = _heads_of(source)
    if heads.num_layers != 1:
        tgi = f"TGI reads such heads with one residual block each; these have {heads.num_layers}, and it refuses them."
    else:
        tgi = _serve_tgi(source, options)
    return f"""
The heads have no projections: whoever reads them applies the target's own. That is Medusa's version 2, as
FasterDecoding's main branch trains it. vLLM and TensorRT-LLM do not read it; for them there are `medusa` and
`medusa-vllm`.

{tgi}

FasterDecoding's own runtime does not decode with such heads, though it has a class that reads them; for it there is
`medusa-pt`.
"""
