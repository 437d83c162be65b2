"""Agreement on given texts against plain forwards token by token, and what becomes of every token that was tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.diagnose.agreement import (
    Cell,
    DrafterSource,
    HeadsSource,
    Passage,
    Resamples,
    TableSource,
    bands,
    cells,
    expected_steps,
    interval,
    probabilities,
    quantile_edges,
    score,
    tried,
    within,
)
from draftsmith.decode.evaluation.diagnose.head_offsets import Places, places_of
from draftsmith.decode.evaluation.diagnose.token_classes import CLASSES, classify
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.replay.recording import sample_texts
from draftsmith.decode.evaluation.trace import trace
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.ngrams import TableChain
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling, warp
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 24
SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=5, top_p=0.9)]
PASSAGES = [
    Passage([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]),
    Passage([7], [2, 3, 2, 3]),
    Passage([2, 2], []),
    Passage([11, 12, 13], [14, 15, 16, 17, 18], [False, True, True, False, True]),
]


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target, and a drafter that often agrees with it: it is the target with some noise."""
    made = []
    for noise in (0.0, 0.08):
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, max_position_embeddings=128)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            torch.manual_seed(7)
            for parameter in model.parameters():
                parameter += noise * torch.randn_like(parameter)
        made.append(model)
    return made[0], made[1]


@pytest.fixture(scope="module")
def table() -> BigramTable:
    """Counts of a few texts."""
    rng = np.random.default_rng(0)
    return BigramTable.from_documents([rng.integers(0, VOCAB, 20) for _ in range(30)], VOCAB)


def logits_of(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].float()


def expected(target: torch.Tensor, draft: torch.Tensor, best: int, said: int, sampling: Sampling, draws: bool) -> Any:
    """hit, overlap, agree, accepted of one token, by loops over the vocabulary."""
    p, q = target.softmax(-1).tolist(), draft.softmax(-1).tolist()
    overlap = sum(min(one, other) for one, other in zip(p, q, strict=True))
    warped_p, warped_q = (warp(each[None], sampling)[0].tolist() for each in (target, draft))
    agree = float(best == int(target.argmax()))
    accepted = warped_p[best] if not draws else sum(map(min, warped_p, warped_q))
    return float(best == said), overlap, agree, agree if sampling.greedy else accepted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scores_of_a_drafter_are_those_of_plain_forwards(models: Any, sampling: Sampling) -> None:
    target, drafter = models
    scores = score(wrap_model(target), DrafterSource(wrap_model(drafter)), PASSAGES, sampling)
    at = 0
    for number, (prompt, text, kept) in enumerate(PASSAGES):
        for place, said in enumerate(text):
            ids = [*prompt, *text[:place]]
            p, q = logits_of(target, ids), logits_of(drafter, ids)
            found = [float(getattr(scores, f"{name}_KT")[0, at]) for name in ("hit", "overlap", "agree", "accepted")]
            assert found == pytest.approx(expected(p, q, int(q.argmax()), said, sampling, True), abs=2e-5)
            probs = p.softmax(-1)
            assert scores.entropy_T[at] == pytest.approx(-float((probs * probs.log()).sum()), abs=1e-4)
            assert (scores.passage_T[at], scores.place_T[at]) == (number, place)
            assert scores.position_T[at] == len(ids)
            assert scores.valid_KT[0, at] == (kept is None or kept[place])
            at += 1
    assert at == len(scores.place_T)
    over_P, under_P = scores.sums("overlap")
    assert under_P.tolist() == [7, 4, 0, 3]
    assert scores.mean("overlap") == pytest.approx(over_P.sum() / 14)
    assert scores.mean("overlap", scores.place_T > 90) is None


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scores_of_heads_speak_of_the_token_so_many_places_on(models: Any, make_heads: Any, sampling: Sampling) -> None:
    target, heads = models[0], make_heads(3, 32, VOCAB)
    scores = score(wrap_model(target), HeadsSource(heads, torch.float32), PASSAGES, sampling)
    at = 0
    for prompt, text, kept in PASSAGES:
        ids = [*prompt, *text]
        with torch.inference_mode():
            states_TD = target.model(torch.tensor([ids])).last_hidden_state[0]
        for place, said in enumerate(text):
            for head in range(3):
                state = len(prompt) + place - 2 - head  # it speaks of the token 2 + head places behind its own
                valid = place >= head and state >= 0 and (kept is None or kept[place])
                assert scores.valid_KT[head, at] == valid
                if valid:
                    p, q = logits_of(target, ids[: len(prompt) + place]), heads(states_TD[state])[head]
                    wanted = expected(p, q, int(q.argmax()), said, sampling, False)
                    names = ("hit", "overlap", "agree", "accepted")
                    found = [float(getattr(scores, f"{name}_KT")[head, at]) for name in names]
                    assert found == pytest.approx(wanted, abs=2e-5)
            at += 1
    assert len(scores.by_depth("hit")) == 3


