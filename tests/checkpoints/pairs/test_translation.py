"""A drafter of another tokenizer is brought to its target's tokens: what it then proposes, and what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.repair import repair
from draftsmith.checkpoints.pairs.sides import open_side
from draftsmith.checkpoints.pairs.translation import translated
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.decode.models.loading import load_model, wrap_model
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = {
    "target": ["the draft target keeps, drops or reads a tree of tokens", "na\u00efve \u4e2d\u6587 text", "    x = 12"],
    "drafter": ["a table of texts that a target keeps", "the slow, fast and naive readers", "\u4e2d \u6587"],
}
SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>")


def byte_level() -> Any:
    return train_bpe(TEXTS["drafter"], 290, ["<unk>", "<|im_end|>", "<s>"])


def sentence_piece() -> Any:
    """As Llama's: words with an underscore before them, and bytes for what is no letter of it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        [TEXTS["drafter"][1]], trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are plain tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


KINDS = {"byte-level": byte_level, "sentence-piece": sentence_piece}


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Path:
    tokenizer: Any = train_bpe(TEXTS["target"], 300, SPECIALS)
    tokenizer.eos_token = "<|im_end|>"
    make_llama(300, hidden_size=16, intermediate_size=24).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_drafter_of_another_tokenizer_fits(
    kind: str, tied: bool, target: Path, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    """Every shared token has the drafter's own logit, to the bit; another is never proposed."""
    theirs, mine = KINDS[kind](), load_tokenizer(str(target))
    size = len(theirs.get_vocab())
    make_llama(size, 5, hidden_size=16, tie_word_embeddings=tied).save_pretrained(tmp_path / "drafter")
    theirs.save_pretrained(tmp_path / "drafter")
    sides = [open_side(str(tmp_path / name), load_tokenizer) for name in ("target", "drafter")]
    diagnosis = examine(*sides)
    assert diagnosis.verdicts["draftsmith"].outcome != "works"
    done = repair(*sides, diagnosis.findings, tmp_path / "fitted", "draftsmith doctor")
    after = examine(sides[0], open_side(str(tmp_path / "fitted"), load_tokenizer))
    assert after.verdicts["draftsmith"].outcome == "works"
    assert verify_artifact(tmp_path / "fitted").shapes["proposed_tokens"] == len(done.proposed or [])

    rows = translated(mine, theirs, size)
    assert rows is not None
    shared = {i: row for i, row in enumerate(rows) if isinstance(row, int)}
    assert done.proposed == sorted(shared)
    assert len(shared) > 60, "all letters, at least"
    assert shared[mine.eos_token_id] == theirs.eos_token_id if kind == "sentence-piece" else True
    texts = {number: text.encode() for number, text in enumerate(mine.batch_decode([[i] for i in range(300)]))}
    for i, row in enumerate(rows):
        pieces = [row] if isinstance(row, int) else list(row or ())
        if i > 2 and pieces and b"\xef\xbf\xbd" not in texts[i]:  # no part of a letter, whose text is not known
            assert theirs.decode(pieces).encode().strip() == texts[i].strip(), (i, row)
    assert any(isinstance(row, tuple) and len(row) > 1 for row in rows)

    drafter, fitted = (load_model(str(tmp_path / name)) for name in ("drafter", "fitted"))
    embeddings = [model.get_input_embeddings().weight for model in (drafter, fitted)]
    for i, row in enumerate(rows):
        if isinstance(row, tuple):
            assert torch.equal(embeddings[1][i], embeddings[0][list(row)].double().mean(0).float())
    thin, text = wrap_model(fitted), [i for i in sorted(shared) if i > 2][:40]
    hidden = thin.extend(thin.new_cache(1, 64), torch.tensor([text]))
    found_1R, kept_R = thin.draft_logits(hidden[0, -1:])
    assert kept_R is not None
    assert kept_R.tolist() == sorted(shared)
    own_V = drafter(torch.tensor([[shared[i] for i in text]])).logits[0, -1]
    assert (found_1R[0] - own_V[[shared[i] for i in sorted(shared)]]).abs().max() < 1e-5


def test_tokenizers_whose_bytes_are_not_known(target: Path) -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    assert translated(load_tokenizer(str(target)), PreTrainedTokenizerFast(tokenizer_object=words), 3) is None
