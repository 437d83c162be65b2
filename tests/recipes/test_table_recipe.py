"""A recipe of kind table: what it counts, in one process or several, killed and gone on, against counts by hand."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from draftsmith.checkpoints.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.table import TABLE_FILE, BigramTable
from draftsmith.data.conversations import Conversation, CorpusReport, Turn
from draftsmith.data.rendering import render
from draftsmith.data.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.loading import load_recipe, shipped_recipes
from draftsmith.recipes.prepare import prepare_data, training_conversations
from draftsmith.recipes.run import run_train
from draftsmith.recipes.table_state import locked
from draftsmith.recipes.training import TableRecipe
from draftsmith.train.counting import PairCounter, counted
from draftsmith.train.table import PLACE, Share, count_laid, laid_end_to_end, spilled_place, token_documents
from hypothesis import given, settings
from hypothesis import strategies as st

Cli = Callable[..., subprocess.CompletedProcess[str]]
Pairs = Counter[tuple[int, int]]


def pairs_of(documents: Iterable[Iterable[int]]) -> Pairs:
    """Neighbours within documents."""
    return Counter(pair for document in documents for pair in pairwise(list(document)))


def pairs_in(table: BigramTable) -> Pairs:
    rows = np.repeat(np.arange(table.vocab_size), np.diff(table.row_ptr.numpy()))
    return Counter(dict(zip(zip(rows.tolist(), table.col.tolist(), strict=True), table.count.tolist(), strict=True)))


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe's values."""
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "heldout_share": 0.2}
    return {
        "kind": "table",
        "out": str(tmp_path / "table"),
        "tokenizer": str(corpus / "tokenizer"),
        "data": data | {"cache": str(tmp_path / "prepared")},
    }


