"""Rows that a repair adds to a model are never its most likely tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.repair import NEVER, arrange_rows, repair
from draftsmith.checkpoints.pairs.sides import Diagnosis, read_model_info
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from transformers import AutoModelForCausalLM as Decoder
from transformers import AutoModelForSeq2SeqLM as EncoderDecoder
from transformers import GemmaConfig, GPT2Config, GPTNeoXConfig, PhiConfig, PreTrainedModel, T5Config

VOCAB, PADDED = 280, 288
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "a bias": lambda: PhiConfig(**SIZES, intermediate_size=16),
    "tied": lambda: GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    "another name of the output layer": lambda: GPTNeoXConfig(**SIZES, intermediate_size=16),
    "scaled embeddings": lambda: GemmaConfig(**SIZES, intermediate_size=16, num_key_value_heads=1, head_dim=8),
    "an encoder-decoder": lambda: T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
}


def test_added_rows_are_never_proposed() -> None:
    """If all other logits are negative, added rows of zeros would be the most likely tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden_XD = torch.randn(200, 16, generator=generator)
    hidden_XD[:, 0] = 1.0
    rows_VD = torch.randn(50, 16, generator=generator)
    rows_VD[:, 0] -= 30

    new_VD = arrange_rows(rows_VD, [*range(50), None, None], range(50))
    assert torch.equal(new_VD[:50], rows_VD)
    logits_XV = hidden_XD @ new_VD.T
    assert (logits_XV[:, :50].max(-1).values > logits_XV[:, 50:].max(-1).values).all()
    assert (logits_XV.softmax(-1)[:, 50:] <= 1 / 50).all()
    zero_X = hidden_XD @ torch.zeros(16)
    assert (zero_X > logits_XV.max(-1).values).all(), "rows of zeros would have sufficed"
    bias_V = arrange_rows(torch.zeros(50), [*range(50), None], range(50))
    assert bias_V.tolist() == [0.0] * 50 + [NEVER]


@torch.no_grad()
def logits(folder: Path, maker: Any) -> torch.Tensor:
    model: PreTrainedModel = maker.from_pretrained(folder).eval()
    ids = torch.tensor([[5, 9, 30, 7]])
    return model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})).logits[0]


def faults(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.findings if finding.severity == "fault"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_model_generates_the_same_text(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    maker = EncoderDecoder if config.is_encoder_decoder else Decoder
    torch.manual_seed(0)
    model = maker.from_config(config).to(dtype)
    tokenizer = train_bpe(["a little text of words to merge, and more"], VOCAB, ("<pad>", "</s>"))
    for folder, rows in (("drafter", VOCAB), ("target", PADDED)):
        model.resize_token_embeddings(rows)
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    sides = [read_model_info(str(tmp_path / name), load_tokenizer) for name in ("target", "drafter")]
    assert [(info.rows, info.head_rows) for info in sides] == [(PADDED, PADDED), (VOCAB, VOCAB)]
    diagnosis = examine(*sides)
    assert "vocab_size" in faults(diagnosis)
    assert faults(diagnosis) <= {"vocab_size", "kind of model"}  # "kind of model" for encoder-decoders
    repair(*sides, tmp_path / "out", "")
    before, after = (logits(tmp_path / folder, maker) for folder in ("drafter", "out"))
    assert after.shape[-1] == PADDED
    assert torch.equal(before, after[:, :VOCAB])
    assert (after[:, VOCAB:].max(-1).values < before.max(-1).values).all()
    mended = examine(sides[0], read_model_info(str(tmp_path / "out"), load_tokenizer))
    assert faults(mended) <= {"kind of model"}
    assert '"PreTrainedTokenizerFast"' in (tmp_path / "out" / "tokenizer_config.json").read_text()
