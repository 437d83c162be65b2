"""Agreement on given texts equals that of plain forwards, and significant losses between stages are reported."""

from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.diagnose.agreement import (
    MEASURES,
    Passage,
    drafter_source,
    heads_source,
    score,
    table_source,
)
from draftsmith.decode.evaluation.diagnose.expected import ServerPrediction, compare_server
from draftsmith.decode.evaluation.diagnose.stages import Stage, draft_attempts, stage_findings
from draftsmith.decode.evaluation.measure import sample_texts
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.trace import trace
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.ngrams import TableChain, TableSource
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling, warp
from transformers import LlamaForCausalLM

VOCAB = 24
SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=5, top_p=0.9)]
PASSAGES = [
    Passage([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]),
    Passage([7], [2, 3, 2, 3]),
    Passage([2, 2], []),
    Passage([11, 12, 13], [14, 15, 16, 17, 18], [False, True, True, False, True]),
]


@pytest.fixture(scope="module")
def table() -> BigramTable:
    rng = np.random.default_rng(0)
    return BigramTable.from_documents([rng.integers(0, VOCAB, 20) for _ in range(30)], VOCAB)


def logits_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].float()


def expected(target: torch.Tensor, draft: torch.Tensor, best: int, token: int, sampling: Sampling, draws: bool) -> Any:
    """Compute hit, overlap, agree and accepted by loops, for draft token `best` and the text's token `token`."""
    p, q = target.softmax(-1).tolist(), draft.softmax(-1).tolist()
    overlap = sum(min(p_x, q_x) for p_x, q_x in zip(p, q, strict=True))
    warped_p, warped_q = (warp(logits[None], sampling)[0].tolist() for logits in (target, draft))
    agree = float(best == int(target.argmax()))
    accepted = warped_p[best] if not draws else sum(map(min, warped_p, warped_q))
    return float(best == token), overlap, agree, agree if sampling.greedy else accepted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scores_of_a_drafter_equal_plain_forwards(models: Any, sampling: Sampling) -> None:
    target, drafter = models
    scores = score(wrap_model(target), drafter_source(wrap_model(drafter)), PASSAGES, sampling)
    index = 0
    for number, (prompt, text, judged) in enumerate(PASSAGES):
        for position, token in enumerate(text):
            ids = [*prompt, *text[:position]]
            p, q = logits_of(target, ids), logits_of(drafter, ids)
            measures = [float(scores.measures[name][0, index]) for name in MEASURES]
            assert measures == pytest.approx(expected(p, q, int(q.argmax()), token, sampling, True), abs=2e-5)
            assert scores.passage_T[index] == number
            assert scores.valid_KT[0, index] == (judged is None or judged[position])
            index += 1
    assert index == len(scores.passage_T)
    over_P, under_P = scores.sums("overlap")
    assert under_P.tolist() == [7, 4, 0, 3]
    assert scores.mean("overlap") == pytest.approx(over_P.sum() / 14)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scores_of_heads_are_of_later_tokens(models: Any, make_heads: Any, sampling: Sampling) -> None:
    target, heads = models[0], make_heads(3, 32, VOCAB)
    scores = score(wrap_model(target), heads_source(heads, torch.float32), PASSAGES, sampling)
    index = 0
    for prompt, text, judged in PASSAGES:
        ids = [*prompt, *text]
        with torch.inference_mode():
            states_TD = target.model(torch.tensor([ids])).last_hidden_state[0]
        for position, token in enumerate(text):
            for head in range(3):
                state = len(prompt) + position - 2 - head  # this head predicts the token 2 + head positions later
                valid = position >= head and state >= 0 and (judged is None or judged[position])
                assert scores.valid_KT[head, index] == valid
                if valid:
                    p, q = logits_of(target, ids[: len(prompt) + position]), heads(states_TD[state])[head]
                    values = expected(p, q, int(q.argmax()), token, sampling, False)
                    measures = [float(scores.measures[name][head, index]) for name in MEASURES]
                    assert measures == pytest.approx(values, abs=2e-5)
            index += 1
    assert len(scores.by_depth("hit")) == 3


