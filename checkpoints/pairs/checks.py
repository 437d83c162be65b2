"""Static checks of a target/drafter pair, and the effects of their findings on each inference engine.

The rules follow the code of the engines: `transformers/generation/utils.py` (_validate_generation_mode), vLLM's
`config/speculative.py`, SGLang's `speculative/standalone_worker.py`, llama.cpp's `common/speculative.cpp`.
"""

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..artifact.artifact import file_faults
from ..artifact.model_ref import tokenizer_fingerprint
from ..storage.chat_templates import render_chat
from ..storage.messages import shared_length
from ..storage.names import DRAFT_VOCABULARY
from ..storage.places import find_local
from ..verify.families import family_fault, is_stateful, tree_fault
from .sides import REFUSED, Diagnosis, Effect, Finding, ModelInfo, degrade, refuse

LLAMA_CPP_SIZES = 128
"""Maximum difference between vocabulary sizes that llama.cpp accepts."""
LLAMA_CPP_FIRST = 5
"""First token id whose text llama.cpp compares."""
_OTHER = "the artifact's manifest has the fingerprint of a different tokenizer"
_SHOWN = 3
_TEXTS = (
    *("Hello, world!", "def f(x):\n    return  x\n\n\tif  x :\n        pass  ", "1234567890 3.14 -2e10 1,000"),
    *("'s 'll don't I'm", " leading and trailing ", "a" * 300, "!" * 40 + "=" * 70, "\u2581a \u2581\u2581b"),
    "na\u00efve nai\u0308ve \ufb01 \u2126 \uff21 \u00bd \u0627\u0644\u0639 \u4e2d\u6587 \ud55c\uae00 \u00e9",
    "\U0001f600\U0001f468\u200d\U0001f469 \u00a0\u3000\u200b\u2028\ufeff \x07 \r\n\r",
    *(" " * n + "x" + " " * n + "y" for n in (1, 2, 3, 4, 8, 15)),
)
_AROUND = ("{}hello", "{}\nUSER: hello", "a {} b", "a{}b", "a  {}  b", "\n{}\n")
_CHAT = (
    {"role": "user", "content": " What is a draft? "},
    {"role": "assistant", "content": "A guess."},
    {"role": "user", "content": "And then?"},
)
_TOKENS = "prompts use the target's tokenizer; a drafter trained with a different one has a lower acceptance rate"
_TEMPLATE = "prompts use the target's chat template; if the drafter was trained with its own, fewer tokens are accepted"


def examine(target: ModelInfo, drafter: ModelInfo) -> Diagnosis:
    """Run all static checks of a target/drafter pair."""
    checks = [_check_kind, _check_family, _check_sizes, _check_weights]
    if target.tokenizer is None or drafter.tokenizer is None:
        checks.append(_check_tokenizers_exist)
    else:
        checks += [_check_tokens, _check_special_ids, _check_encoding, _check_added_ends, _check_chat_template]
    checks += [_check_context, _check_draft_vocabulary, _check_fingerprint]
    findings = [finding for check in checks for finding in check(target, drafter)]
    return Diagnosis(target.source, drafter.source, tuple(findings))


def check_pair(
    target: ModelInfo, drafter: ModelInfo, consumers: Collection[str], name: str, fix: str, also: Collection[str] = ()
) -> None:
    """Raise ValueError if an engine in `consumers` does not support a target/drafter pair.

    The checks named in `also` must pass as well. The error message contains the drafter's `name` and the command `fix`,
    which repairs the drafter.
    """
    refusals = []
    for finding in examine(target, drafter).findings:
        effects = [finding.effects[each] for each in consumers if each in finding.effects]
        if finding.check in also or any(effect.outcome == REFUSED for effect in effects):
            refusals.append(f"{finding}: {'; '.join(dict.fromkeys(effect.reason for effect in effects))}")
    if refusals:
        listed = "\n- ".join(refusals)
        raise ValueError(
            f"{name} does not work with the target {target.source} in {', '.join(consumers)}:\n- {listed}\n"
            f"If only the vocabulary sizes differ, repair it with `{fix}`"
        )


