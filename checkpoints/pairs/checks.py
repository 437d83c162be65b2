"""Are a target and a drafter a pair? Every check, and what each finding means for those who decode with the two.

The engines' rules were read in their own code: `transformers/generation/utils.py` (_validate_generation_mode), vLLM's
`config/speculative.py`, SGLang's `speculative/standalone_worker.py`, llama.cpp's `common/speculative.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..artifact.artifact import file_faults
from ..artifact.model_ref import tokenizer_fingerprint
from ..storage.names import DRAFT_VOCABULARY
from ..storage.places import here
from ..verify.inspect import describe
from .sides import Diagnosis, Effect, Finding, Side, both, refused, works_but
from .tokenizers import end_ids, tokenizer_findings, wrapping

LLAMA_CPP_SIZES = 128
"""By how much llama.cpp lets the sizes of two vocabularies differ."""
LLAMA_CPP_FIRST = 5
"""The first id whose text it compares."""
_OTHER = "the artifact's manifest says that it was made with another tokenizer"
_SHOWN = 3


def examine(target: Side, drafter: Side) -> Diagnosis:
    """Compare all that is known of the two."""
    findings = [*_kind(target, drafter), *_sizes(target, drafter)]
    for side, name in ((target, "target"), (drafter, "drafter")):
        findings += _by_itself(side, name)
    if target.tokenizer is None or drafter.tokenizer is None:
        findings += _no_tokenizer(target, drafter)
    else:
        findings += [*_token_texts(target, drafter), *_special_ids(target, drafter)]
        findings += tokenizer_findings(target, drafter)
    findings += [*_context(target, drafter), *_draft_vocabulary(drafter)]
    if not {"token texts", "missing tokens"} & {one.check for one in findings}:  # which say the same
        findings += _fingerprint(target, drafter)
    return Diagnosis(target.source, drafter.source, tuple(_facts(target, drafter)), tuple(findings))


def other_fingerprint(target: Side, drafter: Side) -> bool:
    """Whether the drafter is an artifact that was made with another tokenizer than the target's."""
    made_with = drafter.manifest.tokenizer_fingerprint if drafter.manifest else None
    if made_with is None or target.tokenizer is None:
        return False
    return made_with != tokenizer_fingerprint(target.tokenizer)


def _facts(target: Side, drafter: Side) -> Iterator[tuple[str, str, str]]:
    facts: dict[str, Callable[[Side], str]] = {
        "vocab_size": lambda side: f"{side.vocab_size:,}",
        "tokens of the tokenizer": lambda side: "none" if side.tokenizer is None else f"{len(side.vocab):,}",
        "rows of the embedding": lambda side: _known(side.rows),
        "rows of the output layer": lambda side: _known(side.head_rows),
        "tied": lambda side: "yes" if getattr(side.config, "tie_word_embeddings", False) else "no",
        "positions": lambda side: _positions(side) + (f", rotary ({side.rotary})" if side.rotary else ""),
        "type": lambda side: str(side.config.model_type),
        "dtype": lambda side: str(getattr(side.config, "dtype", None) or "not given").removeprefix("torch."),
        "ends a text with": lambda side: ", ".join(map(str, end_ids(side))) or "nothing",
        "proposes": _proposes,
        "chat template": lambda side: "yes" if getattr(side.tokenizer, "chat_template", None) else "no",
    }
    for name, value_of in facts.items():
        yield name, value_of(target), value_of(drafter)


def _known(number: int | None) -> str:
    return "not known" if number is None else f"{number:,}"


def _proposes(side: Side) -> str:
    proposed = side.manifest.shapes.get("proposed_tokens") if side.manifest else None
    return "any token" if proposed is None else f"{proposed:,} of {side.vocab_size:,} tokens"


def _kind(target: Side, drafter: Side) -> Iterator[Finding]:
    names = ("a decoder", "an encoder-decoder")
    kinds = both(lambda side: names[bool(side.config.is_encoder_decoder)], target, drafter)
    if kinds[0] != kinds[1]:
        what = "they are models of different kinds"
        yield Finding("kind of model", what, *kinds, refused("both must be decoders, or both encoder-decoders"))
    elif kinds[0] == names[True]:
        effects = refused("it does not draft with encoder-decoders", "vllm", "sglang", "llama.cpp")
        yield Finding("kind of model", "both are encoder-decoders, with which few engines draft", *kinds, effects)