@pytest.mark.parametrize("order", [1, 2])
def test_scores_of_a_table_equal_its_rows(models: Any, table: BigramTable, order: Any) -> None:
    target, sampling = models[0], Sampling(0.7)
    proposer = TableChain(table, 2, TableSource(order))
    rows = table.distributions("cpu", 1.0)
    for setting in (sampling, Sampling()):
        scores = score(wrap_model(target), table_source(proposer, torch.device("cpu")), PASSAGES, setting)
        index = 0
        for prompt, text, _ in PASSAGES:
            for position, token in enumerate(text):
                ids = [*prompt, *text[:position]]
                last = torch.tensor([ids[-1]])
                q = (rows.unigram_V if order == 1 else rows.after(last)[0]).log()
                best = int(rows.unigram_V.argmax()) if order == 1 else int(rows.most_likely(last)[0])
                values = expected(logits_of(target, ids), q, best, token, setting, True)
                measures = [float(scores.measures[name][0, index]) for name in MEASURES]
                assert measures == pytest.approx(values, abs=2e-5)
                index += 1


def test_passages_in_groups_score_as_single_ones(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = wrap_model(models[0]), drafter_source(wrap_model(models[1]))
    full = score(target, source, PASSAGES * 3, Sampling(1.0))
    monkeypatch.setattr("draftsmith.decode.evaluation.diagnose.agreement._TOKENS_AT_ONCE", 9)
    progress: list[tuple[int, int]] = []
    parts = score(target, source, PASSAGES * 3, Sampling(1.0), lambda *numbers: progress.append(numbers))
    np.testing.assert_allclose(parts.measures["overlap"], full.measures["overlap"], atol=1e-5)
    np.testing.assert_array_equal(parts.passage_T, full.passage_T)
    assert len(progress) > 3
    assert progress[-1] == (12, 12)
    with pytest.raises(ValueError, match="1 passages"):
        score(target, source, [Passage([1, 2], [])], Sampling())


@pytest.mark.parametrize(("name", "options"), [("speculative", {"gamma": 3}), ("bpd", {}), ("bigram", {"gamma": 2})])
def test_draft_attempts_are_those_of_decoding(
    models: Any, table: BigramTable, make_heads: Any, name: str, options: dict[str, Any]
) -> None:
    target, sampling, limits = wrap_model(models[0]), Sampling(), Limits(29)
    heads = make_heads(2, 32, VOCAB)
    parts = Parts(wrap_model(models[1]), heads, table)
    method = build_method(name, parts, sampling, **options)
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]
    texts = sample_texts(target, prompts, limits, sampling)
    passages = [Passage(*pair) for pair in zip(prompts, texts, strict=True)]
    sources = {"speculative": lambda: drafter_source(wrap_model(models[1]))}
    sources |= {"bpd": lambda: heads_source(heads, torch.float32)}  # type: ignore[dict-item]
    sources |= {"bigram": lambda: table_source(TableChain(table, 2, TableSource(2)), target.device)}  # type: ignore[dict-item]
    source = sources[name]()
    scores = score(target, source, passages, sampling)

    tally, attempts = Tally(), []
    for seed, prompt in enumerate(prompts):
        for step in generate(target, *method, [prompt], limits, sampling, Rng.for_rows(seed, 1)):
            tally.add_step(step, 0)
        attempts.append(draft_attempts(trace(target, method, prompt, limits, sampling, seed)))
    starts = np.searchsorted(scores.passage_T, range(len(prompts)))
    for number, row in enumerate(attempts):
        for attempt in row:
            agreed = scores.measures["agree"][attempt.depth if name == "bpd" else 0, starts[number] + attempt.position]
            assert attempt.accepted == (attempt.drafted == texts[number][attempt.position]) == bool(agreed)
    count = sum(map(len, attempts))
    assert 0 <= tally.examined - count <= 3 * len(prompts)  # decoding also examines drafts beyond the limit
    assert sum(not attempt.accepted for row in attempts for attempt in row) <= tally.rejections


