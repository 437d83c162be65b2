"""Python API, importable from `draftsmith`. The functions raise ValueError for invalid arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.export.base import ExportOptions, export_artifact
from ...data.conversations import Turn
from ...data.prompts import end_ids
from ...data.rendering.render import prompt_renderer
from ...data.rendering.templates import get_template
from ...decode.engine import Limits
from ...decode.evaluation.measure import decode_batch
from ...decode.methods import METHODS, build_method
from ...decode.warpers import Sampling
from ..assemble.evaluation import LoadedPair, open_recipe
from .artifacts.export import FORMATS
from .evaluation.evaluate import run_evaluate
from .evaluation.recipe import evaluate_recipe, template_of


class Generation(NamedTuple):
    """Output of `generate`. `tokens_per_second` includes the prefill."""

    text: str
    token_ids: list[int]
    acceptance_length: float
    tokens_per_second: float


def load_pair(
    target: str, drafter: str | None = None, heads: str | None = None, table: str | None = None, **settings: Any
) -> LoadedPair:
    """Load a target and its drafter, heads and bigram table from directories or the hub.

    Args:
        target: Directory or hub id of the target.
        drafter: Directory or hub id of a draft model or of EAGLE-3 heads.
        heads: Directory or hub id of Medusa or SLiM heads.
        table: Directory or hub id of a bigram table.
        **settings: Keys of the evaluation recipe, such as `dtype="int8"` or `device="cpu"`.
    """
    values = {"target": target, "drafter": drafter, "heads": heads, "table": table, **settings}
    return open_recipe(evaluate_recipe(None, [], values, "load_pair", ["autoregressive"]))


def generate(
    pair: LoadedPair,
    prompt: str | Sequence[Mapping[str, str]],
    method: str = "autoregressive",
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Generation:
    """Generate a response to a string, or to chat messages with the keys `role` and `content`.

    The prompt is formatted with the tokenizer's chat template, if there is one. `temperature=0` is greedy decoding, and
    `top_k=0` disables top-k filtering. Pass options of the method, such as `gamma=4`, as keyword arguments.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    template = get_template(template_of(pair.refs["target"].source), pair.tokenizer)
    ids = prompt_renderer(template, pair.tokenizer)([Turn(each["role"], each["content"]) for each in messages])
    limits = Limits(max_new_tokens, end_ids(pair.tokenizer, template, pair.model.generation_config))
    sampling = Sampling(temperature, top_k, top_p)
    built = build_method(method, pair.parts, sampling, **options)
    (decoded,) = decode_batch(pair.target, built, sampling, seed, [ids], limits)
    text, speed = pair.tokenizer.decode(decoded.ids, skip_special_tokens=True), len(decoded.ids) / decoded.seconds
    return Generation(text, decoded.ids, decoded.tally.tokens / decoded.tally.steps, speed)


def methods() -> dict[str, dict[str, Any]]:
    """Return the required artifacts, the losslessness and the default options of each decoding method."""
    defaults = {name: config() for name, config in METHODS.items()}
    return {
        name: {"needs": each.needs, "lossless": each.is_lossless, "options": asdict(each)}
        for name, each in defaults.items()
    }


def evaluate(target: str, prompts: str = "spec-bench", methods: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """Benchmark methods on held-out prompts, print a table, and return the content of `results.json`.

    The default methods are autoregressive decoding and one method for each artifact. `settings` contains the artifacts
    (see `load_pair`) and other keys of the evaluation recipe, such as `limit=20` or `out="results.json"`.
    """
    return run_evaluate(evaluate_recipe(None, [], {"target": target, "prompts": prompts, **settings}, names=methods))


def export(artifact: str | Path, to: str, out: str | Path | None = None, **options: Any) -> Path:
    """Export an artifact for a serving engine, verify the exported files, and return the output directory.

    `to` is the name of an export format; `draftsmith export` lists all formats. `options` are fields of
    `ExportOptions`, such as `target`. By default, `out` is next to the artifact.
    """
    source = Path(artifact).resolve()
    folder = Path(out) if out else source.with_name(f"{source.name}-{to}")
    export_artifact(source, to, folder, FORMATS, ExportOptions(**options))
    return folder