@pytest.mark.parametrize("order", [1, 2])
def test_scores_of_a_table_are_those_of_its_rows(models: Any, table: BigramTable, order: Any) -> None:
    target, sampling = models[0], Sampling(0.7)
    proposer = TableChain(table, 2, order, 1.0)
    rows = table.distributions("cpu", 1.0)
    for each in (sampling, Sampling()):
        scores = score(wrap_model(target), TableSource(proposer, torch.device("cpu")), PASSAGES, each)
        at = 0
        for prompt, text, _ in PASSAGES:
            for place, said in enumerate(text):
                ids = [*prompt, *text[:place]]
                last = torch.tensor([ids[-1]])
                q = (rows.unigram_V if order == 1 else rows.after(last)[0]).log()
                best = int(rows.unigram_V.argmax()) if order == 1 else int(rows.most_likely(last)[0])
                wanted = expected(logits_of(target, ids), q, best, said, each, True)
                found = [float(getattr(scores, f"{n}_KT")[0, at]) for n in ("hit", "overlap", "agree", "accepted")]
                assert found == pytest.approx(wanted, abs=2e-5)
                at += 1


def test_many_passages_are_read_in_groups_as_if_one_by_one(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = wrap_model(models[0]), DrafterSource(wrap_model(models[1]))
    whole = score(target, source, PASSAGES * 3, Sampling(1.0))
    monkeypatch.setattr("draftsmith.decode.evaluation.diagnose.agreement._TOKENS_AT_ONCE", 9)
    done: list[tuple[int, int]] = []
    parts = score(target, source, PASSAGES * 3, Sampling(1.0), lambda *numbers: done.append(numbers))
    np.testing.assert_allclose(parts.overlap_KT, whole.overlap_KT, atol=1e-5)
    np.testing.assert_array_equal(parts.passage_T, whole.passage_T)
    assert len(done) > 3
    assert done[-1] == (12, 12)
    with pytest.raises(ValueError, match="without any token"):
        score(target, source, [Passage([1, 2], [])], Sampling())


@given(prompt=st.integers(1, 30), text=st.integers(0, 40), window=st.integers(2, 19))
@settings(max_examples=200, deadline=None)
def test_pieces_within_a_window_hold_every_token_once(prompt: int, text: int, window: int) -> None:
    ids = list(range(prompt + text))
    pieces = list(within(Passage(ids[:prompt], ids[prompt:]), window))
    assert [token for piece in pieces for token in piece.text] == ids[prompt:]
    for piece in pieces:
        whole = [*piece.prompt, *piece.text]
        assert len(whole) <= window
        assert len(piece.prompt) >= 1
        assert whole == list(range(whole[0], whole[0] + len(whole)))
        if piece.text and piece.text[0] >= window:
            assert len(piece.prompt) >= window // 2  # no token is read without some of what comes before it
        else:
            assert whole[0] == 0


def test_a_window_hides_what_lies_further_back(models: Any) -> None:
    target, drafter = models
    passages = [Passage([3, 1, 4], list(range(10))), Passage(list(range(9)), [1, 2, 3])]
    found = score(wrap_model(target), DrafterSource(wrap_model(drafter), window=6), passages, Sampling(1.0))
    at = 0
    for passage in passages:
        for piece in within(passage, 6):
            for place in range(len(piece.text)):
                whole = [*passage.prompt, *passage.text][: int(found.position_T[at])]
                p = logits_of(target, whole).softmax(-1)
                q = logits_of(drafter, [*piece.prompt, *piece.text[:place]]).softmax(-1)
                assert found.overlap_KT[0, at] == pytest.approx(float(torch.minimum(p, q).sum()), abs=2e-5)
                at += 1
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        list(within(passages[0], 1))


@pytest.mark.parametrize(("name", "options"), [("speculative", {"gamma": 3}), ("bpd", {}), ("bigram", {"gamma": 2})])
def test_greedy_steps_and_tried_tokens_are_those_that_decoding_takes(
    models: Any, table: BigramTable, make_heads: Any, name: str, options: dict[str, Any]
) -> None:
    target, sampling, limits = wrap_model(models[0]), Sampling(), Limits(29)
    heads = make_heads(2, 32, VOCAB)
    parts = Parts(wrap_model(models[1]), heads, table)
    method = build_method(name, parts, sampling, **options)
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]
    texts = sample_texts(target, prompts, limits, sampling)
    passages = [Passage(*pair) for pair in zip(prompts, texts, strict=True)]
    made = {"speculative": lambda: DrafterSource(wrap_model(models[1]))}
    made |= {"bpd": lambda: HeadsSource(heads, torch.float32)}  # type: ignore[dict-item]
    made |= {"bigram": lambda: TableSource(TableChain(table, 2, 2, 1.0), target.device)}  # type: ignore[dict-item]
    source = made[name]()
    scores = score(target, source, passages, sampling)

    tally, found = Tally(), []
    for place, prompt in enumerate(prompts):
        for step in generate(target, *method, [prompt], limits, sampling, Rng.for_rows(place, 1)):
            tally.add_step(step, 0)
        found.append(tried(trace(target, method, prompt, limits, sampling, place)))
    assert expected_steps(scores, passages, options.get("gamma", 2)) == pytest.approx(tally.tokens / tally.steps)
    agreed = {(n, p): a for n, p, a in zip(scores.passage_T, scores.place_T, scores.agree_KT.T, strict=True)}
    for number, row in enumerate(found):
        for each in row:
            assert each.said == texts[number][each.place]
            assert each.accepted == (each.drafted == each.said) == bool(agreed[number, each.place][
                each.depth if name == "bpd" else 0
            ])  # fmt: skip
    count = sum(map(len, found))
    assert 0 <= tally.examined - count <= 3 * len(prompts)  # all but those behind the limit
    assert sum(not each.accepted for row in found for each in row) <= tally.rejections


