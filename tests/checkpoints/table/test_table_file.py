"""Table files are written in bounded memory and can be read by the safetensors library."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from draftsmith.checkpoints.table.file import MAX_COUNT, write_table
from draftsmith.checkpoints.table.runs import Run, key_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save


def run_in_parts(entries: dict[int, int], vocab_size: int, sizes: list[int]) -> Iterator[Run]:
    keys = np.array(sorted(entries), dtype=key_dtype(vocab_size))
    counts = np.array([entries[int(key)] for key in keys], dtype=np.int64)
    for part in np.split(np.arange(len(keys)), np.cumsum(sizes)):
        yield keys[part], counts[part]


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@settings(deadline=None, max_examples=60)
@given(
    vocab_size=st.one_of(st.integers(1, 300), st.sampled_from([65_536, 70_000])),
    data=st.data(),
    sizes=st.lists(st.integers(0, 5), max_size=5),
)
def test_the_library_reads_streamed_files(
    vocab_size: int, data: st.DataObject, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = st.one_of(st.integers(0, vocab_size**2 - 1), st.just(vocab_size**2 - 1))
    entries = data.draw(st.dictionaries(keys, st.sampled_from([1, 2, MAX_COUNT]), max_size=20))
    unigram = np.random.default_rng(0).integers(0, 2**60, vocab_size)
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    write_table(path, vocab_size, run_in_parts(entries, vocab_size, sizes), unigram)
    tensors, metadata = read(path)
    order = sorted(entries)
    rows = np.bincount(np.array(order, dtype=np.int64) // vocab_size, minlength=vocab_size)
    expected = {
        "row_ptr": np.concatenate(([0], np.cumsum(rows))),
        "col": np.array(order, dtype=np.int64).astype(np.int64) % vocab_size,
        "count": np.array([entries[key] for key in order], dtype=np.int64),
        "unigram": unigram,
    }
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
        assert tensors[name].dtype == (np.int32 if name in ("col", "count") else np.int64)
    assert metadata == {"format": "pt", "vocab_size": str(vocab_size)}
    again = path.with_name("again")
    write_table(again, vocab_size, run_in_parts(entries, vocab_size, sizes[::-1]), unigram)
    assert again.read_bytes() == path.read_bytes(), "the file depends on the sizes of the parts"
    assert sorted(path.parent.iterdir()) == sorted([path, again])
    # The bytes after the header equal those written by the library.
    own = save({name: array.astype(tensors[name].dtype) for name, array in expected.items()})
    head = [8 + int.from_bytes(content[:8], "little") for content in (own, path.read_bytes())]
    assert own[head[0] :] == path.read_bytes()[head[1] :]


LARGE = """
import sys
import numpy as np
from pathlib import Path
from draftsmith.checkpoints.table.file import write_table
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
def parts(number, size=1 << 18):
    for at in range(number):
        keys = np.arange(at * size, (at + 1) * size, dtype=np.uint32)
        yield keys, np.ones(size, dtype=np.int64)
path, number = Path(sys.argv[1]), int(sys.argv[2])
unigram = np.zeros(32000, dtype=np.int64)
write_table(path.with_name("first"), 32000, parts(2), unigram)
before = peak()
write_table(path, 32000, parts(number), unigram)
print(peak() - before, path.stat().st_size)
"""


def test_writing_a_large_table_takes_the_memory_of_one_part(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LARGE, str(tmp_path / "table"), "100"]
    kilobytes, size = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert int(size) > 200e6
    assert int(kilobytes) < 40e3
