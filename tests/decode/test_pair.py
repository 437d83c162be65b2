"""The trained pair of the quickstart: greedy identity over 200 held-out prompts, and what joint decoding is worth.

Minutes of decoding, so marked slow; skipped where there is no pair (`make quickstart`, or DRAFTSMITH_PAIR=FOLDER).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import load_prompts, stop_ids
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.evaluation.quality import perplexity
from draftsmith.decode.methods import METHODS, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling

pytestmark = pytest.mark.slow
PROMPTS = 200
# Wide trees are slow on a CPU and prove nothing more.
OPTIONS: dict[str, dict[str, Any]] = {
    "multi-candidate": {"k_config": "2x2x1"},
    "naive-multi-candidate": {"k_config": "2x2x1"},
    "medusa": {"tree": "2x2x1"},
}


class Pair:
    """What the quickstart leaves, and the target's greedy continuations."""

    def __init__(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder / "target"))
        self.target: LanguageModel = wrap_model(load_model(str(folder / "target")))
        drafter = wrap_model(load_model(str(folder / "drafter")))
        table = BigramTable.load(folder / "table")
        self.parts = Parts(drafter, load_heads(folder / "heads"), table, (drafter,))
        heldout = str(folder / "corpus" / "heldout.jsonl")
        self.prompts = [ids for _, ids in load_prompts(heldout, "chatml", tokenizer, PROMPTS, 200)]
        self.limits = Limits(40, stop_ids(tokenizer))
        self.greedy = self.decode("autoregressive", 1)

    def decode(self, name: str, batch: int, sampling: Sampling = Sampling(), **options: Any) -> list[list[int]]:  # noqa: B008
        method = build_method(name, self.parts, sampling, **options)
        output = []
        for first in range(0, len(self.prompts), batch):
            prompts = self.prompts[first : first + batch]
            rng = Rng.for_rows(first, len(prompts))
            output += decode_texts(self.target, *method, prompts, self.limits, sampling, rng)
        return output


@pytest.fixture(scope="module")
def pair() -> Pair:
    folder = Path(os.environ.get("DRAFTSMITH_PAIR", "runs/quickstart"))
    if not (folder / "results.json").is_file():
        pytest.skip(f"no trained pair at {folder}")
    torch.set_num_threads(1)
    return Pair(folder)


@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.lossless])
def test_every_lossless_method_writes_the_greedy_text(pair: Pair, name: str, batch: int) -> None:
    assert len(pair.prompts) == PROMPTS
    output = pair.decode(name, batch, **OPTIONS.get(name, {}))
    different = [place for place, ids in enumerate(output) if ids != pair.greedy[place]]
    assert not different, f"{len(different)} of {PROMPTS} prompts differ, first {different[0]}"


def test_joint_decoding_writes_likelier_text(pair: Pair) -> None:
    """arXiv 2407.09722, table 2: perplexity of MJSD (8 beams) is below that of greedy and speculative sampling.

    Sampling is warped as in the paper: top 20, then top-p 0.9.
    """
    warped = Sampling(1.0, 20, 0.9)
    outputs = {name: pair.decode(name, 8, warped) for name in ("speculative", "autoregressive", "mjsd")}
    outputs |= {"greedy": pair.greedy, "mjsd greedy": pair.decode("mjsd", 8)}
    found = {name: perplexity(pair.target, pair.prompts, output) for name, output in outputs.items()}
    print(found)
    assert found["mjsd"] < found["speculative"]
    assert found["mjsd"] < found["autoregressive"]
    assert found["mjsd greedy"] < found["greedy"]
