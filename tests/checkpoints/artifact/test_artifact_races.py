"""Writers and readers of one artifact at the same time, and writers that are killed: what is read is always whole."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, open_artifact, save_artifact, verify_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads, save_heads
from draftsmith.checkpoints.storage import atomic as folders
from draftsmith.checkpoints.storage.atomic import read_consistent
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.models.loading import load_model
from transformers import LlamaForCausalLM

VOCAB = 16
ABOUT: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None, "recipe": {}, "data": {}}
CONTENTS = ("a", "b")


def table_of(content: str) -> BigramTable:
    documents = np.random.default_rng(ord(content)).integers(0, VOCAB, (4, 30))
    return BigramTable.from_documents(list(documents), VOCAB)


TABLES = {content: table_of(content) for content in CONTENTS}


def save_table(out: Path, content: str) -> None:
    save_artifact(out, kind="table", write=TABLES[content].save, shapes={"content": content}, training={}, **ABOUT)


def content_of(table: BigramTable) -> str:
    """Which of the two it is, all of it."""
    for content, known in TABLES.items():
        parts = ("row_ptr", "col", "count", "unigram")
        if all(torch.equal(getattr(table, part), getattr(known, part)) for part in parts):
            return content
    raise AssertionError("a table that nobody wrote")


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """A process that works until it is done or killed; its exit code must be 0 unless somebody killed it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def replace_for_ever(save: Callable[[Path, str], None], out: Path, contents: Sequence[str] = CONTENTS) -> None:
    for content in cycle(contents):
        save(out, content)


def reads(seconds: float = 300) -> Iterator[int]:
    """Numbers of reads from 1, until the reader has seen enough: a slow disk's writer replaces seldom."""
    end = time.monotonic() + seconds
    for number in count(1):
        assert time.monotonic() < end, f"in {number} reads and {seconds} s the writer has not replaced enough"
        yield number


