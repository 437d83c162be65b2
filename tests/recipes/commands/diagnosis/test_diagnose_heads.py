"""Prediction heads and trees diagnosed: planted faults that must be named, and numbers that must be those of decoding.

Shape letters: X tokens of all passages, K heads, V vocabulary.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import stop_ids
from draftsmith.data.rendering.templates import get_template
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.certify.rescoring import read_back
from draftsmith.decode.evaluation.diagnose.agreement import Passage
from draftsmith.decode.evaluation.replay.recording import sample_texts
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import open_recipe
from draftsmith.recipes.commands.diagnosis.case import Case, questions_of
from draftsmith.recipes.commands.diagnosis.training_record import block_passages
from draftsmith.recipes.report.diagnosis import cells_table
from draftsmith.train.tasks.heads import HeadsTask
from rich.console import Console

VOCAB, HEADS = 320, 3


@pytest.fixture(scope="module")
def kit(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """Targets, drafters and artifacts of the other diagnoses."""
    return load_script(Path(__file__).with_name("test_diagnose.py"))


@pytest.fixture(scope="module")
def shop(kit: ModuleType, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kit.Workshop(tmp_path_factory.mktemp("heads"), corpus)


def fitted(model: Any, passages: Sequence[Passage], shift: int = 0, steps: int = 80) -> PredictionHeads:
    """Heads that learned some texts by heart; `shift`: each the token so many places further on than its own."""
    reading = read_back(wrap_model(model), [each.prompt for each in passages], [each.text for each in passages])
    heads = PredictionHeads(HEADS, 1, 32, VOCAB)
    starts = np.cumsum([0, *(len(each.text) for each in passages)])
    known = [
        (start + place, [each.text[place + head + shift] for head in range(HEADS)])
        for start, each in zip(starts[:-1], passages, strict=True)
        for place in range(-min(shift, 0), len(each.text) - HEADS - max(shift, 0))
    ]
    asked_XD = reading.before_XD[torch.tensor([place for place, _ in known])].clone()
    label_XK = torch.tensor([labels for _, labels in known])
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(heads.parameters(), 0.03)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(heads(asked_XD).flatten(0, 1), label_XK.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


@pytest.fixture(scope="module")
def own(shop: Any) -> list[Passage]:
    """The target's own answers to the prompts that are diagnosed."""
    prompts = [question.ids for question in questions_of(shop.recipe(), shop.tokenizer)]
    texts = sample_texts(wrap_model(shop.model), prompts, Limits(24, stop_ids(shop.tokenizer)), Sampling())
    return [Passage(*pair) for pair in zip(prompts, texts, strict=True)]


@pytest.fixture(scope="module")
def heldout(shop: Any) -> list[Passage]:
    """Training's held-out blocks."""
    data = shop.prepared.heldout
    return block_passages(data, min(data.blocks, 64))


@pytest.fixture(scope="module")
def healthy(shop: Any, own: list[Passage], heldout: list[Passage]) -> PredictionHeads:
    return fitted(shop.model, [*own, *heldout])


def swapped(heads: PredictionHeads, one: int = 0, other: int = 1) -> PredictionHeads:
    """The same heads, two of them in each other's place."""
    places = {str(one): str(other), str(other): str(one)}
    changed, state = copy.deepcopy(heads), {}
    for key, value in heads.state_dict().items():
        head, _, rest = key.partition(".")
        state[f"{places.get(head, head)}.{rest}"] = value
    changed.load_state_dict(state)
    return changed


def saved(shop: Any, heads: PredictionHeads, out: Path, measured: PredictionHeads | None = None) -> str:
    """An artifact of heads; with what training measured of them, or of others that it should have written."""
    metrics = {}
    if measured is not None:
        task = HeadsTask(shop.model, measured, shop.prepared.heldout, [1.0] * HEADS, evaluate_blocks=64)
        metrics = task.evaluate(task.module)
    recipe = {"train": {"precision": "no"}, "measure": {"blocks": 64}}
    shapes = {"states": "after-norm", "num_heads": HEADS}
    shop.save("heads", out, lambda place: save_heads(heads, place, "t"), recipe, metrics, shapes)
    return str(out)


def recipe_of(shop: Any, *rows: dict[str, Any], **changes: Any) -> Any:
    """Of the answers that heads were fitted to, at temperature 0."""
    methods = [{"method": "autoregressive"}, {"method": "bpd"}, *rows]
    return shop.recipe(temperature=0.0, methods=methods, **changes)