def _check_kind(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    names = ("decoder", "encoder-decoder")
    kinds = _describe_both(lambda model: names[bool(model.config.is_encoder_decoder)], target, drafter)
    if kinds[0] != kinds[1]:
        effects = refuse("both must be decoders, or both encoder-decoders")
        yield Finding("kind of model", "target and drafter are different kinds of models", *kinds, effects)
    elif kinds[0] == names[True]:
        effects = refuse("encoder-decoders are not supported as drafters", "vllm", "sglang", "llama.cpp")
        yield Finding("kind of model", "few engines support encoder-decoders as drafters", *kinds, effects)


def _check_family(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Report model types and generation settings that an engine does not support."""
    for model, name in ((target, "target"), (drafter, "drafter")):
        effects = dict[str, Effect]()
        if fault := family_fault(model.config):
            effects = refuse(fault, "draftsmith")
        elif fault := tree_fault(model.config):
            effects = degrade(f"it drafts chains only, not token trees: {fault}", "draftsmith")
        elif model.config.model_type == "mpt":
            effects = degrade("MPT's ALiBi positions support chain drafts only, not token trees", "draftsmith")
        if is_stateful(model.config):
            effects |= refuse("assisted generation is not supported with stateful models", "transformers")
        elif model is target and model.generation.use_cache is False:
            effects |= refuse("assisted generation requires `use_cache: true` for the target", "transformers")
        if effects:
            of_target, of_drafter = (model.config.model_type if model is each else "" for each in (target, drafter))
            yield Finding("family", f"not all engines support the {name}'s model type", of_target, of_drafter, effects)


def _check_sizes(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    if target.vocab_size == drafter.vocab_size:
        return
    same = "both must have the same vocab_size"
    effects = refuse(f"{same}, unless `tokenizer` and `assistant_tokenizer` are passed", "transformers")
    effects |= refuse(f"{same} (or `use_heterogeneous_vocab`, which drafts greedily)", "vllm")
    effects |= refuse(same, "sglang")
    effects |= refuse(f"{same}, except with `speculative`, which re-encodes drafts as text", "draftsmith")
    if (gap := abs(target.vocab_size - drafter.vocab_size)) > LLAMA_CPP_SIZES:
        effects |= refuse(f"sizes may differ by at most {LLAMA_CPP_SIZES}, but differ by {gap:,}", "llama.cpp")
    sizes = _describe_both(lambda model: f"{model.vocab_size:,} ({len(model.vocab):,} tokens)", target, drafter)
    yield Finding("vocab_size", "the vocabulary sizes of the configurations differ", *sizes, effects)


def _check_weights(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Check each model's weights against its configuration, and an artifact's files against its manifest."""
    for model, name in ((target, "target"), (drafter, "drafter")):
        for check, problem, value, effects in _weights_of(model, name):
            yield Finding(check, problem, *((value, "") if name == "target" else ("", value)), effects)


def _weights_of(model: ModelInfo, name: str) -> Iterator[tuple[str, str, str, dict[str, Effect]]]:
    if fault := model.weights_fault:
        yield "weights", f"the {name} cannot be loaded", fault, refuse(f"the {name}: {fault}", "draftsmith")
    wrong = [
        f"{part} {rows:,}"
        for part, rows in (("embedding", model.rows), ("output layer", model.head_rows))
        if rows is not None and rows != model.vocab_size
    ]
    if wrong:
        value = f"{', '.join(wrong)} rows, vocab_size {model.vocab_size:,}"
        effects = refuse(f"the {name} cannot be loaded")
        yield "rows", f"the weights of the {name} do not match its configuration", value, effects
    faults = file_faults(model.folder, model.manifest) if model.manifest and find_local(model.source) else []
    if faults:
        effects = refuse("artifacts with changed files are not loaded", "draftsmith") if name == "drafter" else {}
        yield "changed files", f"files of the {name} differ from its artifact.json", _list(faults), effects


def _describe_both(describe: Callable[[Any], str], target: Any, drafter: Any) -> tuple[str, str]:
    return describe(target), describe(drafter)


def _list(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else "")


def _check_tokenizers_exist(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    values = _describe_both(lambda model: "none" if model.tokenizer is None else "one", target, drafter)
    effects = refuse("its converter requires tokenizer files in both folders", "llama.cpp")
    is_known = drafter.manifest is not None and drafter.manifest.tokenizer_fingerprint is not None
    if not (is_known and target.tokenizer is not None):
        effects = degrade("it is unknown whether token ids have the same meaning for both") | effects
    yield Finding("tokenizer", "target or drafter has no tokenizer to compare", *values, effects)


def _check_tokens(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    of_target, of_drafter = ({number: text for text, number in model.vocab.items()} for model in (target, drafter))
    differing = sorted({number for number, _ in of_target.items() ^ of_drafter.items()})
    if not differing:
        return
    lossy = "drafts with these ids are rejected, and the output stays lossless"
    effects = degrade(f"only sizes are compared: {lossy}", "transformers", "vllm", "draftsmith")
    effects |= refuse("both tokenizers must have the same vocabulary (`get_vocab()`)", "sglang")
    if has_other_fingerprint(target, drafter):
        effects |= refuse(_OTHER, "draftsmith")
    compared = range(LLAMA_CPP_FIRST, min(target.vocab_size, drafter.vocab_size))
    if (first := next((number for number in differing if number in compared), None)) is not None:
        reason = f"token texts must be equal from id {LLAMA_CPP_FIRST} on, but id {first} differs"
        effects |= refuse(reason, "llama.cpp")
    order = ", although both have the same tokens" if set(of_target.values()) == set(of_drafter.values()) else ""
    values = _describe_both(
        lambda model: _list([f"{number} {model.get(number)!r}" for number in differing]), of_target, of_drafter
    )
    yield Finding("token texts", f"{len(differing):,} ids have different tokens{order}", *values, effects)


def has_other_fingerprint(target: ModelInfo, drafter: ModelInfo) -> bool:
    """Check if the drafter's manifest has a tokenizer fingerprint that differs from the target's."""
    made_with = drafter.manifest.tokenizer_fingerprint if drafter.manifest else None
    return None not in (made_with, target.tokenizer) and made_with != tokenizer_fingerprint(target.tokenizer)


def _check_special_ids(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    for name in ("bos", "eos"):
        of_target, of_drafter = (str(getattr(model.tokenizer, f"{name}_token_id")) for model in (target, drafter))
        if of_target != of_drafter:
            reason = f"engines use the target's {name} token, but the drafter may draft its own"
            effects = degrade(reason, "transformers", "vllm", "sglang", "draftsmith")
            if name in (*_added_ends(target.tokenizer), *_added_ends(drafter.tokenizer)):
                effects |= refuse(f"both tokenizers must add the same {name} token", "llama.cpp")
            yield Finding("special ids", f"the {name} tokens differ", of_target, of_drafter, effects)


def _check_encoding(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Report the first test string that the two tokenizers split into different tokens."""
    for text in _probes(target, drafter):
        of_target, of_drafter = _pieces(target.tokenizer, text), _pieces(drafter.tokenizer, text)
        if of_target != of_drafter:
            start = max(0, shared_length(of_target, of_drafter) - 1)
            values = tuple(" ".join(map(repr, pieces[start : start + 5])) for pieces in (of_target, of_drafter))
            problem = f"{_shorten(text)} is encoded differently"
            yield Finding("encoding", problem, values[0], values[1], degrade(_TOKENS))
            return


def _probes(target: ModelInfo, drafter: ModelInfo) -> Iterator[str]:
    """Yield test strings, including strings with added tokens that both tokenizers have."""
    yield from _TEXTS
    known = target.vocab.keys() & drafter.vocab.keys()
    added = [token.content for model in (target, drafter) for token in model.tokenizer.added_tokens_decoder.values()]
    yield from (around.format(token) for token in dict.fromkeys(added) if token in known for around in _AROUND)


def _pieces(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]


def _shorten(value: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _check_added_ends(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    of_target, of_drafter = (_added_ends(model.tokenizer) for model in (target, drafter))
    if of_target != of_drafter:
        effects = degrade(_TOKENS) | refuse("both tokenizers must add BOS, or neither; likewise for EOS", "llama.cpp")
        values = _describe_both(lambda model: "adds " + (" and ".join(model) or "nothing"), of_target, of_drafter)
        yield Finding("bos and eos around a text", "the tokenizers add different tokens", *values, effects)


def _added_ends(tokenizer: Any) -> list[str]:
    """Return which of `bos` and `eos` a tokenizer adds when it encodes a string."""
    ids = list(tokenizer("a", verbose=False).input_ids)
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    adds = {"bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]}
    return [name for name, is_added in adds.items() if is_added and len(ids) > len(bare)]


def _check_chat_template(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    if not all(getattr(model.tokenizer, "chat_template", None) for model in (target, drafter)):
        return
    try:
        of_target, of_drafter = (render_chat(model.tokenizer, _CHAT, prompt=True) for model in (target, drafter))
    except ValueError:
        return
    if of_target != of_drafter:
        same = shared_length(of_target, of_drafter)
        values = _describe_both(lambda text: _shorten(text[max(0, same - 12) : same + 28]), of_target, of_drafter)
        problem = f"the rendered conversations differ from character {same} on"
        yield Finding("chat template", problem, *values, degrade(_TEMPLATE))


def _check_context(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Report a drafter with a shorter context than the target's, or a model whose context draftsmith limits."""
    effects = dict[str, Effect]()
    if _is_shorter(drafter.positions, target.positions):
        reason = f"texts longer than the drafter's {drafter.positions:,} positions are rejected or drafted poorly"
        effects = degrade(reason, "transformers", "vllm", "sglang", "llama.cpp")
    limits = [model.limit for model in (drafter, target) if model.limit is not None]
    ends_early = any(_is_shorter(model.limit, model.positions) for model in (target, drafter))
    if ends_early or _is_shorter(drafter.limit, target.limit):
        effects |= degrade(f"texts longer than {min(limits):,} tokens, including drafts, are rejected", "draftsmith")
    if effects:
        values = _describe_both(lambda model: f"positions: {model.positions}, window: {model.window}", target, drafter)
        early = "a sliding window or LongRoPE's change of factors limits the length of texts"
        yield Finding("context length", early if ends_early else "the drafter's context is shorter", *values, effects)


def _is_shorter(drafter: int | None, target: int | None) -> bool:
    return drafter is not None and target is not None and drafter < target


def _check_draft_vocabulary(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Report a draft vocabulary that is not exported, because only draftsmith supports it."""
    if (drafter.folder / DRAFT_VOCABULARY).is_file() and not (drafter.manifest and drafter.manifest.export):
        reason = f"it loads {DRAFT_VOCABULARY} as weights: use `draftsmith export`"
        effects = refuse(reason, "vllm")
        if drafter.manifest is None or "proposed_tokens" in drafter.manifest.shapes:
            reason = "it also drafts untrained tokens: use `draftsmith export`"
            effects |= degrade(reason, "transformers", "sglang", "llama.cpp")
        problem = "only draftsmith supports the draft vocabulary of an artifact"
        yield Finding("draft vocabulary", problem, "", DRAFT_VOCABULARY, effects)


def _check_fingerprint(target: ModelInfo, drafter: ModelInfo) -> Iterator[Finding]:
    """Report a tokenizer fingerprint that differs from the target's, unless differing tokens are already reported."""
    has_other_tokens = drafter.tokenizer is not None and drafter.vocab != target.vocab
    if has_other_fingerprint(target, drafter) and not has_other_tokens:
        assert drafter.manifest is not None
        expected, named = tokenizer_fingerprint(target.tokenizer), str(drafter.manifest.tokenizer_fingerprint)
        yield Finding("fingerprint", _OTHER, f"{expected[:16]}…", f"{named[:16]}…", refuse(_OTHER, "draftsmith"))