def test_only_significant_losses_are_reported() -> None:
    def stages(after: list[float]) -> list[Stage]:
        counts = np.full(len(after), 10.0)
        sums = [(np.full(len(after), 9.0), counts), (np.array(after), counts)]
        values = [float(over.sum() / under.sum()) for over, under in sums]
        keys = ("own", "decoding")
        return [Stage(key, key, value, sums=pair) for key, value, pair in zip(keys, values, sums, strict=True)]

    (finding,) = stage_findings(stages([5.0, 6.0, 5.0, 6.0]))
    assert (finding.check, finding.is_fault, finding.lost) == ("drafting", False, pytest.approx(0.35))
    assert stage_findings(stages([0.0, 10.0, 10.0, 10.0])) == [], "the loss comes from one text of four"
    record, files = (Stage(key, key, value) for key, value in (("record", 0.8), ("files", 0.7)))
    for other_target, cause in ((False, "export"), (True, "target")):
        (finding,) = stage_findings([record, files], other_target=other_target)
        assert (finding.check, finding.is_fault, finding.lost) == (cause, True, pytest.approx(0.1))
    swapped = [Stage("record", "", 0.5, [0.7, 0.3]), Stage("files", "", 0.5, [0.3, 0.7])]
    assert [finding.check for finding in stage_findings(swapped)] == ["export"]


def test_files_are_compared_with_incomplete_training_metrics() -> None:
    record, files = Stage("record", "", None, [None, 0.5]), Stage("files", "", 0.4, [0.4, 0.485])
    (finding,) = stage_findings([record, files])
    assert (finding.check, finding.lost) == ("export", None)
    assert "head1_top1 0.500 → 0.485" in finding.what
    assert stage_findings([record, files], rounds=True) == [], "rounding to 16 bits can cause this loss"


SERVED = {"a": 10, "b": 20, "c": 12}


@pytest.mark.parametrize(
    ("change", "gamma", "reason"),
    [
        ({}, 3, None),
        ({"prompt_tokens": {"a": 11, "b": 23, "c": 12}}, 3, r"+1 to +3 in 2 of 3 prompts"),
        ({}, 2, "drafts 3 tokens per step, but 'row' drafts 2"),
        ({}, 4, "drafts 3 tokens per step, but 'row' drafts 4"),
        ({"tokens_per_step": 3.0}, 3, "reaches 3.00 tokens per step, expected 2.00"),
        ({"drafted_per_step": None}, 3, "does not report draft tokens"),
    ],
)
def test_differences_of_a_server_are_reported(change: dict[str, Any], gamma: int, reason: str | None) -> None:
    row: dict[str, Any] = {"label": "load", "prompt_tokens": SERVED, "drafted_per_step": 3.0, "tokens_per_step": 2.0}
    findings = list(compare_server(ServerPrediction("row", gamma, [1.0, 0.0], SERVED, {}), row | change))
    assert [(reason or "") in finding.what for finding in findings] == [True] * (reason is not None)


def test_measurements_take_precedence_over_predictions() -> None:
    server = ServerPrediction("speculative", 2, [0.5, 0.5], {}, {"a": (60, 20), "b": (30, 20), "c": (1, 1)})
    assert server.tokens_per_step(2, ["a", "b", "unknown"]) == 90 / 40
    assert server.tokens_per_step(2, ["unknown"]) == server._replace(measured={}).tokens_per_step(2, ["a"]) == 1.75
    assert server.tokens_per_step(1, ["a", "b"]) == 1.5, "shorter drafts are predicted from the acceptance rates"