def test_odds_of_tried_tokens_are_those_of_plain_forwards(models: Any) -> None:
    target, drafter = models
    scorer, parts = wrap_model(target), Parts(wrap_model(drafter))
    sampling, prompt = Sampling(0.8), [3, 1, 4]
    method = build_method("speculative", parts, sampling, gamma=3)
    steps = trace(scorer, method, prompt, Limits(25), sampling, seed=2)
    text = [token for step in steps for token in (*step.accepted, step.next_id) if token is not None]
    found = tried(steps)
    assert any(not each.accepted for each in found)
    (odds,) = probabilities(scorer, DrafterSource(wrap_model(drafter)), [Passage(prompt, text)], [found])
    for each, mine in zip(found, odds, strict=True):
        ids = [*prompt, *text[: each.place]]
        p, q = logits_of(target, ids).softmax(-1), logits_of(drafter, ids).softmax(-1)
        assert mine == pytest.approx((float(p[each.drafted]), float(q[each.drafted]), float(p[each.said])), abs=2e-5)


def test_intervals_are_those_of_whole_texts_drawn_anew() -> None:
    rng = np.random.default_rng(1)
    under_P = np.full(60, 10.0)
    over_P = 10.0 * (rng.random(60) < 0.7)  # the tokens of a text are all right or all wrong
    resamples = Resamples(60)
    ratios_R = resamples.ratios(over_P[:, None], under_P[:, None])
    assert ratios_R is not None
    span = interval(ratios_R[:, 0])
    assert span is not None
    rate = over_P.sum() / under_P.sum()
    error = math.sqrt(rate * (1 - rate) / 60)  # of 60 texts, not of 600 tokens
    assert span[1] - span[0] == pytest.approx(2 * 1.96 * error, rel=0.12)
    again_R = Resamples(60).ratios(over_P[:, None], under_P[:, None])
    np.testing.assert_array_equal(ratios_R, again_R)  # so that differences of two measures are paired
    assert interval(ratios_R[:, 0] - again_R[:, 0]) == (0.0, 0.0)
    assert Resamples(2).ratios(over_P[:2, None], under_P[:2, None]) is None
    rare_P = (np.arange(60) == 0) * 10.0  # in a third of the resamples nothing is drawn at all
    assert interval(np.asarray(resamples.ratios(rare_P[:, None], rare_P[:, None]))[:, 0]) is None


