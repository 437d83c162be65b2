"""Files in every format: whole, broken, huge, in shards, and as a stream of constant memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.sources.files import CHUNK, UNREAD, Row, local_rows

ROWS = [{"prompt": f"question {i} – ¿qué? 你好 😀\n", "response": '[{"\\\u2028' * (i % 5)} for i in range(600)]
FORMATS = (
    "a.json", "pretty.json", "lines.json", "a.jsonl", "a.ndjson", "a.json.gz", "a.jsonl.gz", "a.json.zst",
    "a.jsonl.zst", "a.parquet", "file.arrow", "stream.arrow",
)  # fmt: skip


def write(path: Path, rows: list[Any]) -> Path:
    """`rows` in the format that the name asks for."""
    if path.suffix in (".parquet", ".arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            parquet.write_table(table, path, row_group_size=70)
        else:
            opener = pyarrow.ipc.new_file if path.stem == "file" else pyarrow.ipc.new_stream
            with opener(path, table.schema) as out:
                out.write_table(table, max_chunksize=90)
        return path
    is_list = ".json" in path.suffixes and path.stem != "lines"
    text = json.dumps(rows, indent=1 if path.stem == "pretty" else None, ensure_ascii=path.stem == "pretty")
    data = (text if is_list else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


def values(path: Path, index: int = 0, count: int = 1, **options: Any) -> list[Any]:
    return [row.value for row in local_rows(path, (index, count), **options)]


def skipping(path: Path, index: int = 0, count: int = 1) -> tuple[list[Row], dict[str, int]]:
    skipped: Counter[str] = Counter()
    return list(local_rows(path, (index, count), skip_broken=True, skipped=skipped)), dict(skipped)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_what_was_written(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ROWS)
    rows = list(local_rows(path))
    assert [row.value for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(len(ROWS)))
    assert rows[41].location == f"{path}, row 42"
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("name", FORMATS)
def test_shards_of_a_folder_see_each_row_once(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, ROWS[:200])
    write(tmp_path / f"sub-{name}" if name[1] == "." else tmp_path / f"z{name}", ROWS[200:300])
    seen: list[int] = []
    for index in range(4):
        rows = list(local_rows(tmp_path, (index, 4)))
        assert all(row.value == ROWS[row.number] for row in rows)
        assert len(rows) == 75
        seen += [row.number for row in rows]
    assert sorted(seen) == list(range(300))


def test_a_text_file_is_one_row_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Zwei\n\nZeilen\n".encode("utf-8-sig")))
    assert values(tmp_path) == [{"text": "Zwei\n\nZeilen\n"}]
    (tmp_path / "a.json").write_text("[]", encoding="utf-16")
    with pytest.raises(ValueError, match="UTF-16"):
        values(tmp_path / "a.json")


def test_no_rows_at_all(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "\n\n"), ("a.json", " [ ] \n")):
        (tmp_path / name).write_text(text)
        assert values(tmp_path / name) == []
    (tmp_path / "a.json").write_text("\n\n")
    with pytest.raises(ValueError, match="after row 0"):
        values(tmp_path / "a.json")


def test_a_list_is_read_right_wherever_a_piece_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    kinds = [-12.5e-7, 123, True, None, "😀", "é\\", {"a": [1, {}]}, [], float("inf")]
    for offset in range(60):  # every border of the values comes to lie on the end of a piece
        rows = ["x" * (CHUNK - 40 - offset), *kinds]
        path.write_text(json.dumps(rows, ensure_ascii=offset % 2 == 0, indent=offset % 3 or None), encoding="utf-8")
        assert values(path) == rows


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.zst", "a.parquet", "stream.arrow"])
def test_the_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": f"{i} {'word ' * 600}"} for i in range(10_000)])  # 30 MB of JSON
    tracemalloc.start()
    try:
        assert sum(1 for _ in local_rows(path, (0, 4))) == 2500
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


GOOD = b'{"prompt": "a"}'
JSON, UTF8, CUT = "not valid JSON", "not UTF-8 text", "file cut short or damaged"


@pytest.mark.parametrize(
    ("name", "content", "message", "kept", "reason"),
    [
        ("a.jsonl", GOOD + b"\n{\n" + GOOD, "row 2", 2, JSON),
        ("a.jsonl", GOOD + b'\n{"prompt": "gr\xfc\xdfe"}\n' + GOOD, "row 2.* byte 14", 2, UTF8),
        ("a.jsonl", GOOD + b'\n{"prompt": "cut', "row 2", 1, JSON),
        ("a.jsonl", GOOD + b"\n" + b"9" * 5000 + b"\n" + GOOD, "row 2", 2, JSON),
        ("a.json", b"[" + GOOD + b",\n{]", "after row 1", 1, JSON),
        ("a.json", b"[" + GOOD + b',\n{"prompt": "gr\xfc\xdfe"},' + GOOD + b"]", "row 2", 2, UTF8),
        ("a.json", b"[" + GOOD + b',\n{"prompt": "cut', "after row 1", 1, JSON),
        ("a.json", b"[" + GOOD + b"\n", "after row 1", 1, JSON),
        ("a.json", b"[" + GOOD + b"]\n[1]", "after row 1", 1, JSON),
        ("a.json", b"[" + GOOD + b"," + b"[" * 100_000, "after row 1", 1, JSON),
        ("a.txt", b"gr\xfc\xdfe", "row 1.* byte 2", 0, UTF8),
        ("a.parquet", b"PAR1 nothing", "parquet", 0, CUT),
        ("a.jsonl.gz", b"no gzip", "after row 0", 0, CUT),
    ],
)
def test_what_is_broken_is_named_or_counted(
    name: str, content: bytes, message: str, kept: int, reason: str, tmp_path: Path
) -> None:
    if name.endswith((".parquet", ".arrow", ".zst")):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        values(path)
    assert str(path) in str(caught.value)
    rows, skipped = skipping(tmp_path)
    assert [row.value for row in rows] == [{"prompt": "a"}] * kept
    assert skipped == {reason: 1}
    write(tmp_path / "b.jsonl", [{"prompt": "next"}])  # the next file is read, and the broken row keeps its number
    if not name.endswith(".txt"):
        shards = [skipping(tmp_path, index, 2) for index in range(2)]
        found = sorted((row.number, row.value["prompt"]) for rows, _ in shards for row in rows)
        assert [prompt for _, prompt in found] == ["a"] * kept + ["next"]
        assert found[-1][0] == kept + 1
        assert shards[0][1].get(reason, 0) + shards[1][1].get(reason, 0) == 1


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "train-2.jsonl", "train_gen.jsonl"):
        write(tmp_path / name, [name])
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / ".hidden.jsonl").write_text("no")
    assert values(tmp_path) == ["test.jsonl", "train-2.jsonl", "train.jsonl", "train_gen.jsonl"]
    assert values(tmp_path, split="train") == ["train-2.jsonl", "train.jsonl"]
    assert len(values(tmp_path, split="validation")) == 4  # no file is named after it


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list(ROWS[:n]) for name, n in (("train", 20), ("test", 5))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert values(tmp_path / "saved") == ROWS[:5] + ROWS[:20]
    assert values(tmp_path / "saved", split="train") == ROWS[:20]


def test_only_chosen_columns_are_read(tmp_path: Path) -> None:
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        path = write(tmp_path / name, ROWS)
        found = values(path, columns=lambda names: [name for name in names if name == "prompt"])
        assert found == [{"prompt": row["prompt"], "response": UNREAD} for row in ROWS]
