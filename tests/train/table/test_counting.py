"""Counting in bounded memory against a plain Counter: split, spilled, killed, resumed, in any number of processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import draftsmith
import numpy as np
import pytest
from draftsmith.checkpoints.table.file import write_table
from draftsmith.checkpoints.table.runs import key_dtype
from draftsmith.train.table.counting import INDEX, Counted, PairCounter, counted
from draftsmith.train.table.pile import sorting_is_slow
from draftsmith.train.table.run_files import open_run, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

WORKER = Path(__file__).parents[1] / "counting_worker.py"
TINY = [2e-4, 1e-3, 1e-2, 1.0]
"""Mebibytes: from some keys a slot to more than everything."""


def laid(documents: list[list[int]], dtype: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return np.array([token for document in documents for token in document], dtype=dtype), starts


def brute_table(documents: list[list[int]], vocab_size: int, path: Path) -> bytes:
    """The file of a table that is counted pair by pair."""
    pairs = Counter(left * vocab_size + right for document in documents for left, right in pairwise(document))
    keys = sorted(pairs)
    run = (np.array(keys, dtype=key_dtype(vocab_size)), np.array([pairs[key] for key in keys], dtype=np.int64))
    unigram = np.zeros(vocab_size, dtype=np.int64)
    for token, count in Counter(token for document in documents for token in document).items():
        unigram[token] = count
    write_table(path, vocab_size, [run], unigram)
    return path.read_bytes()


def merged(folders: list[Path], vocab_size: int, ranges: int, out: Path, check: bool = True) -> bytes:
    """The file of everything in the folders, merged in ranges."""
    whole = counted(folders, vocab_size, check)
    parts = []
    for number, (first, end) in reversed(list(enumerate(whole.ranges(ranges)))):
        parts.insert(0, out / f"part-{number}")
        whole.merge_part(first, end, parts[0])
    whole.assemble(parts, out / "table")
    return (out / "table").read_bytes()


def copied(folder: Path, copy: Path) -> None:
    """A folder as it stands at one moment, while runs are being written into it."""
    copy.mkdir()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path, copy)


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_looked_through() -> Iterator[None]:
    """Counters are dropped and collected again and again, and looking through all that is imported takes longer."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@st.composite
