"""Beam search with a drafter's beam beside it: the same beams, in how many forwards, and those of transformers.

    python tests/bench/beams.py [--pair runs/realpair] [--limit 100] [--tokens 24] [--levels 3] [--beams 2 4 8]

On a finished quickstart's pair and its held-out questions. For w beams and a drafter's beam of u = w, 2w and 4w: tokens
of the text a forward of the target, which a search without a drafter has at most 1, questions whose text is that of
`beam` and of transformers' `num_beams`, and the largest difference between its score there and the text's
log-probability here. Texts have no end, so that no length is weighed. The last line is one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import finish, parser_of
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import open_case
from draftsmith.recipes.schema.evaluation import EvaluateRecipe

LEVELS = 3


def decoded(
    target: LanguageModel, parts: Parts, prompt: list[int], tokens: int, **options: Any
) -> tuple[list[int], int]:
    """A text, and the target's forwards for it."""
    method = build_method("beam", parts, Sampling(), **options)
    steps = list(generate(target, *method, [prompt], Limits(tokens), Sampling(), Rng.for_rows(0, 1)))
    return [token for step in steps for token in step.new_ids[0]], sum(step.forwards for step in steps)


def by_transformers(model: Any, prompt: list[int], tokens: int, beams: int) -> tuple[list[int], float]:
    """A text, and its score."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=beams, do_sample=False, max_new_tokens=tokens,
        length_penalty=0.0, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), float(found.sequences_scores[0])


def log_probability(target: LanguageModel, prompt: list[int], text: list[int]) -> float:
    """Of a text behind a prompt."""
    ids = torch.tensor([prompt + text])
    hidden_1MD = target.extend(target.new_cache(1, ids.shape[1]), ids[:, :-1])
    logits_MV = target.logits(hidden_1MD[:, len(prompt) - 1 :])[0].float()
    return float(logits_MV.log_softmax(-1).gather(1, torch.tensor(text)[:, None]).sum())


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__, "two questions of eight tokens", pair=True, limit=100, tokens=24, levels=LEVELS)
    parser.add_argument("--beams", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    limit, tokens = (2, 8) if args.quick else (args.limit, args.tokens)
    values: dict[str, Any] = {"kind": "evaluate", "out": "none.json", "methods": [{"method": "autoregressive"}]}
    values |= {"target": str(args.pair / "target"), "drafter": str(args.pair / "drafter"), "limit": limit}
    values |= {"prompts": str(Path(args.pair) / "corpus" / "heldout.jsonl"), "max_prompt_tokens": 256}
    case = open_case(EvaluateRecipe.model_validate(values))
    target, parts, model = case.opened.target, case.opened.parts, case.opened.model
    found: dict[str, Any] = {}
    for beams in args.beams:
        plain = [decoded(target, Parts(), prompt, tokens, num_beams=beams) for prompt in case.prompts]
        theirs = [by_transformers(model, prompt, tokens, beams) for prompt in case.prompts]
        apart = [
            abs(score - log_probability(target, prompt, text))
            for prompt, (text, score) in zip(case.prompts, theirs, strict=True)
        ]
        row: dict[str, Any] = {"as_transformers": sum(a == b for (a, _), (b, _) in zip(plain, theirs, strict=True))}
        row["largest_score_difference"] = max(apart)
        for width in (beams, 2 * beams, 4 * beams):
            options = {"num_beams": beams, "draft_beams": width, "draft_gamma": args.levels}
            ours = [decoded(target, parts, prompt, tokens, **options) for prompt in case.prompts]
            row[f"tokens_per_forward_{width}"] = tokens * len(ours) / sum(forwards for _, forwards in ours)
            row[f"as_beam_{width}"] = sum(a == b for (a, _), (b, _) in zip(plain, ours, strict=True))
        row["tokens_per_forward_alone"] = tokens * len(plain) / sum(forwards for _, forwards in plain)
        found[str(beams)] = row
        print(f"{beams} beams, {len(case.prompts)} questions: {row}")
    finish({"beams": found, "questions": len(case.prompts), "tokens": tokens})


if __name__ == "__main__":
    main()
