"""`results.json`: what an evaluation leaves. It is written here, and read and checked here.

The file is one JSON object of schema 2. Numbers are finite, times are seconds unless the key says otherwise, and what
does not apply or could not be measured is null. Keys that are not listed are passed on as they are.

The whole file:

    schema                      2
    kind                        "evaluation"
    created                     when it was written: UTC, ISO 8601; left out by older versions, as `artifacts`
    artifacts                   drafter, heads, table, as far as there are: source, hash (of its manifest, else of its
                                weights), files (their hashes by name)
    machine                     device, name, cores, threads, python, versions
    recipe                      the resolved recipe
    prompts                     how many were decoded
    prompts_sha256              of their token ids: equal where two evaluations asked the same
    passed_over                 prompts read and not asked: `counts` by reason, and the names of the first `too_long`
    categories                  prompts by category
    resumed                     runs taken over from a process that was interrupted: its times stand beside this one's
    greedy_equals_transformers  [prompts, of how many] that transformers.generate decodes to the same tokens
    methods                     a row a method, see below
    errors                      what went wrong: measurements that cannot be true, broken promises of losslessness

A row, and those marked * also in each entry of `by_category`, which has the number of its `prompts` besides:

    label, method, options, temperature    the entry; labels are unique
    lossless                      whether the method promises the target's own distribution
    tokens_per_step *             tokens kept a target forward; tokens_per_step_interval *: 95 %, by prompts
    acceptance_rate *             draft tokens accepted of those examined; acceptance_at_k *: the same by level
    acceptance_by_depth *         of the steps that reached depth i, the share that accepted there
    nodes_per_step *              tokens that a target forward scored
    tokens *, seconds *           of all prompts, the median of each prompt's runs
    tokens_per_second *           tokens / seconds
    speedup *                     tokens_per_second over autoregressive decoding's; speedup_interval *: 95 %, by prompts
    speedup_over_transformers *   the same over transformers.generate; null unless greedy
    identical_to_greedy *         [prompts, of how many] with greedy decoding's very tokens; null unless greedy
    near_ties                     prompts that differ where the target is all but undecided; null if not lossless
    ideal *, bound *              the most speedup there can be: by cost_ratio, and by measured forwards
    efficiency *                  speedup of the steps alone over bound
    cost_ratio                    a drafter's forward over the target's
    milliseconds                  of forwards in isolation: one (a token), tree (nodes_per_step tokens), propose
    phases_us                     median microseconds of a step by phase: draft, score, verify, commit, host, step
    flops_per_token *             verification, drafting, total: by shapes; checked: the same of the forwards that were
                                  timed over what torch's counter saw, left out where there is nothing to compare
    joules_per_token              null where nothing counts energy; energy_source: "nvml", "nvml-power", "rapl"
    energy                        null, or how they were counted: source, joules (with idle power) and error (standard),
                                  above_idle (or null), watts, idle_watts, seconds, trials
    perplexity *                  of the text under the unwarped target
    rouge_l *                     F-measure against references, mean of those prompts that have one
    self_consistency *            mean share of the greedy text before the first difference
    prediction                    null, or what a recording says it should be: {"tokens_per_step": …}
    by_category                   {category: the metrics marked *}
    by_prompt                     a list in the order of decoding: prompt (its name), category, tokens, steps, accepted,
                                  examined, seconds, tokens_per_step, acceptance_rate, speedup, perplexity, rouge_l,
                                  self_consistency

Schema 1 had no `kind`, `resumed`, `passed_over`, `prompts_sha256`, `by_prompt`, `phases_us`, `near_ties`, `prediction`,
`energy_source`, `self_consistency`, `tokens_per_step_interval`, and no times by category: such files are read, and
what they lack is null or empty, `by_category` too. A row without `energy`, as there once were, has it null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from json.decoder import JSONDecoder
from pathlib import Path
from typing import Any

from ...checkpoints.storage.atomic import atomic_text

SCHEMA = 2
KIND = "evaluation"

_Check = Callable[[Any], bool]
_Place = tuple[str | int, ...]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _pair(value: Any) -> bool:
    return _numbers(value) and len(value) == 2


def _named_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _is(kind: type) -> _Check:
    return lambda value: isinstance(value, kind)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_NUMBER, _COUNT, _SHARES = (_number, "a finite number"), (_count, "a whole number"), (_numbers, "a list of numbers")
_PAIR, _NAMED = (_pair, "a list of two numbers"), (_named_numbers, "numbers by name")
_TEXT, _TRUTH = (_is(str), "a text"), (_is(bool), "true or false")
_OBJECT, _LIST = (_is(dict), "an object"), (_is(list), "a list")
_TEXTS = (_texts, "a list of texts")
_Kind = tuple[_Check, str]
_Keys = dict[str, tuple[_Kind, bool]]

FILE: _Keys = {
    "schema": (_COUNT, False), "kind": (_TEXT, False), "machine": (_OBJECT, False), "recipe": (_OBJECT, False),
    "prompts": (_COUNT, False), "prompts_sha256": (_TEXT, True), "passed_over": (_OBJECT, False),
    "categories": (_NAMED, False), "resumed": (_COUNT, False), "greedy_equals_transformers": (_PAIR, True),
    "methods": (_LIST, False), "errors": (_TEXTS, False),
}  # fmt: skip
"""What each key holds, and whether it may be null."""
METRICS: _Keys = {
    "tokens_per_step": (_NUMBER, True), "tokens_per_step_interval": (_PAIR, True), "acceptance_rate": (_NUMBER, True),
    "acceptance_at_k": (_NUMBER, True), "acceptance_by_depth": (_SHARES, False), "nodes_per_step": (_NUMBER, True),
    "tokens": (_COUNT, False), "seconds": (_NUMBER, False), "tokens_per_second": (_NUMBER, False),
    "speedup": (_NUMBER, False), "speedup_interval": (_PAIR, True), "speedup_over_transformers": (_NUMBER, True),
    "identical_to_greedy": (_PAIR, True), "ideal": (_NUMBER, False), "bound": (_NUMBER, False),
    "efficiency": (_NUMBER, False), "flops_per_token": (_NAMED, False), "perplexity": (_NUMBER, True),
    "rouge_l": (_NUMBER, True), "self_consistency": (_NUMBER, True),
}  # fmt: skip
ROW: _Keys = METRICS | {
    "label": (_TEXT, False), "method": (_TEXT, False), "options": (_OBJECT, False), "temperature": (_NUMBER, False),
    "lossless": (_TRUTH, False), "near_ties": (_COUNT, True), "cost_ratio": (_NUMBER, True),
    "milliseconds": (_NAMED, False), "phases_us": (_NAMED, True), "joules_per_token": (_NUMBER, True),
    "energy_source": (_TEXT, True), "energy": (_OBJECT, True), "prediction": (_OBJECT, True),
    "by_category": (_OBJECT, False), "by_prompt": (_LIST, False),
}  # fmt: skip
CATEGORY: _Keys = METRICS | {"prompts": (_COUNT, False)}
PROMPT: _Keys = {
    "prompt": (_TEXT, False), "category": (_TEXT, False), "tokens": (_COUNT, False), "steps": (_COUNT, False),
    "accepted": (_COUNT, False), "examined": (_COUNT, False), "seconds": (_NUMBER, False),
    "tokens_per_step": (_NUMBER, True), "acceptance_rate": (_NUMBER, True), "speedup": (_NUMBER, False),
    "perplexity": (_NUMBER, True), "rouge_l": (_NUMBER, True), "self_consistency": (_NUMBER, True),
}  # fmt: skip


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results, whole or not at all."""
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    fault = _fault(json.loads(text))
    assert fault is None, f"{'.'.join(map(str, fault[0]))} {fault[1]}"
    atomic_text(path, text)