def _sizes(target: Side, drafter: Side) -> Iterator[Finding]:
    mine, theirs = target.vocab_size, drafter.vocab_size
    if mine == theirs:
        return
    same = "both must have the same vocab_size"
    by_text = "unless `tokenizer` and `assistant_tokenizer` are given too: then drafts are translated by their text"
    effects = refused(f"generate() stops at different vocab_sizes, {by_text}", "transformers")
    effects |= refused(f"{same} (or `use_heterogeneous_vocab`, which drafts greedily)", "vllm")
    effects |= refused(same, "sglang")
    effects |= refused(f"{same}, but for `speculative` alone, which drafts by way of the text", "draftsmith")
    if (gap := abs(mine - theirs)) > LLAMA_CPP_SIZES:
        effects |= refused(f"sizes may differ by {LLAMA_CPP_SIZES} at most, these do by {gap:,}", "llama.cpp")
    values = both(
        lambda side: f"{side.vocab_size:,}" + (f" ({len(side.vocab):,} tokens)" if side.tokenizer is not None else ""),
        *(target, drafter),
    )
    yield Finding("vocab_size", "the configurations give different sizes", *values, effects)


def _by_itself(side: Side, name: str) -> Iterator[Finding]:
    """Whether a side's weights are loaded here at all, and are all that its configuration declares; and whether an
    artifact that is here is what its manifest says."""

    def finding(check: str, what: str, value: str, effects: dict[str, Effect]) -> Finding:
        return Finding(check, what, *((value, "–") if name == "target" else ("–", value)), effects)

    if fault := side.weights_fault:
        effects = refused(f"the {name}: {fault}", "draftsmith")
        yield finding("weights", f"the {name}'s are not loaded here", fault, effects)
    wrong = [
        f"{part} {rows:,}"
        for part, rows in (("embedding", side.rows), ("output layer", side.head_rows))
        if rows is not None and rows != side.vocab_size
    ]
    if wrong:
        what, value = f"the {name}'s weights and configuration disagree", f"{', '.join(wrong)} rows"
        effects = refused(f"the {name} does not load as it stands")
        yield finding("rows", what, f"{value}, vocab_size {side.vocab_size:,}", effects)
    if shown := "; ".join(describe(side.fit, "it")):
        effects = refused(f"the {name} does not load as it stands, or with random numbers for what it lacks")
        yield finding("tensors", f"the {name}'s weights are not those of its configuration", shown, effects)
    if side.manifest is not None and here(side.source) and (faults := file_faults(side.folder, side.manifest)):
        reason = "it loads no artifact whose files are not what its artifact.json says"
        effects = refused(reason, "draftsmith") if name == "drafter" else {}
        yield finding("changed files", f"the {name} is not what its artifact.json says", _list(faults), effects)


def _list(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else "")


def _no_tokenizer(target: Side, drafter: Side) -> Iterator[Finding]:
    values = both(lambda side: "none" if side.tokenizer is None else "one", target, drafter)
    effects = refused("its converter needs the files of a tokenizer in each folder", "llama.cpp")
    known = drafter.manifest is not None and drafter.manifest.tokenizer_fingerprint is not None
    if not (known and target.tokenizer is not None):
        effects = works_but("nothing says that an id means the same to both") | effects
    yield Finding("tokenizer", "there are not two to compare", *values, effects)


def _token_texts(target: Side, drafter: Side) -> Iterator[Finding]:
    """Ids that stand for other texts, and tokens that only one side has."""
    mine, theirs = ({number: text for text, number in side.vocab.items()} for side in (target, drafter))
    differing = sorted(number for number in mine.keys() & theirs.keys() if mine[number] != theirs[number])
    effects = _vocabulary_effects(target, drafter, mine, theirs)
    if differing:
        values = both(lambda side: _list([f"{number} {side[number]!r}" for number in differing]), mine, theirs)
        order = ", the same tokens in another order" if set(mine.values()) == set(theirs.values()) else ""
        yield Finding("token texts", f"{len(differing):,} ids stand for other tokens{order}", *values, effects)
    lacking = [
        sorted(one.keys() - other.keys(), key=lambda number: (number, one[number]))
        for one, other in ((mine, theirs), (theirs, mine))
    ]
    if any(lacking):
        sides = ((mine, lacking[0]), (theirs, lacking[1]))
        values = both(lambda side: _list([f"{number} {side[0][number]!r}" for number in side[1]]) or "–", *sides)
        what = f"{len(lacking[0]):,} ids are tokens of the target alone, {len(lacking[1]):,} of the drafter alone"
        yield Finding("missing tokens", what, *values, effects)


