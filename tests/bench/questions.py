"""Write a corpus of varied questions, on which `make realpair` or `make coder` can train a general-purpose pair.

    python tests/bench/questions.py questions.jsonl [--limit 2600] [--templates 3000]
    make realpair ARGS='out=runs/general corpus.megabytes=0 corpus.files=[questions.jsonl]'

The questions come from the shared data of the benchmarks, without the prompts on which pairs are measured. They are
instructions, first turns of conversations, factual questions, texts to summarise, questions about passages, and
arithmetic problems from templates. `--templates` adds the questions on code, mathematics and general topics that the
recipe `coder` makes. Questions that share 13 consecutive words with an evaluation set of the benchmarks are dropped.
The last line of the output is one JSON object with the number of these questions, in total and of each kind.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import SHARED, SHAREGPT, VICUNA, finish
from draftsmith.data.cleaning.cleaner import Cleaning, EvaluationTexts
from draftsmith.data.sources.questions import template_questions

SHARES = {"instruction": 0.31, "conversation": 0.2, "fact": 0.19, "summary": 0.1, "passages": 0.1, "arithmetic": 0.1}
LONGEST = 3600
NAMES = ("Tom", "Anna", "Jen", "Betty", "Mark", "Natalia", "James", "Albert", "Tina", "Carla", "Joy", "Noah", "Sara")
THINGS = ("apples", "cookies", "marbles", "stickers", "books", "pencils", "eggs", "muffins", "tickets", "shirts")
PROBLEMS = (
    "{a} has {m} {x}. {b} gives {a} {s} times as many, and then {t} are lost. How many {x} are left?",
    "{a} sells {m} {x} for ${s} each on Monday and half as many on Tuesday. How much money does {a} earn in total?",
    "A train travels {m} miles per hour for {s} hours and then {n} miles per hour for {t} hours. How far does it go?",
    "{a} works {m} hours a week at ${n} per hour and pays {t}% of it as taxes. How much is left after {s} weeks?",
    "{a} buys {s} {x} at ${t} each and {t} {y} at ${s} each, and pays with ${n}0. How much change is given back?",
    "There are {m}0 students in a school, and {n}% of them are girls. {t} boys join. How many boys are there now?",
    "A box holds {m} {x}. A store has {n} boxes and sells {s} boxes a day. How many {x} are left after {t} days?",
)


def loaded(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if text.startswith("{") else json.loads(text)


def first(conversations: Any, speaker: str) -> list[str]:
    """Return the first turn of `speaker` in each conversation that has one."""
    turns = ([turn["value"] for turn in row["conversations"] if turn["from"] == speaker] for row in conversations)
    return [values[0] for values in turns if values]


def with_passages(pairs: Sequence[tuple[str, str]], count: int, rng: random.Random) -> list[str]:
    """Return up to `count` questions, each preceded by its answer and the three most similar other answers."""
    terms = [set(re.findall(r"[a-z]{5,}", answer.lower())) for _, answer in pairs]
    questions = []
    for chosen in rng.sample(range(len(pairs)), min(count, len(pairs))):
        best = sorted(range(len(pairs)), key=lambda other: -len(terms[other] & terms[chosen]) / (len(terms[other]) + 9))
        passages = [pairs[other][1].replace("\n", " ")[:700] for other in best[:4]]
        rng.shuffle(passages)
        questions.append("\n".join([*passages, pairs[chosen][0]]))
    return questions


def problem(rng: random.Random) -> str:
    numbers = {"m": rng.randint(12, 90), "n": rng.randint(10, 60), "s": rng.randint(2, 6), "t": rng.randint(2, 9)}
    (a, b), (x, y) = rng.sample(NAMES, 2), rng.sample(THINGS, 2)
    return rng.choice(PROBLEMS).format(a=a, b=b, x=x, y=y, **numbers)


def collect(limit: int, rng: random.Random) -> dict[str, list[str]]:
    """Return candidate texts by kind, from which about `limit` questions are sampled."""
    general = loaded(SHARED / "instruct" / "halueval_general_data.json")
    alpaca = loaded(SHARED / "instruct" / "alpaca_en_demo.json")
    chats = [*loaded(SHAREGPT), *loaded(SHARED / "chat_multi" / "mtbench101_sharegpt.json")]
    facts = loaded(SHARED / "qa" / "webquestions_brmson" / "val.json")
    goals = [row["goal"] for row in loaded(SHARED / "qa" / "piqa" / "valid.jsonl")]
    answered = [(row["user_query"], row["chatgpt_response"]) for row in general if len(row["chatgpt_response"]) > 250]
    texts = [*first(chats, "gpt"), *(row["output"] for row in loaded(VICUNA))]
    return {
        "instruction": [row["user_query"] for row in general]
        + ["\n".join(filter(None, (row["instruction"], row["input"]))) for row in alpaca],
        "conversation": first(chats, "human"),
        "fact": [row["qText"][0].upper() + row["qText"][1:] for row in facts]
        + [goal for goal in goals if goal.endswith("?")],
        "summary": ["Summarize: " + " ".join(text.split()) for text in texts if len(text) > 1200 and "```" not in text],
        "passages": with_passages([pair for pair in answered if "?" in pair[0]], limit // 10, rng),
        "arithmetic": [problem(rng) for _ in range(limit // 10)],
    }


def evaluation_questions() -> list[str]:
    """Return all questions of the evaluation sets of the benchmarks, such as HumanEval, GSM8K and MT-bench."""
    rows = (row for file in sorted((SHARED / "eval").glob("*.jsonl")) for row in loaded(file))
    return [turn for row in rows for turn in row["turns"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output file (.jsonl)")
    parser.add_argument("--limit", type=int, default=2600, help="maximum number of questions (default: 2600)")
    parser.add_argument("--templates", type=int, default=0, help="number of questions of `coder` (default: 0)")
    args = parser.parse_args()
    rng, chosen = random.Random(0), []
    for kind, texts in collect(args.limit, rng).items():
        fitting = sorted({text.strip() for text in texts if 10 < len(text.strip()) < LONGEST})
        count = round(args.limit * SHARES[kind])
        chosen += [(kind, text) for text in rng.sample(fitting, min(count, len(fitting)))]
    chosen += [(row.id.split("-")[0], row.turns[0].text) for row in template_questions(args.templates)]
    evaluation = EvaluationTexts(evaluation_questions(), Cleaning().contamination_words)
    dropped = Counter(kind for kind, text in chosen if evaluation.found_in(text))
    chosen = [(kind, text) for kind, text in chosen if not evaluation.found_in(text)]
    rng.shuffle(chosen)
    with args.out.open("w", encoding="utf-8") as file:
        for number, (kind, text) in enumerate(chosen):
            turns = [{"role": "user", "content": text}]
            file.write(json.dumps({"id": f"{kind}-{number}", "messages": turns}, ensure_ascii=False) + "\n")
    kinds = Counter(kind for kind, _ in chosen)
    contamination = {"dropped": dropped.total(), "kinds": dict(dropped)}
    finish({"questions": len(chosen), "kinds": dict(kinds), "contamination": contamination})


if __name__ == "__main__":
    main()
