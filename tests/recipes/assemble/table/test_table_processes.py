"""Table recipes write the same file from any number of processes, even if they are killed and resumed."""

import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.table.table import TABLE_FILE
from draftsmith.recipes.assemble.table.count import count_tokens
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.training import TableRecipe

ROWS = 3000


def large(folder: Path) -> Path:
    """Write a corpus that is large enough to be interrupted while it is counted."""
    path = folder / "large.jsonl"
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(400)]
    with path.open("w") as out:
        for number in range(ROWS):
            texts = [" ".join(rng.choices(words, k=rng.randint(4, 60))) for _ in range(2)]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            out.write(json.dumps({"id": f"row{number}", "messages": turns}) + "\n")
    return path


@pytest.fixture(scope="module")
def counted_once(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Count a large corpus in one process without interruption; return the path of the recipe."""
    folder = tmp_path_factory.mktemp("large")
    data = {"source": str(large(folder)), "template": "chatml", "cache": str(folder / "prepared")}
    values = {"kind": "table", "out": str(folder / "once"), "tokenizer": str(corpus / "tokenizer"), "data": data}
    # little memory and frequent writes give many runs on disk
    values["count"] = {"memory_mb": 2, "save_minutes": 1e-6}
    run_train(TableRecipe.model_validate(values))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Launches:
    def __init__(self, launcher: Any, recipe: Path, out: str | Path) -> None:
        self._launcher, self.recipe, self.out = launcher, recipe, Path(out)

    def start(self, places: list[Path | None], *changes: str) -> list[Any]:
        """Start the processes of one launch, each in its working directory (None: the current one)."""
        arguments = ["train", str(self.recipe), f"out={self.out}", *changes]
        world: dict[str, str] = {}
        if len(places) > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            size = str(len(places))
            world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {} for rank in range(len(places))]
        return [
            self._launcher.start(*arguments, cwd=folder, **world, **rank)
            for folder, rank in zip(places, ranks, strict=True)
        ]

    def run(self, processes: int, *changes: str) -> str:
        """Run the recipe to completion and return the output."""
        codes, outputs = ended(self.start([None] * processes, *changes))
        assert codes == [0] * processes, outputs
        return "".join(outputs)

    def counted(self) -> int:
        """Return the number of counted tokens on disk."""
        folder = Path(f"{self.out}.state/count")
        return count_tokens(folder) if folder.exists() else 0

    def stop(self, processes: int, signal_number: signal.Signals, who: slice = slice(None)) -> tuple[list[int], str]:
        """Start counting, and signal the processes `who` after new counts were saved; return exit codes and output."""
        before = self.counted()
        started = self.start([None] * processes)
        deadline = time.monotonic() + 120
        while self.counted() == before:
            assert all(process.poll() is None for process in started), ended(started)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        for process in started[who]:
            process.send_signal(signal_number)
        codes, outputs = ended(started)
        return codes, "".join(outputs)

    @property
    def bytes(self) -> bytes:
        return (self.out / TABLE_FILE).read_bytes()


def ended(processes: list[Any]) -> tuple[list[int], list[str]]:
    """Wait for the processes; return their exit codes and outputs."""
    codes, outputs = zip(*(process.ended() for process in processes), strict=True)
    return list(codes), list(outputs)


@pytest.fixture
def launches(launcher: Any, counted_once: Path, tmp_path: Path) -> Launches:
    return Launches(launcher, counted_once, tmp_path / "table")


def assert_same(out: Path, recipe: Path) -> None:
    """Assert that the table and its manifest equal those of the uninterrupted count."""
    once = recipe.with_name("once")
    assert (out / TABLE_FILE).read_bytes() == (once / TABLE_FILE).read_bytes()
    manifest, expected = load_manifest(out), load_manifest(once)
    assert manifest.data == expected.data
    assert manifest.training == expected.training


@pytest.mark.slow
def test_four_processes_write_the_same_file(launches: Launches, counted_once: Path) -> None:
    output = launches.run(4)
    assert_same(launches.out, counted_once)
    assert output.count("wrote") == output.count("are held out") == 1, "only the main process may print"


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_count_resumes(launches: Launches, counted_once: Path, processes: int) -> None:
    codes, output = launches.stop(processes, signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * processes, output
    assert not launches.out.exists()
    launches.run(processes)
    assert_same(launches.out, counted_once)


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stopped_count_saves_its_state(
    launches: Launches, counted_once: Path, signal_number: signal.Signals, processes: int
) -> None:
    codes, output = launches.stop(processes, signal_number)
    assert codes == [128 + signal_number] * processes, output
    assert "Traceback" not in output
    assert not launches.out.exists()
    assert "counted tokens" in launches.run(processes)
    assert_same(launches.out, counted_once)


@pytest.mark.slow
def test_an_error_ends_all_processes(launches: Launches, counted_once: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    rows = counted_once.with_name("large.jsonl").read_text().splitlines()[:50]
    broken.write_text("\n".join(rows) + '\n{"id": "torn')
    for change, message in ((f"data.source={broken}", "row 51"), ("vocab_size=7", "`vocab_size` is 7")):
        codes, outputs = ended(launches.start([None, None], change))
        assert 2 in codes and 0 not in codes, outputs  # noqa: PT018
        assert message in "".join(outputs)
        assert "Traceback" not in "".join(outputs)


@pytest.mark.slow
def test_processes_without_a_shared_file_system_are_refused(launcher: Any, counted_once: Path, tmp_path: Path) -> None:
    """Two processes in different folders simulate two machines."""
    machines: list[Path | None] = [tmp_path / "first", tmp_path / "second"]
    for machine in machines:
        assert machine is not None
        machine.mkdir()
    codes, outputs = ended(Launches(launcher, counted_once, "table").start(machines))
    assert codes == [2, 2]
    assert "must be on a file system that all processes share" in outputs[0]