def load_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The results in a file, checked, as schema 2 has them.

    Raises:
        ValueError: no such file, no JSON, other results, a newer schema, a key that is missing or holds something
            else; naming the file, the line and the key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"there are no results at {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error
    try:
        results = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno} is damaged: {error.msg} (column {error.colno})") from error
    if not isinstance(results, dict) or not _count(results.get("schema")):
        raise ValueError(f"{path}:1 holds no results of `draftsmith evaluate`: it has no `schema`")
    if not 1 <= results["schema"] <= SCHEMA:
        line = _line(text, ("schema",))
        raise ValueError(f"{path}:{line}: results of schema {results['schema']}, this version reads 1 to {SCHEMA}")
    upgraded = _upgraded(results) if results["schema"] == 1 else results
    for row in upgraded["methods"] if isinstance(upgraded.get("methods"), list) else ():
        if isinstance(row, dict):
            row.setdefault("energy", None)
    fault = _fault(upgraded)
    if fault is not None:
        place, what = fault
        raise ValueError(f"{path}:{_line(text, place)}: {_words(place)} {what}")
    return upgraded


def _fault(results: dict[str, Any]) -> tuple[_Place, str] | None:
    """The place of the first thing that is not as it should be, and what it is."""
    kind = results.get("kind", KIND)
    if isinstance(kind, str) and kind != KIND:  # another command's file, of which all else is other too
        return ("kind",), f"is {kind!r}, expected {KIND!r}"
    fault = _object_fault(results, FILE, ())
    if fault is not None:
        return fault
    seen: set[str] = set()
    for number, row in enumerate(results["methods"]):
        place: _Place = ("methods", number)
        fault = _object_fault(row, ROW, place)
        if fault is None and row["label"] in seen:
            fault = (*place, "label"), f"is {row['label']!r}, as that of a row before it"
        if fault is not None:
            return fault
        seen.add(row["label"])
        parts: list[tuple[_Place, Any, _Keys]]
        parts = [((*place, "by_category", name), part, CATEGORY) for name, part in row["by_category"].items()]
        parts += [((*place, "by_prompt", index), part, PROMPT) for index, part in enumerate(row["by_prompt"])]
        for where, part, keys in parts:
            fault = _object_fault(part, keys, where)
            if fault is not None:
                return fault
    return None


