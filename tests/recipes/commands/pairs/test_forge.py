"""`draftsmith forge`: decisions in known situations, resumption, and results."""

import itertools
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.heads.dflash import save_dflash
from draftsmith.decode.evaluation.tuning.plan import Candidate, Kind
from draftsmith.decode.evaluation.tuning.tuner import Workload
from draftsmith.recipes.assemble.teacher import states_read
from draftsmith.recipes.commands.pairs import in_engine
from draftsmith.recipes.commands.pairs.in_engine import check_engine, tune_in_engine
from draftsmith.recipes.commands.pairs.stages import Row, Source, base_of, evaluation_of, kind_of, training_of
from draftsmith.recipes.commands.serving import lengths
from draftsmith.recipes.schema.forge import ForgeRecipe
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import HeadsRecipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

Run = Callable[..., Any]


@pytest.fixture
def forged(tiny_pair: Path, corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that builds a `forge` command for a small target."""

    def command(out: Path, *more: str, hours: str = "0.01") -> list[str]:
        arguments = ["forge", str(tiny_pair / "target"), "--prompts", str(corpus / "rows.json"), "--out", str(out)]
        return [*arguments, "--hours", hours, "template=chatml", *more]

    return command


@pytest.mark.parametrize(
    "kills",
    [
        ("answers.jsonl",),
        pytest.param(("probe.jsonl", "costs.json", "answers.jsonl"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_a_killed_forge_makes_the_same_decisions(
    forged: Run, cli: Run, launcher: Any, tmp_path: Path, kills: tuple[str, ...]
) -> None:
    """Kill the command as soon as each file of `kills` exists. Measured speeds are stored, so decisions are equal."""
    out = tmp_path / "forge"
    for ready in kills:
        process = launcher.start(*forged(out))
        until = time.monotonic() + 120
        while not (out / ready).exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert process.poll() is None, f"the command ended before it wrote {ready}"
        process.send_signal(signal.SIGKILL)
        process.ended()
    done = cli(*forged(out))
    assert done.returncode == 0, done.stderr
    first = json.loads((out / "forge.json").read_text())
    again = cli(*forged(out))
    assert again.returncode == 0, again.stderr
    second = json.loads((out / "forge.json").read_text())
    assert first["decision_log"] == second["decision_log"]
    assert first["workloads"] == second["workloads"]
    assert any("measuring " in line and " settings" in line for line in lines_of(first))
    page = (out / "forge.html").read_text()
    assert "Decision log" in page
    if first["workloads"][0]["winner"] is not None:
        assert load_recipe(str(out / "winner.yaml")).kind == "evaluate"
    other = cli(*forged(out, "--temperature", "1"))
    assert other.returncode == 2
    assert "temperature" in other.stderr


def planned(out: Path, seconds: Sequence[float] = (0.002, 0.002), answer: float = 0.05) -> None:
    """Write measured costs: forward passes of 1 and 64 nodes (`seconds`), and an answer. Equal costs favour heads."""
    out.mkdir(parents=True)
    costs: dict[str, Any] = {
        "shape": {"layers": 2, "layer_parameters": 1e6, "hidden": 64, "vocabulary": 1000},
        "nodes": [1, 64],
    }
    costs |= {"seconds": seconds, "seconds_per_answer": answer, "eagle": True, "dflash": False}
    (out / "costs.json").write_text(json.dumps(costs))


def lines_of(results: dict[str, Any]) -> list[str]:
    """Return all lines of the decision log."""
    return list(itertools.chain(*results["decision_log"].values()))


@pytest.fixture
def forge(cli: Run) -> Callable[[list[str], Path], dict[str, Any]]:
    """Return a function that runs a `forge` command to completion and returns the results."""

    def run(command: list[str], out: Path) -> dict[str, Any]:
        done = cli(*command)
        assert done.returncode == 0, done.stderr
        return dict(json.loads((out / "forge.json").read_text()))

    return run


@pytest.mark.parametrize(
    ("costs", "hours", "message"),
    [
        ({"answer": 60.0}, "0.01", "no training: the budget allows 0 answers"),
        pytest.param(
            {"seconds": (0.002, 0.128)}, "0.01", "no training: no candidate could be faster", marks=pytest.mark.slow
        ),
    ],
    ids=["no answers", "cost proportional to tokens"],
)
def test_nothing_is_trained_with_a_small_budget_or_high_costs(
    forged: Run, forge: Run, tmp_path: Path, costs: dict[str, Any], hours: str, message: str
) -> None:
    planned(out := tmp_path / "forge", **costs)
    results = forge(forged(out, hours=hours), out)
    assert any(message in line for line in lines_of(results))
    assert not any(workload["compared"] for workload in results["workloads"])
    assert len(results["workloads"][0]["tuned"]) >= 1
    assert not list(out.glob("trained/*-3*"))


def first_layers(folder: Path, tokenizer: Path, layers: int, num_kept: int) -> None:
    """Save the first `num_kept` layers of a random target in which only the MLP of the first layer has an effect.

    The next token depends only on the last one, so that greedy text soon repeats itself.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, num_hidden_layers=layers, max_position_embeddings=512, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            idle = "o_proj" in name or ("down_proj" in name and "layers.0." not in name)
            weight.data.normal_(0.0, 0.0 if idle else weight.shape[1] ** -0.5)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:num_kept], num_kept
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


