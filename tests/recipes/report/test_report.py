"""The report shows the measured values, and compares several results."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from draftsmith.recipes.commands.evaluation.certify import run_certify
from draftsmith.recipes.report.compare import compare
from draftsmith.recipes.report.page import best_lossless, run_report
from draftsmith.recipes.report.tables import conclusions, method_table, number
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.results import derive_path, load_results
from draftsmith.recipes.session.terminal import Terminal
from transformers import LlamaForCausalLM

NASTY = "spec <script>alert('x')</script> & \"more\""
METHODS: list[dict[str, Any]] = [
    {"method": "autoregressive"},
    {"method": "speculative", "options": {"gamma": 2}},
    {"method": "mjsd", "options": {"gamma": 3, "num_beams": 2, "likelihood_threshold": 0.1}},
    {"method": "autoregressive", "temperature": 1.0},
    {"method": "speculative", "temperature": 1.0},
]
VOID = {"meta", "link", "input", "br"}


@pytest.fixture(scope="module")
def results(evaluated: Callable[..., Path]) -> Path:
    path = evaluated("first", methods=METHODS)
    loaded = load_results(path)
    for row in loaded["methods"]:
        row["steady"] = True  # do not depend on the load of the machine
    path.write_text(json.dumps(loaded))
    return path


@pytest.fixture
def rich(results: Path, tmp_path: Path) -> Path:
    """Return real results with added categories, errors and unusual names."""
    loaded = load_results(results)
    for row in loaded["methods"]:
        (part,) = row["by_category"].values()
        row["by_category"] = {"math <b>": part | {"speedup": 1.25}, "chat": part}
    loaded["methods"][1]["label"] = NASTY
    loaded["methods"][2] |= {"perplexity": None, "joules_per_token": 0.125, "energy_source": "nvml"}
    loaded["categories"] = {"math <b>": 3, "chat": 2}
    loaded["errors"] = ["the measurement of '<img src=x>' cannot be true"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps(loaded))
    return tmp_path / "a" / "results.json"


class Page(HTMLParser):
    """HTML parser that collects elements, texts, tables and drawings, and checks that elements are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(self.text)
        self.close()
        assert self.open == []
        self.drawings = [ElementTree.fromstring(drawn) for drawn in re.findall(r"<svg.*?</svg>", self.text, re.DOTALL)]
        self.alerts = " ".join(re.findall(r'<div class="problem" role="alert">(.*?)</div>', self.text, re.DOTALL))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def table(self, caption: str) -> list[list[str]]:
        captions = re.findall(r"<caption[^>]*>(.*?)</caption>", self.text)
        return self.tables[captions.index(caption)]


def test_the_page_shows_the_measurements(results: Path, tmp_path: Path) -> None:
    loaded = load_results(results)
    page = Page(run_report([results], tmp_path / "page.html"))
    head, *rows = page.table("All methods")
    assert head[3] == "tokens per stepτ"
    for index, (row, cells) in enumerate(zip(loaded["methods"], rows, strict=True), 1):
        assert cells[0].startswith(f"{index} {row['label']}")
        expected = (row["temperature"], row["tokens_per_step"], row["acceptance_rate"], row["speedup"], row["bound"])
        for text, value in zip((cells[1], *cells[3:5], cells[6], cells[8]), expected, strict=True):
            assert text == "–" if value is None else float(text.replace(",", "")) == pytest.approx(value, abs=0.0051)
    best = best_lossless(row for row in loaded["methods"] if row["temperature"] == 0)
    assert best is not None
    assert best["label"] == "speculative"
    assert f"{best['speedup']:.2f}× " in page.text
    assert loaded["machine"]["versions"]["torch"] in page.text
    assert loaded["machine"]["name"] in page.text
    assert len(page.tables) == 5  # there is no table for a single category
    assert len(page.drawings) >= 2


def test_the_first_line_names_the_fastest_lossless_method() -> None:
    def row(label: str, speedup: float, **more: Any) -> dict[str, Any]:
        about = {"label": label, "method": label, "temperature": 0.0, "lossless": True, "speedup": speedup}
        return about | {"identical_to_greedy": [12, 12], "speedup_interval": [speedup - 0.1, speedup + 0.1]} | more

    base = row("autoregressive", 1.0)
    rows = [base, row("suffix", 1.51), row("mjsd", 3.0, lossless=False), row("speculative", 1.6, steady=False)]
    assert conclusions(rows) == [
        "fastest lossless method at temperature 0: suffix, 1.51x (1.41–1.61); 12 of 12 texts identical"
    ]
    (slow,) = conclusions([base, row("bpd", 0.8, identical_to_greedy=None)])
    assert slow == "no lossless speedup; the best method at temperature 0: bpd, 0.80x (0.70–0.90)"
    assert conclusions([base]) == []