@pytest.fixture(params=["exchange", "rename"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "rename":
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)


@pytest.mark.usefixtures("_both_ways")
def test_a_reader_that_races_a_writer_reads_a_whole_artifact_a_thousand_times(tmp_path: Path) -> None:
    out = tmp_path / "t"
    save_table(out, "a")
    last, changes = "a", 0
    with forked(lambda: replace_for_ever(save_table, out)) as writer:
        for number in reads():
            if number % 2:
                manifest, table = open_artifact(out, BigramTable.load, "table")
                assert manifest.shapes["content"] == content_of(table)
            else:
                verify_artifact(out, "table")
                table = BigramTable.load(out)
            changes += content_of(table) != last
            last = content_of(table)
            assert os.waitpid(writer, os.WNOHANG) == (0, 0), "the writer failed"
            if number >= 1000 and changes > 20:
                break


def heads_of(content: str) -> PredictionHeads:
    heads = PredictionHeads(2, 1, 8, VOCAB, scale=1.0 + ord(content))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(float(ord(content)))
    return heads


def save_both_heads(out: Path, content: str) -> None:
    write = lambda folder: save_heads(heads_of(content), folder, content)  # noqa: E731
    save_artifact(out, kind="heads", write=write, shapes={}, training={}, **ABOUT)


@pytest.mark.usefixtures("_both_ways")
def test_heads_are_loaded_with_the_config_that_belongs_to_them(tmp_path: Path) -> None:
    out = tmp_path / "heads"
    save_both_heads(out, "a")
    both = {float(ord(content)) for content in CONTENTS}
    seen: set[float] = set()
    with forked(lambda: replace_for_ever(save_both_heads, out)):
        for number in reads():
            heads = load_heads(out)
            values = {float(value) for tensor in heads.state_dict().values() for value in tensor.flatten()}
            assert values == {heads.scale - 1.0}
            seen |= values
            if number >= 200 and seen == both:
                break


@pytest.mark.usefixtures("_both_ways")
def test_models_of_several_files_are_loaded_whole(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> None:
    out, sizes = tmp_path / "drafter", {"a": 16, "b": 32}

    models = {
        content: make_llama(vocab_size=VOCAB, hidden_size=size, num_hidden_layers=1) for content, size in sizes.items()
    }

    def save(out: Path, content: str) -> None:
        write = lambda folder: models[content].save_pretrained(folder, max_shard_size="30KB")  # noqa: E731
        save_artifact(out, kind="drafter", write=write, shapes={"hidden": sizes[content]}, training={}, **ABOUT)

    save(out, "a")
    seen: set[int] = set()
    with forked(lambda: replace_for_ever(save, out)):
        for number in reads():
            manifest, model = open_artifact(out, lambda folder: load_model(str(folder)), "drafter")
            assert model.lm_head.weight.shape == (VOCAB, manifest.shapes["hidden"])
            seen.add(load_model(str(out)).config.hidden_size)
            if number >= 15 and seen == set(sizes.values()):
                break


@pytest.mark.usefixtures("_both_ways")
def test_of_two_writers_at_once_the_last_one_wins_whole(tmp_path: Path) -> None:
    out = tmp_path / "t"

    def save_often(content: str) -> None:
        for _ in range(25):
            save_table(out, content)

    with forked(lambda: save_often("a")) as one, forked(lambda: save_often("b")) as other:
        assert [ended(one), ended(other)] == [0, 0]
    manifest, table = open_artifact(out, BigramTable.load)
    assert manifest.shapes["content"] == content_of(table)
    assert os.listdir(tmp_path) == ["t"]


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_artifact(tmp_path: Path) -> None:
    out, rng = tmp_path / "t", random.Random(0)
    start = time.monotonic()
    save_table(out, "a")
    duration = time.monotonic() - start
    left, found = 0, set()
    done, tell = os.pipe()

    def save(out: Path, content: str) -> None:
        save_table(out, content)
        os.write(tell, b".")

    for number in range(200):
        if number >= 30 and left > 10 and found == set(CONTENTS):
            break
        order = CONTENTS[:: 1 if number % 2 else -1]
        with forked(lambda order=order: replace_for_ever(save, out, order)):
            assert select.select([done], [], [], 60)[0], "the writer has not finished one save"
            time.sleep(rng.uniform(0, 2 * duration))
        os.set_blocking(done, False)
        with contextlib.suppress(BlockingIOError):
            os.read(done, 1 << 16)
        os.set_blocking(done, True)
        left += len(os.listdir(tmp_path)) - 1
        manifest, table = open_artifact(out, BigramTable.load, "table")
        assert manifest.shapes["content"] == content_of(table)
        found.add(content_of(table))
    os.close(done)
    os.close(tell)
    assert left > 10, "too few writers were killed at work"
    assert found == set(CONTENTS)
    save_table(out, "b")
    assert os.listdir(tmp_path) == ["t"]


def die_between_renames(out: Path) -> None:
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.name.endswith(".saving"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = die  # type: ignore[method-assign]
    save_table(out, "b")


def test_what_a_killed_writer_had_moved_aside_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    out = tmp_path / "t"
    save_table(out, "a")
    with forked(lambda: die_between_renames(out)) as writer:
        assert ended(writer) == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(ValueError, match=r"no such folder; a save that was killed has left the former one at .*\.old"):
        load_manifest(out)
    with pytest.raises(RuntimeError, match="failed"):
        save_artifact(out, kind="table", write=fail, shapes={}, training={}, **ABOUT)
    assert content_of(BigramTable.load(out)) == "a"
    assert os.listdir(tmp_path) == ["t"]


def fail(_: Path) -> None:
    raise RuntimeError("failed")


@pytest.mark.usefixtures("_both_ways")
def test_a_writer_at_work_keeps_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "t"

    def write(folder: Path) -> None:
        save_table(out, "a")  # which removes what killed writers have left
        assert len(os.listdir(tmp_path)) == 2
        TABLES["b"].save(folder)

    save_artifact(out, kind="table", write=write, shapes={"content": "b"}, training={}, **ABOUT)
    assert content_of(BigramTable.load(out)) == "b"
    assert os.listdir(tmp_path) == ["t"]


def test_leftovers_of_others_and_of_other_names_stay(tmp_path: Path) -> None:
    host = folders._host()
    stay = [
        f".t.x.{host}-abcd1234.saving",  # of the artifact t.x
        ".t.elsewhere-abcd1234.saving",  # of another host, whose locks may not be seen from here
        f".t.{host}-abcd1234.saving.mine",
    ]
    for name in (*stay, f".t.{host}-abcd1234.saving", f".t.{host}-abcd1235.saving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    save_table(tmp_path / "t", "a")
    assert sorted(os.listdir(tmp_path)) == sorted([*stay, "t"])


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, reads = tmp_path / "t", []
    save_table(out, "a")

    def read(replaced: int) -> str:
        reads.append(load_manifest(out).shapes["content"])
        if len(reads) <= replaced:
            save_table(out, "b" if reads[-1] == "a" else "a")
        return reads[-1] + content_of(BigramTable.load(out))

    assert read_consistent(out, lambda: read(1)) == "bb"
    assert reads == ["a", "b"]
    monkeypatch.setattr(folders, "_ATTEMPTS", 5)
    with pytest.raises(ValueError, match="was replaced 5 times while it was read"):
        read_consistent(out, lambda: read(1000))


def test_faults_of_a_folder_that_stays_are_told_at_once(tmp_path: Path) -> None:
    calls = []

    def read() -> None:
        calls.append(1)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        read_consistent(tmp_path, read)
    with pytest.raises(ValueError, match="damaged"):
        read_consistent(tmp_path / "nowhere", read)
    assert len(calls) == 2