@pytest.fixture
def shallow(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that builds the command for a target with eight layers, of which only the first matters."""
    first_layers(tmp_path / "target", corpus / "tokenizer", 8, 8)

    def command(out: Path, *more: str) -> list[str]:
        arguments = ["forge", str(tmp_path / "target"), "--prompts", str(corpus / "rows.json"), "--out", str(out)]
        return [*arguments, "template=chatml", *more]

    return command


@pytest.mark.slow
def test_decisions_in_known_situations(shallow: Run, forge: Run, corpus: Path, tmp_path: Path) -> None:
    """Prompt lookup wins if greedy text repeats itself. At temperature 1, a one-layer drafter that is equivalent to the
    eight-layer target wins; a drafter that is unrelated to the target never wins."""
    tokenizer, out = corpus / "tokenizer", tmp_path / "forge"
    first_layers(tmp_path / "given", tokenizer, 8, 1)
    first_layers(tmp_path / "other", tokenizer, 1, 1)
    options = ["--drafter", str(tmp_path / "other"), "--drafter", str(tmp_path / "given")]
    results = forge(shallow(out, *options, "--temperature", "0,1", "--hours", "0.08"), out)
    greedy, drawn = (workload["winner"] for workload in results["workloads"])
    assert greedy["name"] == "prompt lookup"
    assert drawn["name"] == str(tmp_path / "given")
    assert "2-layer drafter" in {each["name"] for each in results["workloads"][1]["compared"]}, "no drafter was trained"


@pytest.mark.slow
def test_training_is_launched_as_configured(forged: Run, cli: Run, tmp_path: Path) -> None:
    """The manifests record training with two processes, and a failed launch ends the command."""
    planned(out := tmp_path / "forge")
    settings = "--multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    command = forged(out, "processes=2", f"launch='{settings}'", hours="0.06")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    trained = [load_manifest(folder).training for folder in out.glob("trained/eagle-*") if folder.suffix == ""]
    assert {each["processes"] for each in trained if each} == {2}
    failing = forged(tmp_path / "other", "processes=2", "launch='--mixed_precision none'", hours="0.06")
    planned(tmp_path / "other")
    failed = cli(*failing)
    assert failed.returncode == 2
    assert "--mixed_precision none" in failed.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_forge_killed_at_random_times_trains_the_same_weights(
    forged: Run, cli: Run, launcher: Any, tmp_path: Path
) -> None:
    """The decisions and weights equal those of an uninterrupted run with the same measurements."""
    chance, command, num_kills = random.Random(0), forged(Path("forge"), hours="0.06"), 0
    killed, alone = ((tmp_path / name / "forge") for name in ("killed", "alone"))
    planned(killed)
    for _ in range(10):
        process = launcher.start(*command, cwd=killed.parent)
        time.sleep(chance.uniform(1.0, 9.0))
        num_kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.ended()
    done = cli(*command, cwd=killed.parent)
    assert done.returncode == 0, done.stderr
    for each in [*killed.glob("*.json"), killed / "corpus", *killed.glob("trained/*-16")]:
        if each.name != "forge.json":
            copy: Any = shutil.copytree if each.is_dir() else shutil.copy
            (alone / each.relative_to(killed)).parent.mkdir(parents=True, exist_ok=True)
            copy(each, alone / each.relative_to(killed))
    completed = cli(*command, cwd=alone.parent)
    assert completed.returncode == 0, completed.stderr
    logs = [json.loads((folder / "forge.json").read_text())["decision_log"] for folder in (killed, alone)]
    assert logs[0] == logs[1]
    weights = [
        {file.relative_to(folder): file.read_bytes() for file in folder.glob("trained/*/*.safetensors")}
        for folder in (killed, alone)
    ]
    assert num_kills >= 5
    assert len([path for path in weights[0] if not path.parts[1].endswith("-16")]) >= 2, "no weights of both runs"
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_larger_budget_trains_the_chosen_candidate(shallow: Run, forge: Run, tmp_path: Path) -> None:
    """`--more-hours` trains the chosen candidate further; a new value of `--hours` repeats the competition."""
    out = tmp_path / "forge"
    first = forge(shallow(out, "--temperature", "1", "--hours", "0.05"), out)
    again = forge(shallow(out, "--temperature", "1", "--hours", "0.05"), out)
    assert first["workloads"][0]["tuned"]
    assert again["workloads"] == first["workloads"], "a finished run was measured again"
    raced = {folder.name for folder in out.glob("trained/*-*[0-9]")}
    second = forge(shallow(out, "--temperature", "1", "--hours", "0.05", "--more-hours", "0.005"), out)
    (new,) = {folder.name for folder in out.glob("trained/*-*[0-9]")} - raced
    chosen = [line for line in lines_of(first) if "spent" in line]
    assert [line for line in lines_of(second) if "spent" in line] == chosen
    kind, _, steps = new.rpartition("-")
    assert int(steps) > max(int(each.rpartition("-")[2]) for each in raced if each.startswith(f"{kind}-"))
    third = forge(shallow(out, "--temperature", "1", "--hours", "0.06"), out)
    assert [line for line in lines_of(third) if "spent" in line] != chosen


def test_refusals_leave_no_files_and_plans_train_nothing(forged: Run, cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "forge"
    for word, message in (("batch=64", "256 held-out prompts"), ("max_prompt_tokens=1", "exceed 1 tokens")):
        done = cli(*forged(out, word))
        assert done.returncode == 2
        assert message in done.stderr
    done = cli(*forged(out, "--plan"))
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads((out / "plan.json").read_text())
    assert not (out / "forge.json").exists()
    assert plan["workloads"][0]["winner"] is None
    assert not (out / "trained").exists()
    assert not (out / "answers.jsonl").exists()


@pytest.fixture
def in_vllm(vllm: object, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that tunes a drafter in an imitation of vLLM, which accepts two draft tokens per step."""
    for module in (in_engine, lengths):
        monkeypatch.setattr(module, "MAX_TOKENS", 2)
    (tmp_path / "target").symlink_to(tiny_pair / "target")
    questions = [{"conversations": [{"from": "human", "value": f"one two three {n}"}]} for n in range(8)]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "heldout.jsonl").write_text("\n".join(map(json.dumps, questions)))
    values: dict[str, Any] = {"kind": "forge", "target": str(tiny_pair / "target"), "out": str(tmp_path)}

    def tuned(artifact: Path | None, name: str, **more: Any) -> list[str]:
        recipe = ForgeRecipe.model_validate(values | {"engine": "vllm"} | more)
        check_engine(recipe)
        return tune_in_engine(recipe, name, artifact, 8)

    return tuned