def corpora(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    vocab_size = draw(st.one_of(st.integers(1, 70_000), st.sampled_from([1, 2, 65_536, 65_537])))
    some = draw(st.lists(st.integers(0, vocab_size - 1), max_size=6))
    token = st.sampled_from(sorted({0, vocab_size - 1, *some}))
    return vocab_size, draw(st.lists(st.lists(token, max_size=30), max_size=10))


ANY_WAY = given(
    corpus=corpora(),
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 3),
    ranges=st.integers(1, 5),
    memory=st.sampled_from(TINY),
)


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_way_of_counting_gives_the_bytes_of_a_counter(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    def count(**drawn: Any) -> None:
        count_any_way(tmp_path_factory.mktemp("count"), **drawn)

    settings(deadline=None, max_examples=examples)(ANY_WAY(count))()


def count_any_way(
    tmp: Path, corpus: tuple[int, list[list[int]]], seed: int, ranks: int, ranges: int, memory: float
) -> None:
    """Each rank counts its documents in adds of any size, and is killed between them at random.

    How far a dropped counter came depends on its threads, so that hypothesis gives a seed and not each choice.
    """
    vocab_size, documents = corpus
    choices = random.Random(seed)
    for rank in range(ranks):
        folder, share = tmp / f"rank-{rank}", documents[rank::ranks]
        done, counter = 0, PairCounter(vocab_size, folder, memory, threads=choices.randint(1, 3))
        while done < len(share):
            size = choices.randint(1, len(share) - done)
            dtype = choices.choice(["int32", "int64", "uint32"])
            counter.add(*laid(share[done : done + size], dtype), {"next": done + size})
            done += size
            what = choices.choice(["go on", "spill", "drop", "copy"])
            if what == "spill":
                counter.spill()
            elif what != "go on":
                if what == "copy":  # what a machine that died would leave
                    (folder / "run-unfinished").write_bytes(b"half a run")
                    copied(folder, tmp / "copy")
                    counter.close()
                    shutil.rmtree(folder)
                    (tmp / "copy").rename(folder)
                del counter
                gc.collect()
                counter = PairCounter(vocab_size, folder, memory)
                assert not (folder / "run-unfinished").exists()
                done = 0 if counter.place is None else counter.place["next"]
                assert counter.documents == done
                assert counter.tokens == sum(map(len, share[:done]))
        counter.spill()
        counter.close()
    folders = [tmp / f"rank-{rank}" for rank in range(ranks)]
    choices.shuffle(folders)
    found = merged(folders, vocab_size, ranges, tmp)
    assert found == brute_table(documents, vocab_size, tmp / "brute")
    whole = counted(folders, vocab_size)
    assert (whole.documents, whole.tokens) == (len(documents), sum(map(len, documents)))
    shutil.rmtree(tmp)


def zipf_documents(number: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [(rng.zipf(1.4, size=size) % vocab_size).tolist() for size in rng.integers(0, 300, number)]


@pytest.mark.parametrize("vocab_size", [500, 70_000])
@pytest.mark.parametrize("processes", [False, True])
def test_threads_and_processes_count_the_same(tmp_path: Path, vocab_size: int, processes: bool) -> None:
    documents = zipf_documents(100, vocab_size)
    with PairCounter(vocab_size, tmp_path / "count", 0.05, processes=processes) as counter:
        for at in range(0, 100, 10):
            counter.add(*laid(documents[at : at + 10]), at)
        counter.spill()
        assert counter.spilled_bytes == sum(path.stat().st_size for path in counter.folder.glob("run-*"))
    assert len(list((tmp_path / "count").glob("run-*"))) > 4
    wanted = brute_table(documents, vocab_size, tmp_path / "brute")
    assert merged([tmp_path / "count"], vocab_size, 3, tmp_path) == wanted
    counted([tmp_path / "count"], vocab_size).write(tmp_path / "again", tmp_path / "scratch")
    assert (tmp_path / "again").read_bytes() == wanted
    assert list((tmp_path / "scratch").iterdir()) == []


def test_memory_that_holds_everything_spills_once(tmp_path: Path) -> None:
    with PairCounter(500, tmp_path, 4, threads=1) as counter:
        for seed in range(30):
            counter.add(*laid(zipf_documents(20, 500, seed)), seed)
        assert not (tmp_path / INDEX).exists()
        counter.spill()
        counter.spill()
    assert len(list(tmp_path.glob("run-*"))) == 1


def start(
    folder: Path, vocab_size: int, documents: int, memory: float, processes: bool, **options: Any
) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(folder), str(vocab_size), str(documents), str(memory), str(+processes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)


def worker_table(documents: int, vocab_size: int, path: Path) -> bytes:
    """The file of a table of the worker's documents, counted pair by pair."""
    sys.path.insert(0, str(WORKER.parent))
    try:
        from counting_worker import document
    finally:
        sys.path.remove(str(WORKER.parent))
    return brute_table([document(number, vocab_size).tolist() for number in range(documents)], vocab_size, path)


@pytest.mark.parametrize(("vocab_size", "processes"), [(300, False), (70_000, True)])
def test_a_process_that_is_killed_again_and_again_counts_everything_once(
    tmp_path: Path, vocab_size: int, processes: bool
) -> None:
    folder, total, memory = tmp_path / "count", 1200, 0.02
    rng, places = np.random.default_rng(0), []
    for _ in range(4):
        worker = start(folder, vocab_size, total, memory, processes)
        assert worker.stdout is not None
        places.append(int(worker.stdout.readline().split()[1]))
        for _ in range(rng.integers(5, 20)):
            worker.stdout.readline()
        counting = children(worker.pid)
        assert len(counting) == 2 * processes
        worker.send_signal(signal.SIGKILL)
        worker.stdout.close()
        worker.wait(timeout=30)
        until = time.monotonic() + 30
        while any(map(counts, counting)):
            assert time.monotonic() < until, "a process that counts outlived its owner"
            time.sleep(0.01)
    assert places == sorted(places)
    assert places[-1] > 0, "nothing was gone on from"
    worker = start(folder, vocab_size, total, memory, processes)
    assert worker.communicate(timeout=120)[0].endswith(f"done {total}\n")
    assert merged([folder], vocab_size, 2, tmp_path) == worker_table(total, vocab_size, tmp_path / "brute")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("lines", [1, 40])
def test_a_signal_to_the_whole_group_leaves_the_count_to_its_owner(tmp_path: Path, number: int, lines: int) -> None:
    """After one line the processes that count have only begun to start."""
    folder = tmp_path / "count"
    worker = start(folder, 70_000, 10**9, 0.1, True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "from 0\n"
    for _ in range(lines):
        worker.stdout.readline()
    counting = children(worker.pid)
    assert counting
    os.killpg(worker.pid, number)
    for child in counting[: lines - 1]:  # as where all processes of a job are sent it; those that have started
        os.kill(child, number)
    kind, place = worker.communicate(timeout=60)[0].splitlines()[-1].split()
    assert (kind, worker.returncode) == ("stopped", 0)
    assert int(place) >= 16
    assert counted([folder], 70_000).documents == int(place)
    total = int(place) + 100
    worker = start(folder, 70_000, total, 0.1, True)
    assert worker.communicate(timeout=120)[0].startswith(f"from {place}\n")
    assert merged([folder], 70_000, 2, tmp_path) == worker_table(total, 70_000, tmp_path / "brute")


def test_processes_start_in_any_folder_and_with_any_settings_of_numpy(tmp_path: Path) -> None:
    """Nothing is imported from the working folder, and the package is found by the path of its owner alone."""
    (tmp_path / "here").mkdir()
    for name in ("json", "numpy", "draftsmith"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('imported from the working folder')\n")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "draftsmith").symlink_to(Path(draftsmith.__file__).parent)
    wanted = worker_table(64, 300, tmp_path / "brute")
    for number, variables in enumerate(
        [{}, {"NPY_ENABLE_CPU_FEATURES": " ".join(dispatched())}, {"NPY_DISABLE_CPU_FEATURES": ",".join(dispatched())}]
    ):
        folder = tmp_path / f"count-{number}"
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")} | variables
        worker = start(folder, 300, 64, 0.02, True, cwd=tmp_path / "here", env=environment)
        assert worker.communicate(timeout=60)[0].endswith("done 64\n"), variables
        assert merged([folder], 300, 1, tmp_path) == wanted


def test_where_memory_cannot_be_shared_threads_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Python that was built for an old C library."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    documents = zipf_documents(30, 500)
    with PairCounter(500, tmp_path / "count", 0.05, processes=True) as counter:
        counter.add(*laid(documents), 30)
        assert children(os.getpid()) == []
        counter.spill()
    assert merged([tmp_path / "count"], 500, 1, tmp_path) == brute_table(documents, 500, tmp_path / "brute")


def test_a_wrong_token_is_named_and_nothing_of_its_call_counts(tmp_path: Path) -> None:
    with PairCounter(11, tmp_path / "count") as counter:
        counter.add(*laid([[1, 2], [3]]), 2)
        with pytest.raises(ValueError, match="document 4 holds token -7; the vocabulary has 11 tokens"):
            counter.add(*laid([[1], [], [2, -7]])[:1], np.array([0, 1, 1]), 5)
        counter.add(*laid([[4, 5]]), 3)
        counter.spill()
        assert (counter.documents, counter.tokens, counter.place) == (3, 5, 3)
    assert merged([tmp_path / "count"], 11, 1, tmp_path) == brute_table([[1, 2], [3], [4, 5]], 11, tmp_path / "brute")


def folder_of_runs(folder: Path) -> dict[str, Any]:
    with PairCounter(500, folder, 1e-2) as counter:
        for seed in range(3):
            counter.add(*laid(zipf_documents(5, 500, seed)), seed)
        counter.spill()
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


@pytest.mark.parametrize("kind", ["runs", "ends"])
def test_damaged_files_are_refused_and_named(tmp_path: Path, kind: str) -> None:
    index = folder_of_runs(tmp_path)
    name = index["runs"][1]["name"] if kind == "runs" else index["ends"]["name"]
    path = tmp_path / name
    content = path.read_bytes()
    damages = {
        "sha256 is": content[:-1] + bytes([content[-1] ^ 1]),
        f"it has {len(content) - 4} bytes, {INDEX} says {len(content)}": content[:-4],
        "is missing": None,
    }
    for message, damage in damages.items():
        path.unlink() if damage is None else path.write_bytes(damage)
        for attempt in (lambda: PairCounter(500, tmp_path), lambda: counted([tmp_path], 500)):
            with pytest.raises(ValueError, match=message) as caught:
                attempt()
            assert name in str(caught.value)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is damaged") as caught:
        PairCounter(500, tmp_path)
    path.write_bytes(content)
    with PairCounter(500, tmp_path) as counter:  # while the error, and what it refers to, is still there
        assert (counter.documents, name in str(caught.value)) == (15, True)
    assert counted([tmp_path], 500).documents == 15
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match=rf"{INDEX} is damaged: .*; delete .* to count anew"):
        PairCounter(500, tmp_path)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    folder_of_runs(tmp_path)
    for attempt in (lambda: PairCounter(501, tmp_path), lambda: counted([tmp_path], 501)):
        with pytest.raises(ValueError, match="holds counts for 500 tokens, this vocabulary has 501"):
            attempt()
    with PairCounter(500, tmp_path), pytest.raises(ValueError, match="another process is counting into"):
        PairCounter(500, tmp_path)
    with pytest.raises(ValueError, match="memory_mb is 0, expected more than 0"):
        PairCounter(500, tmp_path, 0)
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        PairCounter(500, tmp_path, threads=0)
    counter = PairCounter(500, tmp_path, 1e-6)
    counter.close()
    with pytest.raises(RuntimeError, match="is closed or has failed"):
        counter.add(*laid([[1]]), 1)


def test_ranges_are_of_about_equal_work_and_cover_all(tmp_path: Path) -> None:
    folder_of_runs(tmp_path)
    whole = counted([tmp_path], 500)
    entries = sum(len(keys) for keys, _ in whole.runs)
    rows = np.concatenate([keys[:] // 500 for keys, _ in whole.runs])
    widest = int(np.bincount(rows).max())
    for number in (1, 2, 3, 7):
        ranges = whole.ranges(number)
        assert [ranges[0][0], *(end for _, end in ranges)] == [*(first for first, _ in ranges), 500]
        for first, end in ranges:
            assert abs(int(((rows >= first) & (rows < end)).sum()) - entries / number) <= widest + 1
    assert len(whole.ranges(1000)) == 1000
    with pytest.raises(ValueError, match="0 ranges were asked for"):
        whole.ranges(0)
    empty = counted([], 5)
    assert empty.ranges(3)[-1][1] == 5
    assert merged([], 5, 3, tmp_path) == brute_table([], 5, tmp_path / "brute")


def crafted(folder: Path, count: int, runs: int = 3) -> Counted:
    """Runs of one pair (1, 2) that was seen `count` times in each."""
    paths = [folder / f"crafted-{number}" for number in range(runs)]
    for path in paths:
        write_run(path, 10, [(np.array([12], dtype=np.uint32), np.array([count]))])
    ends = np.zeros(10, dtype=np.int64)
    ends[2] = 1
    return Counted(10, tuple(open_run(path, 10) for path in paths), ends, runs * count + 1, 1)


def test_a_pair_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    fine = crafted(tmp_path, (2**31 - 1) // 3)
    fine.write(tmp_path / "table", tmp_path)
    over = crafted(tmp_path, 2**30)
    with pytest.raises(ValueError, match=r"the pair \(1, 2\) was seen 3221225472 times; .* up to 2147483647"):
        over.merge_part(0, 10, tmp_path / "part")
    assert not list(tmp_path.glob("*part*"))


def test_parts_of_other_counts_are_refused(tmp_path: Path) -> None:
    folder_of_runs(tmp_path / "a")
    whole = counted([tmp_path / "a"], 500)
    first, second = whole.ranges(2)
    whole.merge_part(*first, tmp_path / "one")
    whole.merge_part(*second, tmp_path / "two")
    with pytest.raises(
        ValueError, match=r"the parts hold \d+ pairs and \d+ ends of documents; \d+ tokens were counted"
    ):
        whole.assemble([tmp_path / "one"], tmp_path / "table")
    (tmp_path / "two").write_bytes((tmp_path / "two").read_bytes()[:-3])
    with pytest.raises(ValueError, match="two is no run for 500 tokens: it has"):
        whole.assemble([tmp_path / "one", tmp_path / "two"], tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("processes", [False, True])
def test_a_full_disk_is_named_and_earlier_runs_stay(tmp_path: Path, processes: bool) -> None:
    """Files may grow to 4,000 bytes: enough for the index, too little for the second run. Room made, it goes on."""
    first, second = zipf_documents(3, 500, 0), [list(range(500))] * 2 + [list(range(499, -1, -1))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with PairCounter(500, tmp_path / "count", 4, threads=1, processes=processes) as counter:
        counter.add(*laid(first), "first")
        counter.spill()
        earlier = {path.name: path.read_bytes() for path in counter.folder.iterdir()}
        counter.add(*laid(second), "second")
        if processes:
            (child,) = children(os.getpid())
            resource.prlimit(child, resource.RLIMIT_FSIZE, (4000, limits[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        try:
            with pytest.raises(OSError, match=f"{counter.folder}/run-"):
                counter.spill()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in counter.folder.iterdir()} == earlier
        shutil.copytree(counter.folder, tmp_path / "copy")
        if processes:
            resource.prlimit(child, resource.RLIMIT_FSIZE, limits)
        counter.spill()
    assert merged([tmp_path / "count"], 500, 1, tmp_path) == brute_table(first + second, 500, tmp_path / "brute")
    with PairCounter(500, tmp_path / "copy") as resumed:
        assert (resumed.place, resumed.documents) == ("first", 3)


def children(process: int) -> list[int]:
    """Processes of this one that count pairs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if parent == process and counts(int(path.name)):
            found.append(int(path.name))
    return found


def counts(process: int) -> bool:
    """Whether this is a process that counts pairs, and has not ended."""
    try:
        return "pair_pile" in Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_counting_process_that_dies_is_told_and_nothing_spilled_is_lost(tmp_path: Path) -> None:
    documents = zipf_documents(30, 500)
    counter = PairCounter(500, tmp_path / "count", 0.02, threads=1, processes=True)
    counter.add(*laid(documents[:10]), 10)
    counter.spill()
    for child in children(os.getpid()):
        os.kill(child, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="that counts pairs ended with code -9; start again to go on"):
        counter.add(*laid(documents[10:]), 30)
    with pytest.raises(RuntimeError, match="open the folder again"):
        counter.spill()
    counter.close()
    with PairCounter(500, tmp_path / "count") as again:
        assert again.place == 10
        again.add(*laid(documents[10:]), 30)
        again.spill()
    assert merged([tmp_path / "count"], 500, 2, tmp_path) == brute_table(documents, 500, tmp_path / "brute")


def test_counting_processes_end_with_their_owner(tmp_path: Path) -> None:
    counter = PairCounter(500, tmp_path / "count", 0.02, threads=2, processes=True)
    counter.add(*laid(zipf_documents(30, 500)), 30)
    assert len(children(os.getpid())) == 2
    del counter
    gc.collect()
    assert children(os.getpid()) == []


def dispatched() -> list[str]:
    """Features of this processor that numpy uses and may be told not to."""
    numpy_core = import_module("numpy._core._multiarray_umath")
    return [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__[name]]


def test_sorting_is_slow_only_where_numpy_can_do_without_what_makes_it_so() -> None:
    """Without any of its features numpy sorts slowly, and there is nothing to be gained from a process without them."""
    if not any(name.startswith(("AVX512", "X86_V4")) for name in dispatched()):
        assert not sorting_is_slow()
    code = "from draftsmith.train.table.pile import sorting_is_slow; print(sorting_is_slow())"
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(dispatched())}
    environment.pop("NPY_ENABLE_CPU_FEATURES", None)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