def written(recipe: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def loaded(recipe: dict[str, Any]) -> TableRecipe:
    return TableRecipe.model_validate(recipe)


def conversations(recipe: TableRecipe) -> list[Conversation]:
    reports = [CorpusReport() for _ in recipe.data.parts()]
    return list(training_conversations(recipe.data, reports, tell=False))


def test_whole_conversations_are_counted_as_they_are_rendered(recipe: dict[str, Any]) -> None:
    mine = loaded(recipe)
    out = run_train(mine)
    tokenizer, template = load_tokenizer(mine.tokenizer), get_template("chatml")
    chats = conversations(mine)
    assert 0 < len(chats) < 80, "some are held out"
    rendered = [render(chat, template, tokenizer).ids.tolist() for chat in chats]
    assert max(map(len, rendered)) > 64, "longer than a block, and never split"
    table = BigramTable.load(out)
    assert pairs_in(table) == pairs_of(rendered)
    assert table.unigram.tolist() == np.bincount(np.concatenate(rendered), minlength=320).tolist()
    manifest = verify_artifact(out)
    assert manifest.data["conversations"] == manifest.data["documents"] == len(chats)
    assert manifest.data["tokens"] == sum(map(len, rendered))
    assert manifest.data["corpus"]["kept"] == 80
    assert manifest.shapes["entries"] == len(table.col)
    assert not Path(mine.data.cache, "train").exists()
    assert not Path(f"{out}.state").exists(), "what was counted is in the artifact"
    heldout = prepare_data(mine.data, tokenizer, quiet=True).folder / "heldout.jsonl"
    kept = {json.loads(line)["id"] for line in heldout.read_text().splitlines()}
    assert kept.isdisjoint(chat.id for chat in chats)
    assert len(kept) + len(chats) == 80


def test_answers_are_the_pairs_whose_right_token_is_trained_on(recipe: dict[str, Any]) -> None:
    mine = loaded(recipe | {"count": {"pairs": "answers"}})
    table = BigramTable.load(run_train(mine))
    tokenizer, template = load_tokenizer(mine.tokenizer), get_template("chatml")
    expected: Pairs = Counter()
    for chat in conversations(mine):
        document = render(chat, template, tokenizer)
        flags = document.trainable()
        expected.update(
            pair for pair, trained in zip(pairwise(document.ids.tolist()), flags[1:], strict=True) if trained
        )
    assert pairs_in(table) == expected


@pytest.mark.parametrize("roles", [[], ["user"], ["assistant"], ["system"], ["assistant", "user", "system"]])
def test_messages_are_counted_without_the_templates_tokens(
    recipe: dict[str, Any], tmp_path: Path, roles: list[str]
) -> None:
    rows = [
        {
            "id": f"row{number}",
            "messages": [
                {"role": "system", "content": "the tree keeps"},
                {"role": "user", "content": f"the token {number}"},
                {"role": "assistant", "content": "draft target"},
            ],
        }
        for number in range(30)
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["data"]["source"] = str(source)
    mine = loaded(recipe | {"count": {"pairs": "messages", "roles": roles}})
    table = BigramTable.load(run_train(mine))
    tokenizer = load_tokenizer(mine.tokenizer)
    wanted = roles or ["user", "assistant"]
    texts = [turn.text for chat in conversations(mine) for turn in chat.turns if turn.role in wanted]
    assert pairs_in(table) == pairs_of(tokenizer(texts, add_special_tokens=False).input_ids)


def test_messages_behind_a_space_begin_with_a_word(tmp_path: Path) -> None:
    """Sentencepiece writes the first word of a message otherwise than the middle of one."""
    shared = Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
    if not (shared / "tokenizer" / "llama2c").is_dir():
        pytest.skip("needs LLaMA's tokenizer of the shared data")
    tokenizer = load_tokenizer(str(shared / "tokenizer" / "llama2c"))
    turns = (Turn("user", "Hello there"), Turn("assistant", "Fine"), Turn("user", "world"), Turn("assistant", " two"))
    chat = Conversation("a", turns)
    for name in ("vicuna-v1.1", "plain", "alpaca"):
        template = get_template(name)
        whole = render(chat, template, tokenizer).ids.tolist()
        ((number, found),) = token_documents([(7, chat)], tokenizer, template, pairs="messages")
        assert number == 7
        assert len(found) == 4
        for ids in found:
            text = ids.tolist()
            assert text in [whole[at : at + len(text)] for at in range(len(whole))], name


def test_a_padded_vocabulary_is_asked_for_by_its_size(recipe: dict[str, Any]) -> None:
    table = BigramTable.load(run_train(loaded(recipe | {"vocab_size": 384})))
    assert table.vocab_size == 384
    with pytest.raises(ValueError, match=r"`vocab_size` is 319, and the tokenizer .* has 320"):
        run_train(loaded(recipe | {"vocab_size": 319, "out": recipe["out"] + "-small"}))


def test_pruning_keeps_the_whole_table_beside_the_pruned_one(recipe: dict[str, Any], tmp_path: Path) -> None:
    whole = BigramTable.load(run_train(loaded(recipe)))
    pruned_recipe = recipe | {"out": str(tmp_path / "small"), "prune": {"min_count": 3}}
    pruned = BigramTable.load(run_train(loaded(pruned_recipe)))
    assert pairs_in(pruned) == Counter({pair: n for pair, n in pairs_in(whole).items() if n >= 3})
    assert (tmp_path / "small-whole" / TABLE_FILE).read_bytes() == (tmp_path / "table" / TABLE_FILE).read_bytes()
    assert load_manifest(tmp_path / "small-whole").recipe["prune"] is None
    assert load_manifest(tmp_path / "small").data == load_manifest(tmp_path / "small-whole").data
    shutil.rmtree(tmp_path / "small")
    (Path(recipe["data"]["source"])).touch()
    run_train(loaded(pruned_recipe))
    assert (tmp_path / "small" / "artifact.json").is_file(), "of the whole table that is there already"
    alone = recipe | {"out": str(tmp_path / "alone"), "prune": {"top": 2, "keep_whole": False}}
    run_train(loaded(alone))
    assert not (tmp_path / "alone-whole").exists()


def test_wrong_settings_are_named_with_the_right_ones(cli: Cli, recipe: dict[str, Any], tmp_path: Path) -> None:
    path = str(written(recipe, tmp_path))
    for changes, words in (
        (["count.pairs=messages", "count.roles=[asistant]"], "did you mean 'assistant'"),
        (["count.roles=[user]"], "set `pairs: messages`"),
        (["count.pairs=answer"], "answers"),
        (["prune={}"], "`prune` leaves nothing out"),
        (["count.memory=3"], "Did you mean 'memory_mb'"),
    ):
        with pytest.raises(ValueError, match=words.replace("`", ".").replace("(", ".")):
            load_recipe(path, changes)
    refused = cli("train", path, "data.heldout_share=0.999")
    assert refused.returncode == 2
    assert "there is nothing to count" in refused.stderr
    assert "Traceback" not in refused.stderr


def large(folder: Path, rows: int = 12_000) -> Path:
    """Enough rows for some seconds of counting."""
    path = folder / "large.jsonl"
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(400)]
    with path.open("w") as out:
        for number in range(rows):
            texts = [" ".join(rng.choices(words, k=rng.randint(4, 60))) for _ in range(2)]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            out.write(json.dumps({"id": f"row{number}", "messages": turns}) + "\n")
    return path


@pytest.fixture(scope="module")
def counted_once(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large corpus counted by one process that nobody disturbs: its recipe, with the artifact beside it."""
    folder = tmp_path_factory.mktemp("large")
    data = {"source": str(large(folder)), "template": "chatml", "cache": str(folder / "prepared")}
    values = {"kind": "table", "out": str(folder / "once"), "tokenizer": str(corpus / "tokenizer"), "data": data}
    # the least memory and time between spills that there are: many runs on disk
    values["count"] = {"memory_mb": 1, "save_minutes": 1e-6}
    run_train(loaded(values))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


ONE_THREAD = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def start(recipe: Path, out: str | Path, places: list[Path | None], *changes: str) -> list[subprocess.Popen[str]]:
    """Processes of one launch, each in its folder (None: this one), as launchers start them."""
    arguments = [sys.executable, "-m", "draftsmith", "train", str(recipe), f"out={out}", *changes]
    world: dict[str, str] = {}
    if len(places) > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size = str(len(places))
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {} for rank in range(len(places))]
    return [
        subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ONE_THREAD | world | rank, cwd=place)
        for place, rank in zip(places, ranks, strict=True)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Their exit codes, and what they said."""
    said = [process.communicate(timeout=240)[1] for process in processes]
    return [process.returncode for process in processes], said


def run(recipe: Path, out: Path, processes: int, *changes: str) -> str:
    """Count to the end; what was said."""
    codes, said = ended(start(recipe, out, [None] * processes, *changes))
    assert codes == [0] * processes, said
    return "".join(said)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_leave_the_identical_file(counted_once: Path, tmp_path: Path, processes: int) -> None:
    out = tmp_path / "table"
    said = run(counted_once, out, processes)
    assert (out / TABLE_FILE).read_bytes() == (counted_once.with_name("once") / TABLE_FILE).read_bytes()
    mine, alone = load_manifest(out), load_manifest(counted_once.with_name("once"))
    assert mine.data == alone.data
    assert mine.training == alone.training
    assert said.count("wrote") == 1, "the main process alone speaks"


def test_accelerate_launches_it(counted_once: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "draftsmith", "train", str(counted_once), f"out={tmp_path / 'table'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table" / TABLE_FILE).read_bytes() == (counted_once.with_name("once") / TABLE_FILE).read_bytes()


def places(out: Path) -> dict[str, int]:
    """How far the ranks' folders say that they are."""
    found = Path(f"{out}.state/count").glob("rank-*")
    return {path.name: spilled_place(path) for path in found}


def stop(recipe: Path, out: Path, processes: int, how: signal.Signals) -> tuple[list[int], str]:
    """Start counting, and send a signal to all processes once they have put something on disk."""
    before = places(out)
    started = start(recipe, out, [None] * processes)
    deadline = time.monotonic() + 120
    while all(place == before.get(name, 0) for name, place in places(out).items()):
        assert all(process.poll() is None for process in started), ended(started)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in started:
        process.send_signal(how)
    codes, said = ended(started)
    return codes, "".join(said)


def test_a_killed_count_goes_on_with_any_number_of_processes(counted_once: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    for processes in (1, 2, 1):
        codes, said = stop(counted_once, out, processes, signal.SIGKILL)
        assert codes == [-signal.SIGKILL] * processes, said
    assert {"rank-0-of-1", "rank-0-of-2", "rank-1-of-2"} <= set(places(out))
    assert not out.exists()
    run(counted_once, out, 2)
    assert (out / TABLE_FILE).read_bytes() == (counted_once.with_name("once") / TABLE_FILE).read_bytes()
    assert load_manifest(out).data == load_manifest(counted_once.with_name("once")).data


@pytest.mark.parametrize(("how", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stopped_count_keeps_what_it_has(
    counted_once: Path, tmp_path: Path, how: signal.Signals, processes: int
) -> None:
    out = tmp_path / "table"
    codes, said = stop(counted_once, out, processes, how)
    assert codes == [128 + how] * processes, said
    assert said.count("goes on from what is counted") == 1
    assert "Traceback" not in said
    assert "going on after" in run(counted_once, out, processes)
    assert (out / TABLE_FILE).read_bytes() == (counted_once.with_name("once") / TABLE_FILE).read_bytes()


def test_a_signal_to_one_process_ends_all_as_that_signal(counted_once: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    started = start(counted_once, out, [None, None])
    deadline = time.monotonic() + 120
    while not any(places(out).values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started[1].send_signal(signal.SIGTERM)
    codes, said = ended(started)
    assert codes == [128 + signal.SIGTERM] * 2, said
    assert not out.exists()
    assert "Traceback" not in "".join(said)


def test_other_settings_count_anew(counted_once: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    stop(counted_once, out, 1, signal.SIGKILL)
    said = run(counted_once, out, 1, "count.pairs=answers", "count.memory_mb=512")
    assert "counting anew" in said
    assert "(pairs)" in said, "memory changes nothing"
    assert "going on after" not in said
    alone = tmp_path / "alone"
    run(counted_once, alone, 1, "count.pairs=answers")
    assert (out / TABLE_FILE).read_bytes() == (alone / TABLE_FILE).read_bytes()


def test_a_mistake_in_several_processes_is_told_once(counted_once: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    rows = counted_once.with_name("large.jsonl").read_text().splitlines()[:50]
    broken.write_text("\n".join(rows) + '\n{"id": "torn')
    for change, words in ((f"data.source={broken}", "row 51"), ("vocab_size=7", "`vocab_size` is 7")):
        codes, said = ended(start(counted_once, tmp_path / "table", [None, None], change))
        assert codes == [2, 2], said
        assert [line for text in said for line in text.splitlines() if "rror" in line] == [
            line for line in said[0].splitlines() if line.startswith("error:") and words in line
        ]
        assert words in said[0]


def test_processes_that_do_not_share_a_file_system_are_told(counted_once: Path, tmp_path: Path) -> None:
    """Two processes of one launch in different folders stand for two machines."""
    machines: list[Path | None] = [tmp_path / "first", tmp_path / "second"]
    for machine in machines:
        assert machine is not None
        machine.mkdir()
    codes, said = ended(start(counted_once, "table", machines))
    assert codes == [2, 2]
    assert "must lie on a file system that all processes share" in said[0]
    assert "error:" not in said[1]


def test_two_counts_into_one_place_are_refused(recipe: dict[str, Any]) -> None:
    folder = Path(recipe["out"] + ".state") / "count"
    folder.mkdir(parents=True)
    with locked(folder), pytest.raises(ValueError, match="another process is counting into"):
        run_train(loaded(recipe))
    assert run_train(loaded(recipe)).is_dir()


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_conversation_is_counted_once_whatever_processes_come_and_go(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs of any number of processes, each killed anywhere behind its last spill, as the recipe counts them."""
    folder = tmp_path_factory.mktemp("generations")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = [rng.integers(0, 9, size=rng.integers(0, 12)).astype(np.int32) for _ in range(data.draw(st.integers(1, 25)))]
    runs = [*data.draw(st.lists(st.integers(1, 4), max_size=5)), data.draw(st.integers(1, 4))]
    for last, world in [(number == len(runs) - 1, world) for number, world in enumerate(runs)]:
        earlier: dict[int, dict[int, int]] = {}
        for path in folder.glob("rank-*"):
            rank, of = (int(part) for part in path.name.removeprefix("rank-").split("-of-"))
            earlier.setdefault(of, {})[rank] = spilled_place(path)
        for rank in range(world):
            share = Share(rank, world, tuple(earlier.items()))
            mine = [(number, [row]) for number, row in enumerate(rows) if share.wants(number)]
            stop = len(mine) if last else data.draw(st.integers(0, len(mine)))
            tokens = data.draw(st.integers(1, 40))
            with PairCounter(9, folder / f"rank-{rank}-of-{world}", 1) as counter:
                count_laid(laid_end_to_end(mine[:stop], tokens), counter, save_seconds=0, progress=lambda place: None)
                for batch in laid_end_to_end(mine[stop:], tokens):  # counted, and lost
                    counter.add(batch.tokens_T, batch.starts_D, {PLACE: batch.place})
    folders = sorted(folder.glob("rank-*"))
    found = counted(folders, 9)
    parts = [folder / f"part{number}" for number in range(2)]
    for (first, end), part in zip(found.ranges(2), parts, strict=True):
        found.merge_part(first, end, part)
    (folder / "out").mkdir()
    found.assemble(parts, folder / "out" / TABLE_FILE)
    table = BigramTable.load(folder / "out")
    assert pairs_in(table) == pairs_of(row.tolist() for row in rows)
    assert table.unigram.tolist() == np.bincount(np.concatenate(rows), minlength=9).tolist()


TABLES = sorted(name for name in shipped_recipes() if name.startswith("table/"))


@pytest.mark.parametrize("name", TABLES)
def test_every_shipped_recipe_counts_a_stand_in(name: str, stand_ins: Any, tmp_path: Path) -> None:
    assert TABLES == ["table/any-corpus", "table/vicuna-lmsys"]
    target = stand_ins.target("lmsys/vicuna-7b-v1.3")
    rows = tmp_path / "rows.jsonl"
    source = json.loads(stand_ins.rows.read_text())
    lmsys = [  # the columns of LMSYS-Chat-1M
        {
            "conversation_id": row["id"],
            "model": "vicuna-13b",
            "conversation": [
                {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
                for turn in row["conversations"]
            ],
            "turn": len(row["conversations"]) // 2,
            "language": "English",
            "openai_moderation": [],
            "redacted": False,
        }
        for row in source
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in lmsys))
    place = [f"out={tmp_path / 'out'}", f"tokenizer={target}", f"data.path={rows}"]
    recipe = load_recipe(name, place)
    assert isinstance(recipe, TableRecipe)
    table = BigramTable.load(run_train(recipe))
    tokenizer = load_tokenizer(str(target))
    template = get_template(recipe.data.template, tokenizer)
    assert pairs_in(table) == pairs_of(render(chat, template, tokenizer).ids.tolist() for chat in conversations(recipe))
    shipped = load_recipe(name)
    assert isinstance(shipped, TableRecipe)
    assert shipped.count.pairs == "documents"
    assert shipped.prune is None


def test_the_head_of_each_recipe_gives_command_hardware_and_cost() -> None:
    for name in TABLES:
        head = [line for line in shipped_recipes()[name].read_text().splitlines() if line.startswith("#")]
        assert head[0].startswith(f"# draftsmith train {name}")
        text = " ".join(head)
        for words in ("accelerate launch --config_file", "GB", "no cost"):
            assert words in text, (name, words)