@pytest.mark.slow
def test_trained_heads_are_exported_and_tuned_in_the_engine(in_vllm: Run, tiny_pair: Path, tmp_path: Path) -> None:
    """The second call reuses finished measurements and starts no engine."""
    lines = in_vllm(tiny_pair / "heads", "heads", batch=[1, 2])
    assert [line.split(": ")[0] for line in lines if not line.startswith("serve it")] == [
        f"vllm, heads, batch {count}, temperature 0" for count in (1, 2)
    ]
    assert load_manifest(tmp_path / "heads-vllm").export is not None
    logs = list(tmp_path.glob("serve-vllm*.log"))
    assert logs
    for log in logs:
        log.unlink()
    assert in_vllm(tiny_pair / "heads", "heads", batch=[1, 2]) == lines
    assert not list(tmp_path.glob("serve-vllm*.log"))


def test_a_drafter_with_another_vocabulary_is_reported(
    in_vllm: Run, make_llama: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pair / "target", tmp_path / "other")
    make_llama(64).save_pretrained(tmp_path / "other")
    (refused,) = in_vllm(tmp_path / "other", "given-2")
    assert refused.startswith(f"vllm cannot draft with {tmp_path}/other: ")
    assert "64" in refused


@pytest.mark.slow
def test_the_prompt_lookup_of_an_engine_is_tuned(in_vllm: Run) -> None:
    lines = in_vllm(None, "lookup")
    assert lines[0].startswith("vllm, lookup, batch 1, temperature 0: ")
    assert ("ngram" in lines[1]) == ("draft tokens" in lines[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "vllm"), "vllm is not on PATH"),
        (("--engine", "vlm"), "vlm"),
        (("--engine", "llama.cpp", "llama_cpp=here"), "llama-server is not on PATH"),
    ],
)
def test_a_missing_engine_is_reported_first(
    forged: Run, cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    done = cli(*forged(tmp_path / "none", *options))
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_an_unsuitable_given_drafter_is_skipped(
    forged: Run, cli: Run, tiny_pair: Path, make_llama: Run, tmp_path: Path
) -> None:
    make_llama(64).save_pretrained(tmp_path / "other")
    options = ["--drafter", str(tmp_path / "other"), "--drafter", str(tiny_pair / "drafter")]
    done = cli(*forged(tmp_path / "out", *options))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "forge.json").read_text())
    (left_out,) = (line for line in lines_of(results) if f"{tmp_path / 'other'}: skipped" in line)
    assert "64" in left_out
    assert str(tiny_pair / "drafter") in [each["name"] for each in results["workloads"][0]["compared"]]


