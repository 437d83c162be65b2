"""Files in every format: whole, broken, huge, in shards, and as a stream of constant memory."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.sources.files import MAX_ROW_BYTES, Row, Selection, local_rows
from draftsmith.data.sources.json_stream import CHUNK

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


def values(path: Path, **options: Any) -> list[Any]:
    return [row.value for row in local_rows(path, Selection(**options))]


def skipping(path: Path, **options: Any) -> tuple[list[Row], dict[str, int]]:
    skipped: Counter[str] = Counter()
    return list(local_rows(path, Selection(skip_broken=True, **options), skipped=skipped)), dict(skipped)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_what_was_written(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ROWS)
    rows = list(local_rows(path, Selection()))
    assert [row.value for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(len(ROWS)))
    assert rows[41].place == f"{path}, row 42"
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("start", [0, 7, 233])
def test_two_ranks_with_two_workers_see_each_row_once(name: str, start: int, tmp_path: Path) -> None:
    write(tmp_path / name, ROWS[:200])
    write(tmp_path / f"sub-{name}" if name[1] == "." else tmp_path / f"z{name}", ROWS[200:300])
    seen: list[int] = []
    for rank in range(2):
        for worker in range(2):
            rows = list(local_rows(tmp_path, Selection(shard=(rank * 2 + worker, 4), start=start)))
            assert all(row.value == ROWS[row.number] for row in rows)
            assert len(rows) in ((300 - start) // 4, (300 - start) // 4 + 1)
            seen += [row.number for row in rows]
    assert sorted(seen) == list(range(start, 300))


def test_rows_of_other_shards_are_not_even_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nbroken\n{"a": 3}\nbroken\n')
    assert values(path, shard=(0, 2)) == [{"a": 1}, {"a": 3}]
    assert values(path, start=4) == []
    with pytest.raises(ValueError, match="row 2: not valid JSON"):
        values(path, shard=(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": (2, 2)}, "shard is 2 of 2, expected 0 to count - 1"),
        ({"shard": (0, 0)}, "shard is 0 of 0"),
        ({"start": -1}, "start is -1, expected 0 or more"),
        ({"max_row_bytes": 0}, "max_row_bytes is 0, expected at least 1"),
    ],
)
def test_selections_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection(**options)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_row(name: str, tmp_path: Path) -> None:
    data = "Zwei\n\nZeilen\n".encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert values(tmp_path) == [{"text": "Zwei\n\nZeilen\n"}]
    with pytest.raises(ValueError, match=r"row 1: 13 bytes in one document, the limit is 5 bytes"):
        values(tmp_path, max_row_bytes=5)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ROWS[:3])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert values(path) == ROWS[:3]
    path.write_text("[]", encoding="utf-16")
    with pytest.raises(ValueError, match=r"a\.jsonl?: expected UTF-8, found UTF-16"):
        values(path)


@pytest.mark.parametrize("text", ["[]", " [ ] \n", "", "\n\n"])
def test_no_rows_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text.strip("[] "))
    assert values(tmp_path / "a.jsonl") == []
    (tmp_path / "a.json").write_text(text)
    if "[" in text:
        assert values(tmp_path / "a.json") == []
    else:
        with pytest.raises(ValueError, match="after row 0: expected more, but the file is cut short"):
            values(tmp_path / "a.json")


def test_a_list_is_read_right_wherever_a_piece_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    kinds = [-12.5e-7, 123, True, None, "😀", "é\\", {"a": [1, {}]}, [], float("inf")]
    for offset in range(60):  # every border of the values comes to lie on the end of a piece
        rows = ["x" * (CHUNK - 40 - offset), *kinds]
        path.write_text(json.dumps(rows, ensure_ascii=offset % 2 == 0, indent=offset % 3 or None), encoding="utf-8")
        assert values(path) == rows


def peak_bytes(rows: Iterator[Row]) -> tuple[int, int]:
    tracemalloc.start()
    try:
        count = sum(1 for _ in rows)
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.zst", "a.parquet", "stream.arrow"])
def test_the_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": f"{i} {'word ' * 600}"} for i in range(10_000)])  # 30 MB of JSON
    count, peak = peak_bytes(local_rows(path, Selection(shard=(0, 4))))
    assert count == 2500
    assert peak < 5e6


@pytest.mark.parametrize(
    ("name", "size"), [("a.jsonl", "40,000,016 bytes in one line"), ("a.json", "at least .* value")]
)
def test_a_huge_line_is_found_without_being_held(name: str, size: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as out:
        out.write(b'[{"prompt": "a"},\n' if name == "a.json" else b'{"prompt": "a"}\n')
        out.write(b'{"prompt": "' + b"x" * 40_000_001 + b'"}\n')
        out.write(b"]" if name == "a.json" else b'{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=rf"{name}, row 2: {size}, the limit is 1,000,000 bytes a row"):
        values(path, max_row_bytes=1_000_000)
    tracemalloc.start()
    rows, skipped = skipping(path, max_row_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.value["prompt"] for row in rows] == (["a"] if name == "a.json" else ["a", "b"])
    assert skipped == {"row too long": 1}
    assert peak < 10e6
    assert MAX_ROW_BYTES > 40e6


def test_a_long_value_that_is_held_anyway_is_passed_over_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", ["short", "ü" * 60, "x" * 100, "end"])
    rows, skipped = skipping(path, max_row_bytes=110)
    assert [row.value for row in rows] == ["short", "x" * 100, "end"]
    assert skipped == {"row too long": 1}
    with pytest.raises(ValueError, match="row 2: 122 bytes in one value, the limit is 110 bytes"):
        values(path, max_row_bytes=110)


GOOD = b'{"prompt": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "message", "kept", "reason"),
    [
        ("a.jsonl", GOOD + b"\n{\n" + GOOD, r"row 2: not valid JSON: .*; expected one JSON object a line", 2,
         "not valid JSON"),
        ("a.jsonl", GOOD + b'\n{"prompt": "gr\xfc\xdfe"}\n' + GOOD, r"row 2: not UTF-8 text: invalid .* byte 14", 2,
         "not UTF-8 text"),
        ("a.jsonl", GOOD + b'\n{"prompt": "cut', r"row 2: not valid JSON: Unterminated string", 1, "not valid JSON"),
        ("a.jsonl", GOOD + b"\n" + b"[" * 100_000 + b"\n" + GOOD, "row 2: not valid JSON: nested too deeply", 2,
         "not valid JSON"),
        ("a.jsonl", GOOD + b"\n" + b"9" * 5000 + b"\n" + GOOD, "row 2: not valid JSON: Exceeds the limit", 2,
         "not valid JSON"),
        ("a.json", b"[" + GOOD + b",\n{]", r"row 2: not valid JSON: Expecting property name.* at line 2; expected one",
         1, "not valid JSON"),
        ("a.json", b"[" + GOOD + b',\n{"prompt": "gr\xfc\xdfe"},' + GOOD + b"]", "row 2: not UTF-8 text", 2,
         "not UTF-8 text"),
        ("a.json", b"[" + GOOD + b',\n{"prompt": "cut', "after row 1: expected more, .* cut short .*at line 2", 1,
         "file cut short or damaged"),
        ("a.json", b"[" + GOOD + b"\n", "after row 1: expected more, .* the list does not end", 1,
         "file cut short or damaged"),
        ("a.json", b"[" + GOOD + b"\n" + GOOD + b"]", "after row 1: not valid JSON at line 2: expected another",
         1, "not valid JSON"),
        ("a.json", b"[" + GOOD + b"]\n[1]", "after row 1: .* at line 2: expected nothing after the list", 1,
         "not valid JSON"),
        ("a.json", b"[" + GOOD + b"," + b"[" * 100_000, "row 2: not valid JSON: nested too deeply", 1,
         "not valid JSON"),
        ("a.txt", b"gr\xfc\xdfe", r"row 1: not UTF-8 text: invalid .* at byte 2", 0, "not UTF-8 text"),
        ("a.parquet", b"PAR1 nothing", r"a\.parquet: expected a file in the parquet", 0, "file cut short or damaged"),
        ("a.arrow", b"ARROW1 nothing", r"a\.arrow: expected a file in the arrow", 0, "file cut short or damaged"),
        ("a.jsonl.gz", b"no gzip", "after row 0: expected more, .*Not a gzipped file", 0, "file cut short or damaged"),
        ("a.jsonl.zst", b"no zstd", "after row 0: expected more, .*cut short or damaged", 0,
         "file cut short or damaged"),
    ],
)  # fmt: skip
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
        shards = [skipping(tmp_path, shard=(index, 2)) for index in range(2)]
        found = sorted((row.number, row.value["prompt"]) for rows, _ in shards for row in rows)
        assert [prompt for _, prompt in found] == ["a"] * kept + ["next"]
        assert found[-1][0] == kept + 1
        assert shards[0][1].get(reason, 0) + shards[1][1].get(reason, 0) == 1


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz", "a.json.zst", "a.jsonl.zst", "stream.arrow", "a.parquet"])
def test_of_a_file_cut_short_the_rows_before_are_kept(name: str, tmp_path: Path) -> None:
    noisy = [{"prompt": f"{i}", "response": str(hash((i, j)))} for i in range(3000) for j in range(3)]
    path = write(tmp_path / name, noisy)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"expected.*(cut short or damaged|format, but)"):
        values(path)
    rows, skipped = skipping(path)
    assert [row.value for row in rows] == noisy[: len(rows)]
    assert (len(rows) > 1000) == (name != "a.parquet")  # what a parquet file holds is written at its end
    assert skipped == {"file cut short or damaged": 1}


def test_a_folder_is_its_data_files(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "train-2.jsonl", "train_gen.jsonl"):
        write(tmp_path / name, [name])
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / ".hidden.jsonl").write_text("no")
    assert values(tmp_path) == ["test.jsonl", "train-2.jsonl", "train.jsonl", "train_gen.jsonl"]
    rows = local_rows(tmp_path, Selection(), split="train")
    assert [row.value for row in rows] == ["train-2.jsonl", "train.jsonl"]
    assert len(list(local_rows(tmp_path, Selection(), split="validation"))) == 4  # no file is named after it


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list(ROWS[:n]) for name, n in (("train", 20), ("test", 5))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert values(tmp_path / "saved") == ROWS[:5] + ROWS[:20]
    assert [row.value for row in local_rows(tmp_path / "saved", Selection(), split="train")] == ROWS[:20]


def test_only_chosen_columns_are_read(tmp_path: Path) -> None:
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        path = write(tmp_path / name, ROWS)
        rows = local_rows(path, Selection(), columns=lambda names: [name for name in names if name == "prompt"])
        assert [row.value for row in rows] == [{"prompt": row["prompt"]} for row in ROWS]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_package_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    kind = name.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"reading {kind} needs pyarrow: pip install 'draftsmith\[train\]'"):
        skipping(tmp_path / name)
