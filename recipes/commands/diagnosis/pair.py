"""Static and measured checks of a target/drafter pair, and comparison of a server with this engine.

The diagnosis of a pair is a JSON object. `--json` prints it, and `--prompts` writes it to a file:

    {"target", "drafter",
     "findings": [{"severity", "check", "what", …}],              the fields of `Finding`
     "verdicts": {"vllm": {"reader", "outcome", "reasons"}},      null without static checks
     "variants": [{"change", "acceptance_length", "reason"}],     with --prompts: EAGLE-3 heads, block drafters
     "schema": 5, "kind": "diagnosis", …}                         with --prompts: see `measure_pair`
"""

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import check_new, load_manifest
from ....checkpoints.artifact.locate import find_folder
from ....checkpoints.heads.layouts import holds_heads
from ....checkpoints.heads.published import MASK_EMBEDDING, published_kind
from ....checkpoints.pairs.checks import examine
from ....checkpoints.pairs.dflash import examine_dflash
from ....checkpoints.pairs.eagle import examine_eagle
from ....checkpoints.pairs.multi_token import examine_medusa, examine_mtp, mtp_layers
from ....checkpoints.pairs.repair import repair
from ....checkpoints.pairs.sides import REFUSED, WEIGHTS, WORKS, Diagnosis, read_model_info
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.names import HEADS_FILE, MANIFEST_FILE
from ....data.prompts import load_questions
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.diagnose.expected import compare_server, draft_length, predict_server
from ...report.terminal.diagnosis import show_diagnosis, show_findings
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import BENCH, EVALUATION, derive_path, load_results
from ...schema.serving import BenchRecipe
from ...session.terminal import console, log, write_json
from ..artifacts.imports import import_heads
from ..evaluation.recipe import evaluate_recipe
from .variants import ConfigFit

KIND = "diagnosis"
_EXAMINERS = {"eagle3": examine_eagle, "dflash": examine_dflash, "dspark": examine_dflash}