def test_cells_add_up_and_the_worst_comes_first() -> None:
    rng = np.random.default_rng(2)
    names = rng.choice(["good", "bad", "rare"], 400, p=[0.6, 0.35, 0.05]).tolist()
    chance = {"good": 0.9, "bad": 0.3, "rare": 0.9}
    accepted_X = np.array([rng.random() < chance[name] for name in names])
    found = cells("kind", names, accepted_X, rng.integers(0, 20, 400), Resamples(20))
    assert found[0].name == "bad"
    assert sum(cell.examined for cell in found) == 400
    assert sum(cell.accepted for cell in found) == accepted_X.sum()
    assert sum(cell.rejections_share for cell in found) == pytest.approx(1)
    assert sum(cell.excess for cell in found) == pytest.approx(0)
    for cell in found:
        assert isinstance(cell, Cell)
        assert cell.share == pytest.approx(accepted_X[[name == cell.name for name in names]].mean())
        assert cell.interval is None or cell.interval[0] <= cell.share <= cell.interval[1]
        assert [names[member] for member in cell.members] == [cell.name] * cell.examined
    all_good = cells("kind", ["a", "b"], np.array([True, True]), np.array([0, 1]), Resamples(2))
    assert [(cell.rejections_share, cell.excess) for cell in all_good] == [(0, 0), (0, 0)]


def test_bands_are_named_by_what_they_hold() -> None:
    assert bands(np.array([0, 1, 3, 4, 900]), (0, 1, 2, 4)) == ["0", "1", "2 to 3", "4 and more", "4 and more"]
    assert bands(np.array([0.1, 0.7]), [0.1, 0.5], " nats", 1) == ["0.1 to 0.5 nats", "0.5 and more nats"]
    assert quantile_edges(np.array([5.0, 5.0, 5.0, 5.0]), 4) == [5.0]
    edges = quantile_edges(np.arange(100.0), 4)
    assert np.bincount(np.searchsorted(edges, np.arange(100.0), side="right") - 1).tolist() == [25] * 4


def classes_of(*pieces: str, special: str = "<none>") -> list[str]:
    return classify(pieces, [piece == special for piece in pieces])


def test_each_token_has_the_class_that_a_reader_would_give_it() -> None:
    pieces = ("Ask", " Al", "ice", " in", " 19", "84", ",", " please", ".", " The", "\n\n", "- The", " end", "<e>")
    said = classes_of(*pieces, special="<e>")
    assert said == [
        "word", "name", "continuation", "word", "digits", "digits", "punctuation", "word", "punctuation", "word",
        "whitespace", "word", "word", "special",
    ]  # fmt: skip
    assert classes_of("don", "'t", " “Hi”", "", "é") == ["word", "continuation", "non-ASCII", "non-ASCII", "non-ASCII"]
    fenced = classes_of("Use", ":\n", "```", "py\n", "x", " plus", " 1", "\n", "``", "`", " then", " `f", " it`", " so")
    assert fenced == [
        "word",
        "punctuation",
        *["code"] * 5,
        "whitespace",
        "code",
        "code",
        "word",
        "code",
        "code",
        "word",
    ]
    assert classes_of("a", "_b", " ==", " f", "()", " (", "c", ")") == [
        "word", "code", "code", "word", "code", "punctuation", "word", "punctuation"
    ]  # fmt: skip
    assert classes_of(" unclosed", " `", "tick", "\n", "free") == ["word", "punctuation", "word", "whitespace", "word"]


@given(pieces=st.lists(st.text(alphabet="aZ 1.\n`é_", max_size=5), max_size=12))
@settings(max_examples=200, deadline=None)
def test_every_token_has_one_class_whatever_the_text(pieces: list[str]) -> None:
    found = classify(pieces, [False] * len(pieces))
    assert len(found) == len(pieces)
    assert set(found) <= set(CLASSES)
    for piece, name in zip(pieces, found, strict=True):
        assert (name == "whitespace") == (piece != "" and not piece.strip() and piece.isascii())


def test_the_callers_types_are_kept(make_llama: Callable[..., LlamaForCausalLM], make_heads: Any) -> None:
    target = wrap_model(make_llama(VOCAB).to(torch.bfloat16))
    precise = HeadsSource(make_heads(2, 32, VOCAB), torch.float32)
    scores = score(target, precise, PASSAGES, Sampling(1.0))
    assert scores.overlap_KT.dtype == np.float32
    assert np.isfinite(scores.overlap_KT).all()


