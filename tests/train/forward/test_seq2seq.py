"""Encoder-decoders on packed blocks: answers have the same loss as in separate forward passes."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch, Document, make_batch
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.render import prompt_renderer, render
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode.models.loading import wrap_model
from draftsmith.train.forward.seq2seq import SourceForward, find_answers
from draftsmith.train.tasks.drafter import DrafterTask
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForSeq2SeqLM

VOCAB = 32
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5"},  # its output is scaled
    "flan-t5": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"model_type": "mt5"},
    "umt5": {"model_type": "umt5", "num_decoder_layers": 1},
}


def build(family: str = "t5", attention: str = "sdpa", seed: int = 0, **overrides: Any) -> Any:
    changed = SIZES | FAMILIES[family] | overrides
    config = AutoConfig.for_model(changed.pop("model_type"), **changed)
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # avoid flat distributions and weak positions, which hide errors
                parameter.normal_(0.0, 2.0 if "relative" in name else 1.5 * parameter.shape[1] ** -0.5)
    return model


def answers_alone(model: Any, batch: Batch) -> list[tuple[int, int, torch.Tensor]]:
    """Run each answer separately; return its row, position and log-probabilities [answer tokens, V]."""
    results = []
    for row in range(batch.tokens_BT.shape[0]):
        labels, documents = batch.labels_BT[row].tolist(), batch.documents_BT[row].tolist()
        at = 1
        while at < len(labels):
            if labels[at] == -100:
                at += 1
                continue
            end = at
            while end < len(labels) and labels[end] != -100 and documents[end] == documents[at]:
                end += 1
            source = batch.tokens_BT[row, documents.index(documents[at]) : at]
            inputs = torch.cat((torch.tensor([3]), batch.tokens_BT[row, at : end - 1]))
            masks = {"attention_mask": torch.ones_like(source)[None], "decoder_attention_mask": torch.ones(1, end - at)}
            logits = model(source[None], decoder_input_ids=inputs[None], **masks).logits[0]
            results.append((row, at, logits.log_softmax(-1)))
            at = end
    return results


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_has_the_loss_of_a_separate_forward(worker: ModuleType, family: str, attention: str) -> None:
    model = build(family, attention)
    batch = worker.make_data(4, length=23).batch(range(4))
    task = DrafterTask(model, None)
    loss, count = task.module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    expected, items = torch.zeros(()), 0
    for row, at, logs in answers_alone(model, batch):
        expected = expected - logs.gather(1, batch.tokens_BT[row, at : at + len(logs), None]).sum()
        items += len(logs)
    assert items == int(count) == int(task.count(batch)) > 30
    torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-5, atol=1e-5, check_dtype=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    packed = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True)
    alone = torch.autograd.grad(expected, [p for _, p in named])
    for (name, _), grad, other in zip(named, packed, alone, strict=True):
        torch.testing.assert_close(grad, other, rtol=2e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=3), max_size=7))
def test_answers_are_runs_inside_documents(documents: list[list[tuple[int, int]]]) -> None:
    blocks, expected, at = [], [], 0
    for number, exchanges in enumerate(documents):
        flags: list[int] = []
        for question, answer in exchanges:
            flags += [0] * question
            if answer:
                expected.append((at, at + len(flags), at + len(flags) + answer))
            flags += [1] * answer
        at += len(flags)
        blocks.append(Document(np.zeros(len(flags), dtype=np.int64), np.array(flags), number))
    batch = make_batch([blocks], at + 2, 0)
    result = find_answers(batch.labels_BT.numpy(), batch.documents_BT.numpy())
    assert [tuple(row) for row in result.tolist()] == expected


def test_a_block_without_answers_uses_every_parameter_and_changes_none() -> None:
    model = build()
    tokens = torch.arange(12).view(2, 6)
    batch = Batch(tokens, torch.full_like(tokens, -100), tokens % 6, torch.zeros_like(tokens))
    loss, count = DrafterTask(model, None).module(
        batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT
    )
    assert int(count) == 0
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_recomputed_activations_and_half_precision(worker: ModuleType, family: str) -> None:
    batch = worker.make_data(3, length=20).batch(range(3))
    gradients = []
    for recompute in (False, True):
        model = build(family, dropout_rate=0.0).train()
        module: Any = DrafterTask(model, None).module.train()
        if recompute:
            module.gradient_checkpointing_enable()
        loss, _ = module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    exact = SourceForward(build(family)).hidden(batch)
    halved = SourceForward(build(family).to(torch.bfloat16)).hidden(batch)
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), exact, rtol=0.1, atol=0.15 * float(exact.detach().abs().max()))


@torch.no_grad()
def test_training_states_equal_decoding_states() -> None:
    tokenizer = train_bpe(["the tree reads a token fast and keeps it"], 280, ("<|endoftext|>",))
    model = build(vocab_size=len(tokenizer))
    template = get_template("t5")
    texts = ["the tree", "reads a", "fast", "it"]
    turns = tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    rendered = render(Conversation("a", turns), template, tokenizer)
    batch = make_batch([[Document(rendered.ids, rendered.trainable(), 0)]], len(rendered.ids) + 3, 0)
    hidden_BTD = SourceForward(model).hidden(batch)
    scorer = wrap_model(model)
    for (start, end), num_turns in zip(rendered.spans, (1, 3), strict=True):
        prompt = prompt_renderer(template, tokenizer)(turns[:num_turns])
        (begin,), cache = scorer.begin([prompt], end - start)
        inputs = torch.tensor([[*begin, *rendered.ids[start : end - 1].tolist()]])
        expected_MV = scorer.logits(scorer.extend(cache, inputs))[0]
        actual_MV = model.lm_head(hidden_BTD[0, start - 1 : end - 1])
        torch.testing.assert_close(actual_MV, expected_MV, rtol=1e-4, atol=1e-4)
