"""Fixtures with tiny random artifacts to export: drafters, adapters, heads and tables."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.storage.draft_vocabulary import write_vocabulary
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.recipes.commands.artifacts.export import FORMATS
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, HIDDEN = 48, 16
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
Make = Callable[..., Path]


def tokenizer_of(swapped: bool = False) -> PreTrainedTokenizerFast:
    names = [f"w{number}" for number in range(VOCAB - 2)]
    if swapped:
        names[5], names[6] = names[6], names[5]
    vocab = {"<s>": 0, "</s>": 1} | {name: number + 2 for number, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture
def target(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    make_llama(VOCAB, 1, **SIZES).save_pretrained(tmp_path / "target")
    tokenizer_of().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def save(tmp_path: Path, target: Path) -> Make:
    """Return a function that writes an artifact for the target."""

    def build(write: Callable[[Path], Any], kind: str = "drafter", **about: Any) -> Path:
        settings: dict[str, Any] = {name: {} for name in ("shapes", "data", "training")}
        settings |= {"recipe": {"kind": kind, "steps": 3}, "evaluation": {"tokens_per_step": 2.5}}
        settings |= {"target": {"id": str(target), "sha256": resolve_model(str(target)).sha256}}
        settings |= {"vocab_size": VOCAB, "tokenizer_fingerprint": None} | about
        save_artifact(tmp_path / "artifact", kind=kind, write=write, **settings)
        return tmp_path / "artifact"

    return build


@pytest.fixture
def make_drafter(save: Make, make_llama: Callable[..., LlamaForCausalLM]) -> Make:
    """Return a function that saves a random Llama as a drafter artifact; `also` may change the folder first."""

    def build(
        dtype: torch.dtype = torch.float32,
        also: Any = None,
        tokenizer: str | None = "",
        vocab_size: int = VOCAB,
        proposed: torch.Tensor | None = None,
        shapes: dict[str, int] | None = None,
        **sizes: Any,
    ) -> Path:
        model = make_llama(vocab_size, 2, **(SIZES | sizes)).to(dtype)
        own = None if tokenizer is None else tokenizer_of(swapped=tokenizer == "swapped")

        def write(folder: Path) -> None:
            model.save_pretrained(folder)
            if own:
                own.save_pretrained(folder)
            (folder / "recipe.yaml").write_text("kind: drafter\n")
            if also is not None:
                also(folder)
            if proposed is not None:
                write_vocabulary(proposed, folder)

        about = {"vocab_size": vocab_size, "tokenizer_fingerprint": own and tokenizer_fingerprint(own)}
        counted = {} if proposed is None else {"proposed_tokens": len(proposed)}
        return save(write, **about, shapes=shapes or counted)

    return build


@pytest.fixture
def make_adapter(save: Make, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Make:
    """Return a function that saves a LoRA adapter as an artifact, and its base model in the folder `base`."""

    def build(dtype: torch.dtype = torch.float32, proposed: torch.Tensor | None = None) -> Path:
        make_llama(VOCAB, 4, **SIZES).to(dtype).save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        wrapper = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in wrapper.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.3)
        wrapper.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")

        def write(folder: Path) -> None:
            wrapper.save_pretrained(folder)
            tokenizer_of().save_pretrained(folder)
            write_vocabulary(proposed, folder)

        counted = {} if proposed is None else {"proposed_tokens": len(proposed)}
        return save(write, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer_of()), shapes=counted)

    return build


@pytest.fixture
def make_heads(save: Make) -> Make:
    """Return a function that saves random heads as an artifact; `edit` may change the heads first."""

    def build(dtype: torch.dtype = torch.float32, edit: Any = None, named: Any = "here", **sizes: Any) -> Path:
        torch.manual_seed(1)
        heads = PredictionHeads(hidden_size=HIDDEN, vocab_size=VOCAB, **({"num_heads": 3, "num_layers": 1} | sizes))
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_()
            if edit is not None:
                edit(heads)
        about = {} if named == "here" else {"target": named}
        return save(lambda folder: save_heads(heads.to(dtype), folder, "base"), "heads", **about)

    return build


@pytest.fixture
def make_table(save: Make) -> Make:
    """Return a function that writes a table with uneven rows, ties and unseen tokens as an artifact."""

    def build(table: BigramTable | None = None) -> Path:
        rng = np.random.default_rng(0)
        documents = [np.minimum(rng.geometric(0.2, 30) - 1, VOCAB - 4) for _ in range(12)]
        table = table or BigramTable.from_documents(documents, VOCAB)
        return save(table.save, "table", vocab_size=table.vocab_size)

    return build


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """Return a function that exports an artifact and returns the output folder and the report of its checks."""

    def run(artifact: Path, form: str, **options: Any) -> tuple[Path, str]:
        out = tmp_path / f"exported-{form}"
        lines = export_artifact(artifact, form, out, FORMATS, ExportOptions(**options))
        about = verify_artifact(out).export
        assert about is not None
        assert about["format"] == form
        assert about["of"] == {name: entry["sha256"] for name, entry in verify_artifact(artifact).files.items()}
        if (out / "tokenizer_config.json").is_file():
            settings = json.loads((out / "tokenizer_config.json").read_text())
            assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "this class can be read by transformers 4"
        return out, "\n".join(lines)

    return run


@pytest.fixture
def refused(tmp_path: Path, export: Callable[..., tuple[Path, str]]) -> Callable[..., str]:
    """Return a function that runs a failing export and returns its error message; no files may remain."""

    def run(artifact: Path, form: str, **options: Any) -> str:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller checks the message
            export(artifact, form, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return str(caught.value)

    return run


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """Return a directory like a llama.cpp checkout, with a stand-in for its converter."""
    (tmp_path / "llama cpp").mkdir()
    converter = Path(__file__).parents[1] / "gguf_converter.py"
    shutil.copyfile(converter, tmp_path / "llama cpp" / "convert_hf_to_gguf.py")
    return tmp_path / "llama cpp"