def _object_fault(value: Any, keys: _Keys, place: _Place) -> tuple[_Place, str] | None:
    if not isinstance(value, dict):
        return place, f"is {_short(value)}, expected an object"
    for key, ((check, words), may_be_null) in keys.items():
        if key not in value:
            return (*place, key), "is missing"
        if not (may_be_null and value[key] is None) and not check(value[key]):
            return (*place, key), f"is {_short(value[key])}, expected {words}{' or null' if may_be_null else ''}"
    return None


def _upgraded(results: dict[str, Any]) -> dict[str, Any]:
    """Results of schema 1 as those of schema 2; what has another shape than it had is left to the check."""
    lacking: dict[str, Any] = {"kind": KIND, "resumed": 0, "passed_over": {}, "prompts_sha256": None}
    new = lacking | results | {"schema": SCHEMA}
    if isinstance(new.get("methods"), list):
        new["methods"] = [_upgraded_row(row) if isinstance(row, dict) else row for row in new["methods"]]
    return new


def _upgraded_row(row: dict[str, Any]) -> dict[str, Any]:
    lacking: dict[str, Any] = {"by_prompt": [], "tokens_per_step_interval": None, "speedup_over_transformers": None}
    lacking |= dict.fromkeys(("self_consistency", "near_ties", "phases_us", "prediction", "energy_source"))
    # by category it had counts alone, without times: a category in the form of today needs them
    return lacking | row | {"by_category": {}}


def _words(place: _Place) -> str:
    words = ""
    for part in place:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else part
    return f"`{words}`"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _line(text: str, place: Sequence[str | int]) -> int:
    """The line on which the value at a place stands, or the object that lacks it begins."""
    decoder, at = JSONDecoder(), _next(text, 0)
    for part in place:
        found = _inside(decoder, text, at, part)
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _inside(decoder: JSONDecoder, text: str, at: int, wanted: str | int) -> int | None:
    """Where in an object or list that begins at `at` the value of a key, or of a place, begins."""
    if text[at] not in "{[":
        return None
    named, index, at = text[at] == "{", 0, _next(text, at + 1)
    while text[at] not in "}]":
        key: Any = index
        if named:
            key, at = decoder.raw_decode(text, at)
            at = _next(text, _next(text, at) + 1)  # beyond the colon
        if key == wanted:
            return at
        at = _next(text, decoder.raw_decode(text, at)[1])
        at = _next(text, at + 1) if text[at] == "," else at
        index += 1
    return None


def _next(text: str, at: int) -> int:
    """The next character that is not space."""
    while text[at].isspace():
        at += 1
    return at
