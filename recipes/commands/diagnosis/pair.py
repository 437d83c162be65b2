"""Checks of a target/drafter pair, repairs of its drafter, and the comparison of a server with this engine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import find_folder
from ....checkpoints.heads.published import is_published_eagle
from ....checkpoints.pairs.checks import examine
from ....checkpoints.pairs.eagle import examine_eagle
from ....checkpoints.pairs.repair import repair
from ....checkpoints.pairs.sides import REFUSED, WEIGHTS, WORKS, Side, open_side
from ....checkpoints.storage.names import MANIFEST_FILE, TOKENIZER_FILES
from ....checkpoints.storage.safe_read import pickles_allowed
from ....checkpoints.verify.model_files import is_adapter
from ....data.prompts import load_questions
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.diagnose.expected import compare_server, draft_length, expected_of
from ...report.terminal.diagnosis import show_pair, show_server
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import BENCH, EVALUATION, load_results
from ...schema.serving import BenchRecipe
from ...session.terminal import console, log, write_json
from ..artifacts.imports import PICKLED, whole_model


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
    """Check a target and a draft, and print the findings.

    Args:
        target: Folder or hub id of the target.
        drafter: Folder or hub id of a drafter, heads or a table.
        fix: Folder of a repaired drafter, which is written and then checked.
        prompts: Evaluation set, file or hub id on which acceptance is then measured.
        out: File of the diagnosis.
        overrides: Changes to the evaluation, of the form `key=value`.
        as_json: Whether the findings are printed as JSON.

    Returns:
        Whether transformers and this engine accept the pair without reservations, of EAGLE-3 heads whether all engines
        do, and whether no fault was measured.
    """
    if prompts is not None and (as_json or fix is not None):
        raise ValueError("--prompts writes its own JSON file: leave out --json and --fix, or use `--out FILE.json`")
    with redirect_stdout(sys.stderr):
        folder = find_folder(drafter, ["*.json"])
    is_eagle = is_published_eagle(folder)
    kind = load_manifest(folder).kind if (folder / MANIFEST_FILE).is_file() else "drafter"
    sound = True
    if is_eagle:
        sound = _check_eagle(target, drafter, fix, prompts is not None, as_json)
    elif prompts is None or kind not in ("heads", "table"):
        sound = _check_models(target, drafter, fix, as_json)
    if prompts is not None:
        sound = _measure(target, "drafter" if is_eagle else kind, drafter, prompts, out, overrides) and sound
    return sound


def _check_models(target: str, drafter: str, fix: Path | None, as_json: bool) -> bool:
    """Check two models, and repair the drafter to `fix`."""
    with ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # standard output holds results only
            mine = open_side(target, load_tokenizer)
            theirs, whole = stack.enter_context(_open_drafter(drafter, fix is not None))
            diagnosis = examine(mine, theirs)
        shown: dict[str, Any] = {"pair": diagnosis.as_json()}
        if not as_json:
            console().print(*show_pair(diagnosis), sep="\n")
        if fix is not None:
            command = shlex.join(["draftsmith", "doctor", target, drafter, "--fix", str(fix)])
            with redirect_stdout(sys.stderr):
                repairs = repair(mine, theirs, diagnosis.findings, fix, command, whole)
                diagnosis = examine(mine, open_side(str(fix), load_tokenizer))
            shown |= {"repairs": {"done": repairs.done, "left": repairs.left}, "repaired": diagnosis.as_json()}
            if not as_json:
                for line in [f"repaired: {one}" for one in repairs.done] + [f"left: {one}" for one in repairs.left]:
                    log(f"doctor: {line}")
                log(f"doctor: wrote {fix}; the same checks of it follow")
                console().print(*show_pair(diagnosis), sep="\n")
    if as_json:
        write_json(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    return all(diagnosis.verdicts[name].outcome == WORKS for name in ("transformers", "draftsmith"))


def _check_eagle(target: str, heads: str, fix: Path | None, decodes: bool, as_json: bool) -> bool:
    """Check EAGLE-3 heads; `decodes`: they must be what this engine decodes."""
    if fix is not None:
        command = shlex.join(["draftsmith", "import", heads, "--target", target, "--out", str(fix)])
        raise ValueError(f"--fix is for drafters; heads are repaired by `{command}`")
    with redirect_stdout(sys.stderr):
        folder = find_folder(heads, ["*.json", WEIGHTS])
        diagnosis = examine_eagle(open_side(target, load_tokenizer), heads, folder)
    verdicts = diagnosis.verdicts
    if decodes and verdicts["draftsmith"].outcome == REFUSED:
        raise ValueError(f"{heads} is not decoded: {'; '.join(verdicts['draftsmith'].reasons)}")
    if decodes and not (folder / MANIFEST_FILE).is_file():
        command = shlex.join(["draftsmith", "import", heads, "--target", target, "--out", "DIRECTORY"])
        raise ValueError(f"{heads} is not an artifact, and only artifacts are decoded; import it with `{command}`")
    if as_json:
        write_json(json.dumps({"pair": diagnosis.as_json()}, indent=2, ensure_ascii=False) + "\n")
    else:
        console().print(*show_pair(diagnosis), sep="\n")
    return all(verdict.outcome == WORKS for verdict in verdicts.values())


def _measure(target: str, part: str, source: str, prompts: str, out: Path | None, overrides: Sequence[str]) -> bool:
    """Measure where acceptance is lost; return whether no fault was found."""
    from ..evaluation.recipe import evaluate_recipe
    from .diagnose import run_diagnosis

    given = {"target": target, part: source, "prompts": prompts}
    found = run_diagnosis(evaluate_recipe(None, overrides, given, "doctor"), out)
    return not any(each["fault"] for each in found["findings"])


def pair_verdict(target: str, drafter: str, consumer: str) -> str | None:
    """Return what keeps `consumer` from decoding well with a pair, or None. Raises ValueError: no drafter's files."""
    with _open_drafter(drafter, is_repaired=False) as (theirs, _):
        verdict = examine(open_side(target, load_tokenizer), theirs).verdicts[consumer]
    return None if verdict.outcome == WORKS else f"{verdict.outcome}: {'; '.join(verdict.reasons)}"