def test_healthy_heads_are_told_head_by_head_and_tree_by_tree(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, own: list[Passage], tmp_path: Path, capsys: Any
) -> None:
    """At temperature 0 what replay says of a tree is what decoding does; no fault is found where there is none."""
    table = BigramTable.from_documents(iter([np.array([*each.prompt, *each.text]) for each in own]), VOCAB)
    shop.save("table", tmp_path / "table", table.save, {"count": {"pairs": "answers"}}, {}, {})
    heads = saved(shop, healthy, tmp_path / "heads", healthy)
    rows = {"method": "medusa", "options": {"tree": "3x2"}}, {"method": "slim-s", "options": {"sequences": 4}}
    recipe = recipe_of(shop, *rows, heads=heads, table=str(tmp_path / "table"))
    told = kit.run_diagnose(recipe, ["heads"])
    shown = capsys.readouterr().out
    (part,) = told["parts"]
    assert kit.causes(part) == []
    assert [each["head"] for each in part["heads"]] == [1, 2, 3]
    trained = [part["training"]["metrics"][f"head{head}_top1"] for head in range(HEADS)]
    assert [each["stages"]["record"] for each in part["heads"]] == trained
    assert [each["stages"]["export"] for each in part["heads"]] == pytest.approx(trained, abs=1e-6)
    assert part["heads"][0]["stages"]["decoding"] > 0.5
    assert sum(each["examined"] for each in part["heads"]) == part["decoding"]["examined"]
    assert [int(np.argmax(row)) for row in part["places"]] == [1, 2, 3]
    assert [tree["label"] for tree in part["trees"]] == ["medusa", "slim-s"]
    for tree in part["trees"]:
        assert tree["tokens_per_step"] == pytest.approx(tree["foretold"])
        assert sum(row["examined"] for row in tree["cells"]["head's rank of the token"]) == tree["examined"]
        assert [row["trained"] for row in tree["depths"]] == trained[: len(tree["depths"])]
        assert all(row["best"] <= row["among"] for row in tree["depths"])
        assert tree["label"] in shown
    assert [row["candidates"] for row in part["trees"][0]["depths"]] == [3, 2]
    assert "head by head" in shown


def test_what_a_tree_tells_of_each_depth_is_counted_by_hand(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, own: list[Passage], tmp_path: Path
) -> None:
    heads = saved(shop, healthy, tmp_path / "heads")
    recipe = recipe_of(shop, {"method": "medusa", "options": {"tree": "3x2"}}, heads=heads)
    (part,) = kit.run_diagnose(recipe)["parts"]
    (tree,) = part["trees"]
    reading = read_back(wrap_model(shop.model), [each.prompt for each in own], [each.text for each in own])
    with torch.no_grad():
        order_XKV = healthy(reading.before_XD).argsort(-1, descending=True)
    start, ranks = 0, []
    for each in own:
        for place in range(len(each.text)):
            here = [
                order_XKV[start + place, head].tolist().index(each.text[place + head])
                for head in range(min(HEADS, len(each.text) - place))
            ]
            ranks.append((place, here))
        start += len(each.text)
    for depth, width in enumerate((3, 2)):
        own_ranks = [here[depth] for _, here in ranks if len(here) > depth]
        assert tree["depths"][depth]["best"] == pytest.approx(np.mean([rank < 1 for rank in own_ranks]))
        assert tree["depths"][depth]["among"] == pytest.approx(np.mean([rank < width for rank in own_ranks]))
    steps, start, tried = 0, 0, [[0, 0], [0, 0]]
    for each in own:
        at = 0
        while at < len(each.text):
            here, good = ranks[start + at][1], 0
            while good < 2 and good < len(here):
                tried[good][0] += 1
                if here[good] >= (3, 2)[good]:
                    break
                tried[good][1] += 1
                good += 1
            steps, at = steps + 1, at + good + 1
        start += len(each.text)
    assert tree["tokens_per_step"] == pytest.approx(len(ranks) / steps)
    for depth, (count, accepted) in enumerate(tried):
        assert tree["depths"][depth]["examined"] == count
        assert tree["depths"][depth]["accepted"] == pytest.approx(accepted / count)