def test_the_page_is_self_contained_and_escapes_names(rich: Path) -> None:
    page = Page(run_report([rich]))
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", page.text)
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith(("#", "data:,"))
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert all(attrs["role"] == "img" and attrs["aria-label"] for tag, attrs in page.elements if tag == "svg")
    assert any(NASTY in row[0] for row in page.table("All methods"))
    assert [row[1] for row in page.table("By category")[1:3]] == ["math <b>", "chat"]
    assert "<script>alert" not in page.text
    labels = [text.text for drawn in page.drawings for text in drawn.iter("title") if text.text]
    assert any("<script>" in label for label in labels)


def test_missing_values_are_dashes(rich: Path) -> None:
    page = Page(run_report([rich]))
    cost = page.table("Cost")
    energy = cost[0].index("energyJ/token, nvml")
    assert [row[energy] for row in cost[1:]] == ["–", "–", "0.125", "–", "–"]
    assert number(None) == number(float("nan")) == number(True) == "–"


def test_points_of_the_chart_have_the_right_positions(rich: Path) -> None:
    """The axes are tokens per step and speedup; lossy methods are diamonds."""
    drawing = Page(run_report([rich])).drawings[0]
    rows = [row for row in load_results(rich)["methods"] if row["temperature"] == 0]
    points = [each for each in drawing.iter("g") if "point" in each.attrib["class"]]
    assert [each.find("title").text for each in points] == [row["label"] for row in rows]  # type: ignore[union-attr]
    assert [each.find("circle") is not None for each in points] == [row["lossless"] for row in rows]
    places = [float(each.find("text").attrib["x"]) for each in points]  # type: ignore[union-attr]
    heights = [-float(each.find("text").attrib["y"]) for each in points]  # type: ignore[union-attr]
    for coordinates, metric in ((places, "tokens_per_step"), (heights, "speedup")):
        assert np.argsort(coordinates).tolist() == np.argsort([row[metric] for row in rows]).tolist()


def test_an_evaluation_without_rows_shows_its_errors(tmp_path: Path, results: Path) -> None:
    loaded = load_results(results) | {"methods": [], "errors": ["nothing could be true"]}
    (tmp_path / "results.json").write_text(json.dumps(loaded))
    page = Page(run_report([tmp_path / "results.json"]))
    assert page.tables == []
    assert "nothing could be true" in page.alerts


def test_a_certificate_next_to_the_results_is_included(rich: Path) -> None:
    recipe = EvaluateRecipe(**json.loads(rich.read_text())["recipe"])
    chosen = recipe.model_copy(update={"out": str(rich), "limit": 2, "methods": recipe.methods[:2]})
    certificates = run_certify(chosen, tokens=50)
    page = Page(run_report([rich]))
    small, rows = (page.table("Certificates")[part] for part in (slice(1, 3), slice(3, None)))
    assert [row[0] for row in small] == [f"{one.label}, small pair" for one in certificates[:2]]
    assert [(row[0], row[2]) for row in rows] == [(one.label, one.verdict) for one in certificates]
    for row, one in zip(rows, certificates, strict=True):
        assert row[6] == ("–" if not one.tests else f"{min(test['p_value'] for test in one.tests):.1g}")
    assert "certificate" not in page.alerts
    path = derive_path(rich, "certificate")
    stored = json.loads(path.read_text())
    stored["recipe"]["drafter"] = "elsewhere"
    path.write_text(json.dumps(stored | {"complete": False}))
    alerts = Page(run_report([rich])).alerts
    assert "drafter elsewhere" in alerts
    assert "is incomplete" in alerts
    path.write_text(json.dumps({"kind": "certificate", "schema": 1, "certificates": [{"label": "a"}]}))
    assert str(path) in Page(run_report([rich])).alerts  # the page is still written


def test_a_certificate_of_artifacts_that_have_changed_is_stale(tmp_path: Path, results: Path, rich: Path) -> None:
    loaded = load_results(rich)
    for name in ("target", "drafter"):
        shutil.copytree(loaded["recipe"][name], tmp_path / name)
        loaded["recipe"][name] = str(tmp_path / name)
    loaded["recipe"] |= {"out": str(rich), "dtype": "bfloat16"}  # a different dtype than that of the files
    rich.write_text(json.dumps(loaded))
    recipe = EvaluateRecipe(**loaded["recipe"])
    run_certify(recipe.model_copy(update={"limit": 1, "methods": recipe.methods[:2]}), tokens=20)
    assert "stale" not in Page(run_report([rich])).text
    LlamaForCausalLM.from_pretrained(results.parent.parent / "target").save_pretrained(tmp_path / "drafter")
    assert f"drafter {tmp_path / 'drafter'}" in Page(run_report([rich])).alerts
    shutil.rmtree(tmp_path / "drafter")  # a missing drafter cannot be compared
    assert "stale" not in Page(run_report([rich])).text
    rich.write_text(json.dumps(loaded | {"recipe": loaded["recipe"] | {"dtype": "float32"}}))
    assert "bfloat16, expected float32" in Page(run_report([rich])).alerts