def _vocabulary_effects(target: Side, drafter: Side, mine: dict[int, str], theirs: dict[int, str]) -> dict[str, Effect]:
    lossy = "such ids are drafted for what they mean to the drafter, and rejected; the output stays the target's"
    effects = works_but(f"it compares sizes alone: {lossy}", "transformers", "vllm")
    effects |= refused("both tokenizers must have the same get_vocab()", "sglang")
    is_other = other_fingerprint(target, drafter)
    effects |= refused(_OTHER, "draftsmith") if is_other else works_but(f"ids are not looked at: {lossy}", "draftsmith")
    for number in range(LLAMA_CPP_FIRST, min(target.vocab_size, drafter.vocab_size)):
        pad = f"[PAD{number}]"  # what its converter calls a row without a token
        if mine.get(number, pad) != theirs.get(number, pad):
            reason = f"texts must be the same from id {LLAMA_CPP_FIRST} on, {number} is the first that differs"
            return effects | refused(reason, "llama.cpp")
    return effects


def _special_ids(target: Side, drafter: Side) -> Iterator[Finding]:
    for name, where in (("bos", "begins"), ("eos", "ends")):
        mine, theirs = (str(getattr(side.tokenizer, f"{name}_token_id")) for side in (target, drafter))
        if mine != theirs:
            reason = f"engines go by the target's: a drafter that {where} its texts with another token drafts that"
            effects = works_but(reason, "transformers", "vllm", "sglang", "draftsmith")
            if name in (*wrapping(target.tokenizer), *wrapping(drafter.tokenizer)):
                effects |= refused(f"the {name} that is added to a text must be the same", "llama.cpp")
            yield Finding("special ids", f"{name} is another token", mine, theirs, effects)


def _draft_vocabulary(drafter: Side) -> Iterator[Finding]:
    """An artifact as training leaves it; exports have what others read."""
    if (drafter.folder / DRAFT_VOCABULARY).is_file() and not (drafter.manifest and drafter.manifest.export):
        reason = f"it takes {DRAFT_VOCABULARY} for weights; `draftsmith export` leaves that out"
        effects = refused(reason, "vllm")
        if drafter.manifest is None or "proposed_tokens" in drafter.manifest.shapes:
            reason = "it has it propose any token, of which some were never trained; `draftsmith export` mends that"
            effects |= works_but(reason, "transformers", "sglang", "llama.cpp")
        what = "this engine alone reads what the drafter has instead of a whole output layer"
        yield Finding("draft vocabulary", what, "–", DRAFT_VOCABULARY, effects)


def _context(target: Side, drafter: Side) -> Iterator[Finding]:
    """Positions, and for this engine alone windows that it does not keep: the others keep all."""
    effects = dict[str, Effect]()
    theirs = drafter.positions
    if _shorter(theirs, target.positions):
        after = "there are no positions beyond that: a longer text stops with an error"
        if drafter.rotary:
            after = "drafts beyond that come from positions it was never trained for"
        effects = works_but(f"the drafter has {theirs:,} positions; {after}", "transformers")
        effects |= works_but(f"its newest runner serves the target with the drafter's {theirs:,} positions", "vllm")
        effects |= works_but(f"it starts only with --context-length {theirs} or less", "sglang")
        effects |= works_but(f"the drafter's context is at most {theirs:,}", "llama.cpp")
    if _shorter(drafter.limit, target.limit):
        effects |= works_but(f"texts of more than {drafter.limit:,} tokens, drafts included, are refused", "draftsmith")
    if effects:
        yield Finding("context length", "the drafter's is shorter", *both(_positions, target, drafter), effects)


def _shorter(drafter: int | None, target: int | None) -> bool:
    return drafter is not None and target is not None and drafter < target


def _positions(side: Side) -> str:
    window = f"a sliding window of {side.window:,}" if side.window else ""
    return ", ".join(filter(None, (f"{side.positions:,} positions" if side.positions else "", window))) or "no limit"


def _fingerprint(target: Side, drafter: Side) -> Iterator[Finding]:
    """An artifact whose manifest names another tokenizer."""
    if not other_fingerprint(target, drafter):
        return
    assert drafter.manifest is not None
    wanted, named = tokenizer_fingerprint(target.tokenizer), str(drafter.manifest.tokenizer_fingerprint)
    yield Finding("fingerprint", _OTHER, f"{wanted[:16]}…", f"{named[:16]}…", refused(_OTHER, "draftsmith"))