@contextmanager
def _open_drafter(drafter: str, is_repaired: bool) -> Iterator[tuple[Side, Path | None]]:
    """Yield the drafter's side, and the folder of its converted model if there is one.

    A LoRA adapter is merged into its model. Pickled weights are converted if they are to be repaired and may be read.
    """
    converts = is_repaired and pickles_allowed()
    weights = [WEIGHTS, PICKLED] if converts else []
    folder = find_folder(drafter, ["*.json", "adapter_model.safetensors", *TOKENIZER_FILES, *weights])
    if not is_adapter(folder) and not (converts and not any(folder.glob(WEIGHTS)) and any(folder.glob(PICKLED))):
        yield open_side(drafter, load_tokenizer), None
        return
    with whole_model(drafter, folder, unpickle=converts) as whole:
        manifest = load_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
        yield replace(open_side(str(whole), load_tokenizer), source=drafter, folder=folder, manifest=manifest), whole


def check_server(target: str, files: Sequence[Path]) -> bool:
    """Compare a server's results with an evaluation's, and print why they differ; return whether they agree.

    Args:
        target: Folder or hub id of the target, whose tokenizer counts the prompts.
        files: Results of `bench` and of `evaluate`, in any order.

    Raises:
        ValueError: Not one file of each kind, or no row of `speculative` at the server's temperature.
    """
    loaded = {results["kind"]: (path, results) for path in files for results in [load_results(path)]}
    if len(files) != 2 or set(loaded) != {BENCH, EVALUATION}:
        raise ValueError(f"--results takes results of `bench` and of `evaluate`, got {', '.join(map(str, files))}")
    path, evaluation = loaded[EVALUATION]
    server = BenchRecipe.model_validate(loaded[BENCH][1]["recipe"])
    own = EvaluateRecipe.model_validate(evaluation["recipe"])
    rows = [row for row in evaluation["methods"] if row["method"] == "speculative"]
    fitting = [row for row in rows if row["temperature"] == server.temperature]
    if not fitting:
        there = ", ".join(f"{each:g}" for each in sorted({row["temperature"] for row in rows})) or "none"
        raise ValueError(f"{path} has no row of `speculative` at temperature {server.temperature:g}, only at {there}")
    tokenizer = load_tokenizer(target)
    encode = prompt_renderer(get_template(own.template, tokenizer), tokenizer)
    questions = load_questions(server.prompts, server.limit, path=server.prompts_path, groups=server.groups or None)
    lengths = {prompt.id: len(encode(prompt.turns)) for prompt in questions}
    expected = expected_of(max(fitting, key=draft_length), lengths, own.max_new_tokens == server.max_new_tokens)
    served = [row for row in loaded[BENCH][1]["methods"] if row["method"] == "server"]
    compared = [(row["label"], row["tokens_per_step"], *compare_server(expected, row)) for row in served]
    console().print(show_server(compared).rich())
    for label, _, _, reasons in compared:
        for reason in reasons:
            log(f"doctor: {label}: {reason}")
    return not any(reasons for _, _, _, reasons in compared)