def test_significant_changes_are_bold(results: Path) -> None:
    loaded = load_results(results)
    versions = []
    for speedup, interval in ((1.5, [1.4, 1.6]), (1.65, [1.55, 1.7]), (1.8, [1.7, 1.9]), (1.2, None)):
        changed = copy.deepcopy(loaded)
        changed["methods"][1] |= {"speedup": speedup, "speedup_interval": interval}
        versions.append(changed)
    tables = {table.caption: table for table in compare(["a", "b", "c", "d"], versions).tables}
    assert {len(table.rows) for table in tables.values()} == {len(loaded["methods"])}
    changes = tables["Speedup"].rows[1][-3:]
    assert [(cell.text, cell.style) for cell in changes] == [("+10.0", ""), ("+20.0", "bold"), ("-20.0", "")]


def test_results_with_other_prompts_and_methods_are_compared(
    results: Path, evaluated: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = evaluated("second", limit=4, methods=[*METHODS[:2], {"method": "prompt-lookup"}])
    page = Page(run_report([results, other], tmp_path / "page.html"))
    output = " ".join(capsys.readouterr().out.split())
    assert "hash of the prompts" in output
    assert "mjsd at temperature 0" in output
    rows = page.table("Tokens per step")
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a" and attributes["href"][0] == "#"]
    marks = [attributes["id"] for _, attributes in page.elements if "part-" in attributes.get("id", "")]
    assert links == [f"#{mark}" for mark in marks]
    assert [row[0] for row in rows[1:]] == ["autoregressive", "speculative"]
    assert rows[0][2:4] == ["first/results.json", "second/results.json"]
    assert page.text.count("<h2 ") == 3  # the comparison and one section per file


def test_rows_have_distinct_labels_and_unsteady_ones_are_marked(results: Path, tmp_path: Path) -> None:
    loaded = load_results(results)
    speeds = {"autoregressive": 1.0, "speculative": 1.5, "mjsd": 0.7}
    for row in loaded["methods"]:
        row |= {"speedup": speeds[row["method"]], "speedup_interval": None}
    quick = copy.deepcopy(loaded["methods"][1]) | {"label": "quick", "speedup": 1.8, "steady": False, "runs": 3}
    loaded["methods"].insert(2, quick)
    (tmp_path / "results.json").write_text(json.dumps(loaded))
    page = Page(run_report([tmp_path / "results.json"]))
    kinds = [attributes.get("class") for tag, attributes in page.elements if tag == "tr"][1:7]
    assert kinds == [None, "best", None, "slower", None, "best"]  # steady rows come first, temperature by temperature
    rows = page.table("All methods")[1:]
    assert [row[6].startswith(("1.80?", "1.50")) for row in rows] == [False, True, True, False, False, True]
    assert "quick" in page.alerts
    assert "speculative" not in page.alerts
    notes = compare(["a", "b"], [loaded, loaded]).notes
    assert [note.partition(": ")[2] for note in notes if "(a)" in note and "quick" in note] == [
        "quick at temperature 0 (a)"
    ]
    with (console := Terminal(width=100)).capture() as output:
        console.print(method_table("a title", loaded["methods"]).rich())
    assert output.get().count("1.80?") == 1
    assert output.get().count("?") == 1


def test_incomparable_results_are_reported(results: Path) -> None:
    loaded = load_results(results)
    other = loaded | {"machine": loaded["machine"] | {"name": "another"}}
    assert any(note.startswith("machine: ") for note in compare(["a", "b"], [loaded, other]).notes)
    assert compare(["a", "b"], [loaded, loaded]).notes == []
    cold, warm = (loaded | {"methods": part} for part in (loaded["methods"][:3], loaded["methods"][3:]))
    with pytest.raises(ValueError, match=r"cold: autoregressive at temperature 0.*warm"):
        compare(["cold", "warm"], [cold, warm])
    with pytest.raises(ValueError, match=re.escape(str(results))):
        run_report([results, results.parent / ".." / results.parent.name / results.name])


def test_names_and_numbers_are_not_wrapped_on_a_terminal(results: Path) -> None:
    rows = load_results(results)["methods"]
    rows[1] |= {"label": "multi-candidate", "tokens_per_second": 123456.0, "speedup_interval": [1.23, 2.34]}
    with (console := Terminal(width=80)).capture() as output:
        console.print(method_table("a title", rows).rich())
    assert {"multi-candidate", "123,456", "1.23–2.34"} <= set(output.get().split())
    assert max(map(len, output.get().splitlines())) <= 80
