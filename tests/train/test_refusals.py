"""Errors of training, with the numbers and keys that their messages name."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.train.config import Medusa2, OnPolicy
from draftsmith.train.forward.packed import PackedForward, make_forward
from draftsmith.train.loop.fit import fit
from draftsmith.train.losses.chunks import DenseTeacher, SparseTeacher
from draftsmith.train.losses.drafter import heads_mixture, mixture
from draftsmith.train.losses.objectives import parse_weights
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.tasks.medusa2 import Medusa2Task
from draftsmith.train.teachers.teacher import CacheSource, ModelTeacher
from transformers import AutoConfig, AutoModelForSeq2SeqLM

WEIGHTS: list[tuple[Any, str]] = [
    ({"forward-kl": -0.5}, r"-0\.5"),
    ({"forward-kl": 0.0}, "forward-kl"),
    ({"forward-kl": float("nan")}, "nan"),
    ({"forward-kl": [1.0]}, r"\[1\.0\]"),
    ({"forward-kl": [1.0, 2.0, 1.5]}, r"1\.5"),
    ({"forward-kl": "1.0"}, r"'1\.0'"),
    ({"forward-kl": [0.0, 1.0], "cross-entropy": [0.0, 1.0, 0.5]}, "start"),
    ({"forward-kl": [1.0, 0.0], "cross-entropy": [1.0, 0.0, 0.5]}, "end"),
    ({"foward-kl": 1.0}, "'forward-kl'"),
]


@pytest.mark.parametrize(("weights", "named"), WEIGHTS, ids=str)
def test_weights_of_objectives(weights: Any, named: str):
    with pytest.raises(ValueError, match=named):
        parse_weights(weights)


HIDDEN, PROJECTION, LABELS = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
DENSE = DenseTeacher(HIDDEN, PROJECTION)
SPARSE = SparseTeacher(torch.arange(3).repeat(5, 1), torch.full((5, 3), -2.0))
FEATURES = torch.randn(5, 2, 4)
HEAD_LABELS = torch.ones(5, 2, dtype=torch.int64)


def mixed(weights: dict[str, float], *more: Any, **options: Any) -> Any:
    return mixture(weights, HIDDEN, PROJECTION, LABELS, *more, **options)


def mixed_heads(weights: dict[str, float], *more: Any, **options: Any) -> Any:
    return heads_mixture(weights, FEATURES, [PROJECTION] * 2, HEAD_LABELS, *more, **options)


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: parse_weights({"zzz": 1.0}), "'zzz'.*cross-entropy"),
    "none": (lambda: parse_weights({}), "cross-entropy"),
    "no teacher": (lambda: mixed({"forward-kl": 1.0}), "teacher"),
    "vocabularies": (lambda: mixed({"forward-kl": 1.0}, DenseTeacher(HIDDEN, PROJECTION[:8])), "9.*8"),
    "hot bucket": (lambda: mixed({"forward-kl": 1.0}, DENSE, 2.0, top_k=3), r"2\.0"),
    "hot sparse": (lambda: mixed({"forward-kl": 1.0}, SPARSE, 2.0), r"2\.0"),
    "more than kept": (lambda: mixed({"forward-kl": 1.0}, SPARSE, top_k=4), "4.*3"),
    "top_k": (lambda: CacheSource("", "", "", 33).columns(32), "32.*33"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_and_options(case: str):
    call, named = LOSSES[case]
    with pytest.raises(ValueError, match=named):
        call()


class WrongCache:
    states, hidden_size = "before-norm", 16

    def hidden(self, batch: Any) -> torch.Tensor:
        raise AssertionError("not to be read")


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
    return model


def heads_of(hidden: int = 16, vocab: int = 32, count: int = 2, states: str = "after-norm") -> PredictionHeads:
    return PredictionHeads.from_lm_head(torch.randn(vocab, hidden), count, 1, states=states)


TASKS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "vocabularies": (lambda w, m: DrafterTask(m, None, teacher=ModelTeacher(w.make_model(vocab_size=40))), "32.*40"),
    "own words": (
        lambda w, m: DrafterTask(m, None, {"cross-entropy": 1.0}, ModelTeacher(m), on_policy=OnPolicy(0.5, 8)),
        "cross-entropy",
    ),
    "head weights": (lambda w, m: HeadsTask(m, heads_of(), None, [1.0]), "2"),
    "hidden size": (lambda w, m: HeadsTask(m, heads_of(8), None), "8.*16"),
    "heads' vocabulary": (lambda w, m: HeadsTask(m, heads_of(vocab=9), None), "9.*32"),
    "other states": (lambda w, m: HeadsTask(m, heads_of(), None, states=WrongCache()), "after-norm.*before-norm"),
    "adapted projection": (lambda w, m: Medusa2Task(adapted(m), heads_of(), None, Medusa2()), "projection"),
    "no adapters": (lambda w, m: Medusa2Task(m.requires_grad_(False), heads_of(), None, Medusa2()), "adapters"),
    "states": (lambda w, m: PackedForward(m, "befor-norm"), "'befor-norm'.*before-norm"),
    "global batch": (lambda w, m: fit(DrafterTask(m, None), w.make_data(), w.make_config(micro_batch=3), ""), "8.*3"),
}


@pytest.mark.parametrize("case", TASKS)
def test_tasks(worker: ModuleType, case: str):
    call, named = TASKS[case]
    with pytest.raises(ValueError, match=named):
        call(worker, worker.make_model())


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}


def t5(family: str = "t5", attention: str = "eager", **sizes: Any) -> Any:
    config = AutoConfig.for_model(family, **({**T5, **sizes} if family == "t5" else sizes))
    config.decoder_start_token_id = 0
    return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)


BART = {"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (lambda: PackedForward(t5()), "T5"),
    "family": (lambda: make_forward(t5("bart", **BART)), "'bart'.*t5, mt5, umt5"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_without_support_for_packed_blocks_are_refused(case: str):
    call, named = MODELS[case]
    with pytest.raises(ValueError, match=named):
        call()