@pytest.mark.parametrize("measured", [True, False])
def test_heads_in_each_others_place_are_named(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, tmp_path: Path, capsys: Any, measured: bool
) -> None:
    """Whether training's own measurement is known or not, as of heads from elsewhere."""
    heads = saved(shop, swapped(healthy), tmp_path / "heads", healthy if measured else None)
    part = kit.diagnosed(recipe_of(shop, heads=heads), capsys)
    assert sorted(kit.causes(part)) == ["export", "order"][not measured :]
    order = next(each for each in part["verdict"] if each["cause"] == "order")
    assert "head 1 guesses the token of place 2" in order["says"]
    assert "head 2 guesses the token of place 1" in order["says"]
    assert "head 3" not in order["says"]
    assert "another order" in order["advice"]
    if measured:
        export = next(each for each in part["verdict"] if each["cause"] == "export")
        assert "head0_top1" in export["says"]
        assert "head2_top1" not in export["says"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_that_were_trained_a_place_off_are_named(
    kit: ModuleType, shop: Any, own: list[Passage], tmp_path: Path, capsys: Any, shift: int
) -> None:
    heads = saved(shop, fitted(shop.model, own, shift), tmp_path / "heads")
    part = kit.diagnosed(recipe_of(shop, heads=heads), capsys)
    assert kit.causes(part) == ["order"]
    assert f"head 2 guesses the token of place {2 + shift} best" in part["verdict"][0]["says"]
    assert "off by as many places" in part["verdict"][0]["advice"]


def test_heads_of_another_template_are_named(kit: ModuleType, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    """They learned the answers behind plain prompts; the states behind the marks of chatml are others."""
    plain = kit.Workshop(tmp_path, corpus, template="plain")
    case = Case(plain.recipe(), open_recipe(plain.recipe(methods=[{"method": "autoregressive"}])),
                questions_of(plain.recipe(), plain.tokenizer))  # fmt: skip
    written = [each for each in case.corpus(get_template("plain", plain.tokenizer)) if each.text]
    heads = saved(plain, fitted(plain.model, written), tmp_path / "heads")
    part = kit.diagnosed(recipe_of(plain, heads=heads), capsys)
    assert kit.causes(part) == ["template"]
    assert "template: plain" in part["verdict"][0]["advice"]
    first = part["heads"][0]["stages"]
    assert first["written"] - first["corpus"] > 0.05
    assert part["differences"][0]["what"] == "template"


def test_candidates_that_a_tree_left_out_are_named(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, tmp_path: Path, capsys: Any
) -> None:
    """A tree of all but the best guess refuses what the head knows best."""
    heads = saved(shop, healthy, tmp_path / "heads")
    odd = {"method": "medusa", "label": "odd", "options": {"tree": "1, 2"}}
    part = kit.diagnosed(recipe_of(shop, odd, heads=heads), capsys)
    assert kit.causes(part) == []
    worst = next(each for each in part["verdict"] if each["cause"] == "tree")
    assert worst["says"].startswith("odd: the token was among the first ")
    assert "draftsmith tune" in worst["advice"]
    (tree,) = part["trees"]
    ranks = {row["name"]: row for row in tree["cells"]["head's rank of the token"]}
    assert ranks["1"]["accepted"] == 0
    assert ranks["1"]["examined"] / tree["examined"] == pytest.approx(worst["lost"])
    assert worst["lost"] > 0.5


def test_a_tree_of_a_drafter_is_told_beside_its_chain(kit: ModuleType, shop: Any, tmp_path: Path, capsys: Any) -> None:
    kit.noisy(shop.model, 0.3).save_pretrained(tmp_path / "drafter")
    rows = [{"method": "autoregressive"}, {"method": "multi-candidate", "options": {"k_config": "3x1"}}]
    recipe = shop.recipe(drafter=str(tmp_path / "drafter"), temperature=0.0, methods=rows)
    part = kit.diagnosed(recipe, capsys)
    assert part["heads"] == []
    (tree,) = part["trees"]
    assert tree["tokens_per_step"] == pytest.approx(tree["foretold"])
    assert [row["candidates"] for row in tree["depths"]] == [3, 1]
    first = tree["depths"][0]
    assert first["best"] < first["among"]
    assert first["accepted"] > part["stages"][-1]["value"]
    warm = kit.run_diagnose(recipe.model_copy(update={"temperature": 1.0}))["parts"][0]["trees"][0]
    assert warm["depths"][0]["best"] < warm["depths"][0]["among"] <= 1
    assert abs(warm["depths"][0]["among"] - warm["depths"][0]["accepted"]) < 0.15


def test_without_any_tree_in_the_recipe_heads_are_tried_with_one(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, tmp_path: Path, capsys: Any
) -> None:
    part = kit.diagnosed(recipe_of(shop, heads=saved(shop, healthy, tmp_path / "heads")), capsys)
    assert [(tree["method"], tree["options"]) for tree in part["trees"]] == [("medusa", {"tree": "4x2x1"})]


@pytest.mark.parametrize(
    "odd",
    [{"max_new_tokens": 1, "limit": 1}, {"max_new_tokens": 2, "limit": 3, "top_k": 1, "temperature": 5.0}],
    ids=["one token", "one candidate"],
)
def test_hardly_anything_to_look_at_is_no_reason_to_fail(
    kit: ModuleType, shop: Any, healthy: PredictionHeads, tmp_path: Path, capsys: Any, odd: dict[str, Any]
) -> None:
    heads = saved(shop, healthy, tmp_path / "heads")
    recipe = recipe_of(shop, {"method": "medusa", "options": {"tree": "3x2"}}, heads=heads)
    part = kit.diagnosed(recipe.model_copy(update=odd), capsys)
    assert kit.causes(part) == []
    assert len(part["heads"]) == HEADS
    assert [row["depth"] for row in part["trees"][0]["depths"]] == [1, 2]
    shown = Console(file=io.StringIO(), width=120)
    shown.print(cells_table({"token class": [dict(part["cells"]["token class"][0], examined=1, rejections_share=0.0)]}))
    words = " ".join(shown.file.getvalue().split())  # type: ignore[attr-defined]
    assert words.endswith("token class 1 of fewer than 5 tokens each")
