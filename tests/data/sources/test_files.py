"""Data files in all formats: complete, damaged, in shards, and streamed in constant memory."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.sources.files import CHUNK, local_rows

ROWS = [{"prompt": f"question {i} – ¿qué? 你好 😀\n", "response": '[{"\\\u2028' * (i % 5)} for i in range(600)]
FORMATS = ("a.json", "pretty.json", "lines.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet")


def write(path: Path, rows: list[Any]) -> Path:
    """Write `rows` in the format given by the file extension."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
        return path
    is_list = ".json" in path.suffixes and path.stem != "lines"
    text = json.dumps(rows, indent=1 if path.stem == "pretty" else None, ensure_ascii=path.stem == "pretty")
    data = (text if is_list else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)).encode("utf-8-sig")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def values(path: Path, index: int = 0, count: int = 1, **options: Any) -> list[Any]:
    return [row.value for row in local_rows(path, (index, count), **options)]


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_round_trip_whole_and_in_shards(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ROWS[:400])
    rows = list(local_rows(path))
    assert [row.value for row in rows] == ROWS[:400]
    assert [row.number for row in rows] == list(range(400))
    assert rows[41].location == f"{path}, row 42"
    write(tmp_path / f"z-{name}" if name[1] == "." else tmp_path / f"z{name}", ROWS[400:])
    numbers: list[int] = []
    for index in range(4):
        rows = list(local_rows(tmp_path, (index, 4)))
        assert all(row.value == ROWS[row.number] for row in rows)
        assert len({row.name for row in rows}) == len(rows) == 150
        numbers += [row.number for row in rows]
    assert sorted(numbers) == list(range(600))


def test_no_rows_at_all(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "\n\n"), ("a.json", " [ ] \n"), ("a.json", "\n\n")):
        (tmp_path / name).write_text(text)
        assert values(tmp_path / name) == []


def test_a_list_is_read_across_chunk_borders(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    kinds = [True, None, "😀", "é\\", {"a": [1, {}, -12.5e-7]}, [], float("inf")]
    for offset in range(60):  # every boundary between values coincides once with the end of a chunk
        rows = ["x" * (CHUNK - 40 - offset), *kinds]
        path.write_text(json.dumps(rows, ensure_ascii=offset % 2 == 0, indent=offset % 3 or None), encoding="utf-8")
        assert values(path) == rows


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz", "a.parquet"])
def test_the_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": f"{i} {'word ' * 600}"} for i in range(10_000)])  # 30 MB of JSON
    tracemalloc.start()
    try:
        assert sum(1 for _ in local_rows(path, (0, 4))) == 2500
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


GOOD = b'{"prompt": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b"\n{\n" + GOOD, "row 2"),
        ("a.jsonl", GOOD + b'\n{"prompt": "gr\xfc\xdfe"}\n' + GOOD, "utf-8"),
        ("a.json", b"[" + GOOD + b",\n{]", "after row 1"),
        ("a.json", b"[" + GOOD + b',\n{"prompt": "cut', "after row 1"),
        ("a.json", b"[" + GOOD + b"\n", "after row 1"),
        ("a.parquet", b"PAR1 nothing", "parquet"),
        ("a.jsonl.gz", b"no gzip", "gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' + b"\n" * 1_000_002), "after row 1.*1,000,000 empty lines"),
    ],
)
def test_a_damaged_file_is_one_error_with_its_position(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        values(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "train-2.jsonl", "train_gen.jsonl"):
        write(tmp_path / name, [name])
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / ".hidden.jsonl").write_text("no")
    assert values(tmp_path) == ["test.jsonl", "train-2.jsonl", "train.jsonl", "train_gen.jsonl"]
    assert values(tmp_path, split="train") == ["train-2.jsonl", "train.jsonl"]
    assert len(values(tmp_path, split="validation")) == 4  # no file name contains this split


def test_only_chosen_columns_are_read(tmp_path: Path) -> None:
    read_rows = values(
        write(tmp_path / "a.parquet", ROWS), columns=lambda names: [name for name in names if name[0] == "r"]
    )
    assert read_rows == [{"response": row["response"]} for row in ROWS]