def test_settings_of_several_sources_share_one_evaluation() -> None:
    recipe = ForgeRecipe(kind="forge", target="target", out="runs/forge", dtype="int8")
    own, other = Source("own", "drafter", "runs/own", 9), Source("given", "eagle", "runs/given")
    heads, lookup = Source("heads", "heads", "runs/heads", 9), Source("prompt lookup")
    rows = [Row(lookup, "suffix", {}), Row(own, "speculative", {"gamma": 2}), Row(other, "speculative", {"gamma": 2})]
    rows.append(Row(heads, "suffix", {"fallback": "heads", "datastore": "table"}))
    base = base_of(recipe)
    merged = evaluation_of(base, recipe, "name", rows, Workload(2, 1.0), 8)
    assert [row.options.get("drafter") for row in merged.methods] == [None, None, None, 2, None]
    assert (merged.drafter, merged.more_drafters, merged.heads) == ("runs/own", ["runs/given"], "runs/heads")
    assert (merged.table, merged.batch, merged.temperature, merged.limit) == (base.table.out, 2, 1.0, 8)
    assert merged.dtype == "int8"
    alone = evaluation_of(base, recipe, "name", rows[:1], Workload(1, 0.0), 8)
    assert (alone.drafter, alone.heads, alone.table) == (None, None, None)


def test_dflash_and_eagle_can_share_a_cache_and_an_evaluation(make_llama: Run, tmp_path: Path) -> None:
    make_llama(64, num_hidden_layers=4).save_pretrained(tmp_path / "target")
    base = base_of(ForgeRecipe(kind="forge", target="target", out=str(tmp_path)))
    kinds: tuple[Kind, ...] = ("eagle", "dflash")
    eagle, dflash = (training_of(base, Candidate("", kind, (), 0.1), 64, 32, tmp_path / kind) for kind in kinds)
    assert isinstance(eagle, HeadsRecipe)
    assert isinstance(dflash, HeadsRecipe)
    assert (dflash.architecture, dflash.num_heads, dflash.vocabulary) == ("dflash", 7, None)
    assert (dflash.hidden, states_read(dflash)) == (eagle.hidden, states_read(eagle))


def test_the_kind_of_a_given_drafter_is_detected(make_llama: Run, make_dflash: Run, tmp_path: Path) -> None:
    make_llama(64).save_pretrained(tmp_path / "drafter")
    make_llama(64, pard_token=7).save_pretrained(tmp_path / "parallel")
    save_dflash(make_dflash(make_llama(64), block_size=3), tmp_path / "dflash")
    kinds = ("drafter", "parallel", "dflash")
    assert tuple(kind_of(tmp_path / name) for name in kinds) == kinds
    source = Source("DFlash", "dflash", str(tmp_path / "dflash"))
    assert source.default(6).options == {"gamma": 2}, "a draft has at most the tokens of a block"
    assert {row.options["gamma"] for row in source.settings(False, 0.0) if row.method == "speculative"} == {1, 2}