@pytest.mark.parametrize("start", [1, 3])
def test_places_of_heads_are_counted_as_one_by_one(models: Any, make_heads: Any, start: int) -> None:
    """Texts of which some are too short to be judged; a head that is the target's own projection guesses place 0."""
    target = models[0]
    heads = make_heads(2, 32, VOCAB)
    heads.weight_KVD[1] = target.lm_head.weight.detach()
    scorer = wrap_model(target)
    prompts = [list(range(1, 1 + start)), list(range(2, 2 + start)), [5] * start, [7] * start]
    texts = [*sample_texts(scorer, prompts[:2], Limits(14), Sampling()), [1, 2, 3], []]
    passages = [Passage(*pair) for pair in zip(prompts, texts, strict=True)]
    found = places_of(scorer, heads, torch.float32, passages, batch=3)
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        hits, own, judged = np.zeros((2, 4)), 0, 0
        ids = [*prompt, *text]
        for place in range(len(prompt), len(ids) - 2):
            if place < 2 or place + 2 >= len(ids):  # no state before it; not all places are in the text
                continue
            with torch.no_grad():
                hidden_D = target.model(torch.tensor([ids[: place - 1]])).last_hidden_state[0, -1]
            guesses = heads(hidden_D).argmax(-1).tolist()
            judged += 1
            own += target.lm_head(hidden_D).argmax().item() == ids[place - 1]
            hits += np.array([[guess == ids[place - 1 + ahead] for ahead in range(4)] for guess in guesses])
        assert (found.judged_P[number], found.own_P[number]) == (judged, own)
        np.testing.assert_array_equal(found.hits_PKJ[number], hits)
    assert found.judged_P.sum() > 15
    assert found.share_KJ[1, 0] > 0.8  # the target's greedy text; not the end of the prompt
    better = Places(*(np.concatenate([part[:2]] * 4) for part in (found.hits_PKJ, found.own_P, found.judged_P)))
    assert (2, 0) in [(head, place) for head, place, _ in better.better(0.05, 0.99)]
    assert all(gain >= 0.05 for _, _, gain in better.better(0.05, 0.99))
    assert better.better(1.1, 0.99) == []


def test_sound_heads_are_not_said_to_be_in_another_place() -> None:
    """Heads of texts with runs, whose guesses stand nearer more often than in their place, for what they do not know
    they repeat; and weak ones, by chance. Of the first two in each other's place it is said."""
    rng, heads, tokens = np.random.default_rng(0), 3, 20
    ids_PS = rng.integers(0, 30, (12, tokens + heads + 2))
    for place in range(1, ids_PS.shape[1]):
        ids_PS[:, place] = np.where(rng.random(12) < 0.6, ids_PS[:, place - 1], ids_PS[:, place])
    at_JPT = np.stack([ids_PS[:, 1 + place :][:, :tokens] for place in range(heads + 2)])
    knows_KPT = rng.random((heads, 12, tokens)) < np.array([0.3, 0.15, 0.05])[:, None, None]
    guess_KPT = np.where(knows_KPT, at_JPT[1:-1], ids_PS[:, :tokens])
    hits_PKJ = (guess_KPT[:, None] == at_JPT[None]).sum(-1).transpose(2, 0, 1).astype(float)
    judged_P = np.full(12, float(tokens))
    runs = Places(hits_PKJ, 0.95 * judged_P, judged_P)
    assert (runs.share_KJ[1:].argmax(1) == 0).all()
    assert runs.share_KJ[2, 0] - runs.share_KJ[2, 3] > 0.2
    assert runs.better(0.05, 0.99) == []
    said = 0
    for _ in range(40):
        weak_PKJ = rng.binomial(tokens, 0.1, (3, heads, heads + 2)).astype(float)
        said += bool(Places(weak_PKJ, 0.95 * judged_P[:3], judged_P[:3]).better(0.05, 0.99))
    assert said == 0
    right_KJ = np.full((heads, heads + 2), 0.1)
    right_KJ[[1, 0, 2], [1, 2, 3]] = 0.5, 0.4, 0.3
    swapped = Places(rng.binomial(tokens, right_KJ, (12, *right_KJ.shape)).astype(float), 0.95 * judged_P, judged_P)
    assert [found[:2] for found in swapped.better(0.05, 0.99)] == [(1, 2), (2, 1)]