def check_pair(
    target: str,
    drafter: str,
    *,
    fix: Path | None = None,
    prompts: str | None = None,
    out: Path | None = None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> bool:
    """Check a target and its drafter, heads or table, and print the findings.

    Args:
        target: Directory or hub id of the target.
        drafter: Directory or hub id of a drafter, heads or a table.
        fix: Output directory for a repaired drafter, which is then checked instead of `drafter`.
        prompts: Evaluation set, file or hub id for the measured checks.
        out: JSON file for the diagnosis; only used with `prompts`.
        overrides: Changes to the evaluation, of the form `key=value`.
        as_json: Whether to print the findings as JSON.

    Returns:
        True if no fault was found, and the pair works in draftsmith and transformers (heads and block drafters: in
        every checked engine).
    """
    if out is not None and (out.suffix != ".json" or out.is_dir()):
        raise ValueError(f"--out must be a .json file, got {out}")
    if prompts is not None:
        check_writable(out or Path(), folder=out is None)
    if fix is not None:
        check_new(fix)
    with redirect_stdout(sys.stderr):  # standard output is for results only
        folder, fit = find_folder(drafter, ["*.json"]), None
        published = published_kind(folder)
        is_eagle, is_block = published == "eagle3", published in ("dflash", "dspark")
        if is_eagle and prompts is not None and fix is None:
            _check_decodes(_check_files(target, drafter), folder)
        if published and (fix is not None or prompts is not None):
            fit = _fit_config(target, drafter, prompts, overrides)
        if fix is not None:
            for line in _write_fixed(target, drafter, fix, fit):
                log(f"doctor: {fix}: {line}")
            drafter, folder = str(fix), fix
        kind = load_manifest(folder).kind if (folder / MANIFEST_FILE).is_file() else "drafter"
        result: dict[str, Any] = {"target": target, "drafter": drafter, "findings": [], "verdicts": None}
        if published or prompts is None or kind not in ("heads", "table"):
            result |= _check_files(target, drafter).as_json()
        if fit is not None and fit.variants:
            result["variants"] = [each.as_json() for each in fit.variants]
            result["findings"] += [] if fix else [finding.as_json() for finding in fit.findings()]
        if is_block and prompts is not None and out is not None:
            atomic_text(out, _to_text(result | {"schema": 5, "kind": KIND}))
        elif not is_block and prompts is not None:
            changes = {"target": target, "drafter" if is_eagle else kind: drafter, "prompts": prompts}
            _measure(result, evaluate_recipe(None, overrides, changes, "doctor"), out)
    if as_json:
        write_json(_to_text(result))
    else:
        show_diagnosis(result, console())
    return _is_sound(result, every_engine=is_block or "transformers" not in (result["verdicts"] or {}))


def _fit_config(target: str, drafter: str, prompts: str | None, overrides: Sequence[str]) -> ConfigFit:
    """Correct the config of heads or a block drafter, and measure variants of it if there are prompts."""
    folder = find_folder(drafter, ["*.json", WEIGHTS, MASK_EMBEDDING])
    fit = ConfigFit(read_model_info(target, load_tokenizer), folder)
    if prompts is not None:
        fit.measure(evaluate_recipe(None, overrides, {"target": target, "prompts": prompts}, "doctor"))
    return fit


def _write_fixed(target: str, drafter: str, out: Path, fit: ConfigFit | None) -> list[str]:
    """Write a repaired drafter or heads to a new folder, and return descriptions of the changes."""
    if fit is not None:
        fit.write(out, drafter)
        return fit.changes or ["the config is written for all engines; no setting was changed"]
    if holds_heads(folder := find_folder(drafter, ["*.json", HEADS_FILE])):
        import_heads(drafter, out, target)
        return [f"the config of the Medusa heads in {folder} is written from their tensors"]
    command = shlex.join(["draftsmith", "doctor", target, drafter, "--fix", str(out)])
    return repair(read_model_info(target, load_tokenizer), read_model_info(drafter, load_tokenizer), out, command)


def _measure(result: dict[str, Any], recipe: EvaluateRecipe, out: Path | None) -> None:
    """Add the measured findings to a diagnosis, and write it to `out` or next to the recipe's results."""
    from .measure import measure_pair

    findings, about = measure_pair(recipe)
    explained = ("inputs", "steps") if any(each["check"] == "config" for each in result["findings"]) else ()
    result["findings"] += [each.as_json() for each in findings if each.check not in explained]
    result |= {"schema": 5, "kind": KIND} | about
    path = out or derive_path(Path(recipe.out), KIND)
    atomic_text(path, _to_text(result))
    log(f"doctor: wrote {path}")


def _to_text(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _check_files(target: str, drafter: str) -> Diagnosis:
    info, folder = read_model_info(target, load_tokenizer), find_folder(drafter, ["*.json", HEADS_FILE])
    if target == drafter and mtp_layers(folder):
        return examine_mtp(info, drafter, folder)
    if kind := published_kind(folder):
        return _EXAMINERS[kind](info, drafter, find_folder(drafter, ["*.json", WEIGHTS, MASK_EMBEDDING]))
    if holds_heads(folder):
        return examine_medusa(info, drafter, folder)
    return examine(info, read_model_info(drafter, load_tokenizer))


def _check_decodes(diagnosis: Diagnosis, folder: Path) -> None:
    """Raise ValueError if draftsmith cannot decode with the EAGLE-3 heads in `folder`, or they are not an artifact."""
    verdict = diagnosis.verdicts["draftsmith"]
    if verdict.outcome == REFUSED:
        raise ValueError(f"{diagnosis.drafter} cannot be used: {'; '.join(verdict.reasons)}")
    if not (folder / MANIFEST_FILE).is_file():
        command = ["draftsmith", "import", diagnosis.drafter, "--target", diagnosis.target, "--out", "DIRECTORY"]
        raise ValueError(f"{diagnosis.drafter} is not an artifact: import it with `{shlex.join(command)}`")


def _is_sound(result: dict[str, Any], *, every_engine: bool) -> bool:
    verdicts = result["verdicts"] or {}
    judged = [each for name, each in verdicts.items() if every_engine or name in ("transformers", "draftsmith")]
    return all(each["outcome"] == WORKS for each in judged) and not any(each["is_fault"] for each in result["findings"])


def pair_verdict(target: str, drafter: str, consumer: str) -> str | None:
    """Return the reasons why the engine `consumer` does not fully support a pair, or None if it does."""
    verdict = _check_files(target, drafter).verdicts[consumer]
    return None if verdict.outcome == WORKS else f"{verdict.outcome}: {'; '.join(verdict.reasons)}"


def check_server(target: str, files: Sequence[Path]) -> bool:
    """Compare the results of a server and an evaluation, print findings, and return True if there are none.

    The tokenizer of `target` counts the prompt tokens. `files` are results of `bench` and `evaluate`, in any order.

    Raises ValueError if `files` is not one file of each kind, or if no `speculative` row has the server's temperature.
    """
    loaded = {results["kind"]: (path, results) for path in files for results in [load_results(path)]}
    if len(files) != 2 or set(loaded) != {BENCH, EVALUATION}:
        raise ValueError(f"--results requires files of both `bench` and `evaluate`, got {', '.join(map(str, files))}")
    path, evaluation = loaded[EVALUATION]
    server = BenchRecipe.model_validate(loaded[BENCH][1]["recipe"])
    own = EvaluateRecipe.model_validate(evaluation["recipe"])
    rows = [row for row in evaluation["methods"] if row["method"] == "speculative"]
    fitting = [row for row in rows if row["temperature"] == server.temperature]
    if not fitting:
        temperatures = ", ".join(f"{each:g}" for each in sorted({row["temperature"] for row in rows})) or "none"
        raise ValueError(f"{path} has `speculative` at temperature {temperatures}, expected {server.temperature:g}")
    tokenizer = load_tokenizer(target)
    encode = prompt_renderer(get_template(own.template, tokenizer, own.template_options), tokenizer)
    questions = load_questions(server.prompts, server.limit, path=server.prompts_path, groups=server.groups or None)
    lengths = {prompt.id: len(encode(prompt.turns)) for prompt in questions}
    expected = predict_server(max(fitting, key=draft_length), lengths, own.max_new_tokens == server.max_new_tokens)
    served = [row for row in loaded[BENCH][1]["methods"] if row["method"] == "server"]
    findings = [finding.as_json() for row in served for finding in compare_server(expected, row)]
    show_findings(findings, console())
    return not findings
