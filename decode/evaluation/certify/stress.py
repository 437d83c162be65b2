"""Certification tests with a small target/drafter pair, whose vocabulary of six tokens reveals nearly every fault.

All continuations can be enumerated, and draft tokens are often accepted and often rejected. Target, drafters, heads and
table are created in memory from a fixed seed. Prompts differ in length, so all batches are ragged. Outputs end at
several limits and stop tokens.

Shape letters: X tokens, K heads, V vocabulary, D hidden.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ....checkpoints.table.table import BigramTable
from ....checkpoints.table.texts import TextStore
from ...engine import Limits
from ...methods import Options, Parts, build_method, method_config
from ...models.base import LanguageModel
from ...models.draft_vocabulary import keep_tokens
from ...models.loading import wrap_model
from ...tree import parse_branching, parse_tree
from ...warpers import Sampling
from ..measure import Entry, sample_texts
from .certify import Certificate, Plan, certify_method
from .rescoring import Rounding, make_judge, measure_rounding, teacher_force

_VOCAB, _HEADS, _SHARPNESS, _STOP = 6, 4, 2.0, 0


class Check(NamedTuple):
    """Settings of one certification test with `SmallPair`."""

    sampling: Sampling
    limits: Limits
    prompts: int
    batch: int
    short: bool = False
    """True to limit drafts to one token or tree level, so that bonus tokens occur at every position."""
    drafter: Literal["near", "distant", "certain", "trimmed"] = "near"
    """Kind of drafter. near: target with little noise. distant: target with much noise. certain: nearly all probability
    on one token, often a wrong one. trimmed: one token is missing. Methods without a drafter run only "near" checks.
    """
    share: float = 6
    """Factor by which the plan's number of tokens is multiplied above temperature 0."""


CHECKS = (
    Check(Sampling(1.0), Limits(8), 4, 256),
    Check(Sampling(0.8, top_k=3), Limits(12, (_STOP,)), 6, 256, short=True),
    Check(Sampling(1.2, top_p=0.7), Limits(9), 4, 256),
    Check(Sampling(1.0), Limits(8), 4, 256, drafter="distant", share=3),
    Check(Sampling(1.0), Limits(8), 4, 256, drafter="certain", share=3),
    Check(Sampling(1.0), Limits(8), 4, 256, drafter="trimmed", share=2),
    Check(Sampling(1.0), Limits(16), 2, 1, share=1),
    Check(Sampling(), Limits(24, (_STOP,)), 64, 16),
    Check(Sampling(), Limits(24), 16, 1),
)


class SmallPair(NamedTuple):
    """Small target, its judge, prompts, and the artifacts that the methods need."""

    target: LanguageModel
    judge: LanguageModel
    parts: Parts
    prompts: list[list[int]]
    rounding: Rounding


def stress_method(
    entry: Entry, plan: Plan, device: str = "cpu", progress: Callable[[int, int], None] = lambda done, planned: None
) -> Iterator[Certificate]:
    """Run the `CHECKS` in which a method claims to be lossless, and yield the certificate of each check.

    The significance level of the plan is divided among all checks.
    """
    options = {name: value for name, value in entry.options.items() if name != "drafter"}
    config = method_config(entry.method, options)
    all_options = asdict(config)
    sizes, has_drafter = _sizes(all_options), "drafter" in config.needs
    for check in CHECKS:
        if check.drafter != "near" and not has_drafter:
            continue
        world = make_small_pair(*sizes, device, check.drafter)
        check_options = options
        if check.short:
            check_options = dict(all_options)
            if "k_config" in all_options:
                check_options["k_config"] = all_options["k_config"].split("x")[0]
            elif "gamma" in all_options:
                check_options["gamma"] = 1
        method = build_method(entry.method, world.parts, check.sampling, **check_options)
        if not method.verifier.lossless:
            continue
        most = check.prompts * check.limits.max_new_tokens
        tokens = most if check.sampling.greedy else math.ceil(check.share * plan.tokens)
        yield certify_method(
            world.target,
            world.parts,
            replace(entry, sampling=check.sampling),
            world.prompts[: check.prompts],
            check.limits,
            replace(plan, tokens=tokens, level=plan.level / len(CHECKS), batch=check.batch),
            method=method,
            reference=world.judge,
            rounding=world.rounding,
            progress=progress,
        )


def _sizes(options: Options) -> tuple[int, int]:
    """Return the vocabulary size and the number of heads that a method's options require."""
    widths, depths = [_VOCAB], [_HEADS, options.get("max_depth") or 0]
    if "k_config" in options:
        widths += parse_branching(options["k_config"])
    if "tree" in options:
        tree, ranks_N = parse_tree(options["tree"])
        widths, depths = [*widths, 1 + int(ranks_N.max())], [*depths, tree.max_depth]
    return max(widths), max(depths)


@cache
def make_small_pair(vocab: int = _VOCAB, heads: int = _HEADS, device: str = "cpu", drafter: str = "near") -> SmallPair:
    """Create a small target, drafters of a kind in `Check.drafter`, and heads and a table fitted to its outputs."""
    model = _llama(vocab, 0, 0.0).to(device)
    target, judge = wrap_model(model, check=False), make_judge(model)
    models = [_llama(vocab, seed, 0.1 if drafter in ("near", "trimmed") else 1.0).to(device) for seed in (1, 2)]
    for drafter_model in models:
        if drafter == "certain":
            with torch.no_grad():
                drafter_model.lm_head.weight *= 20
        if drafter == "trimmed":
            keep_tokens(drafter_model, torch.tensor([token for token in range(vocab) if token != 1]))
    first, second = (wrap_model(drafter_model, check=False) for drafter_model in models)
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, vocab, length).tolist() for length in (1, 5, 2, 8, 3, 7, 4, 6) * 8]
    outputs = sample_texts(target, prompts * 4, Limits(40), Sampling(0.5), seed=99, batch=4 * len(prompts))
    texts = [[*prompt, *text] for prompt, text in zip(prompts * 4, outputs, strict=True)]
    documents = [np.array(text, dtype=np.int32) for text in texts]
    table = BigramTable.from_documents(documents, vocab)
    table.texts = TextStore.from_documents(documents)
    parts = Parts(first, FittedHeads(target, texts, heads), table, (second,))
    return SmallPair(target, judge, parts, prompts, measure_rounding(target, prompts, Sampling(1.0), reference=judge))


def _llama(vocab: int, seed: int, noise: float) -> LlamaForCausalLM:
    """Return a two-layer model with random weights. `seed` only affects the noise added to the weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        config = LlamaConfig(vocab_size=vocab, **sizes, num_key_value_heads=1, max_position_embeddings=128)
        config.pard_token = vocab - 1  # Mask token of parallel drafting.
        model = LlamaForCausalLM(config).eval()
    common, noise_rng = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                size = _SHARPNESS * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, size, generator=common)
                parameter += torch.randn(parameter.shape, generator=noise_rng) * size * noise
    return model


class FittedHeads(torch.nn.Module):
    """Prediction heads fitted by least squares. From a state at position t, head k predicts the token at t + k + 2."""

    def __init__(self, target: LanguageModel, texts: list[list[int]], num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        with torch.inference_mode():
            states_XD = teacher_force(target, [text[:1] for text in texts], [text[1:] for text in texts]).hidden_XD
        weights = []
        states = states_XD.split([len(text) - 1 for text in texts])
        for head in range(num_heads):
            inputs_XD = torch.cat([state_TD[: len(state_TD) - 1 - head] for state_TD in states])
            label_X = torch.tensor([token for text in texts for token in text[2 + head :]], device=inputs_XD.device)
            onehot_XV = torch.nn.functional.one_hot(label_X, target.vocab_size).float()
            weights.append(10 * torch.linalg.lstsq(inputs_XD, onehot_XV).solution.T)
        self.weight_KVD = torch.stack(weights)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        """Return the logits [..., K, V] of all heads."""
        return torch.einsum("kvd,...d->...kv", self.weight_KVD, hidden_XD)
