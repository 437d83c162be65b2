"""`draftsmith bench --engine`: stand-ins for vLLM are started, queried and stopped."""

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact
from draftsmith.checkpoints.storage.names import MANIFEST_FILE
from draftsmith.recipes.commands.serving.engines import commands_of
from draftsmith.recipes.commands.serving.lengths import max_draft_tokens, schedule_command, switch_off_point
from draftsmith.recipes.schema.results import load_results


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write the manifest of an export."""
    about: dict[str, Any] = {key: {} for key in ("recipe", "data", "training")}
    about |= {"target": {"id": "some/target"}, "tokenizer_fingerprint": None, "shapes": {}}
    about["export"] = {"format": "vllm-sglang", "readers": "vLLM", "native": True, "of": {}}
    config = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    write = lambda folder: (folder / "config.json").write_text(config)  # noqa: E731
    save_artifact(tmp_path / "out", kind="drafter", write=write, vocab_size=16, **about)
    return tmp_path / "out"


def free_ports() -> int:
    """Return a free port that is followed by another free port."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def questions(folder: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": f"one two three {n}"}]} for n in range(8)]
    (folder / "questions.json").write_text(json.dumps(rows))


def alive(log: Path) -> bool:
    """Return whether the worker process of the engine is running."""
    (worker,) = re.findall(r"^worker (\d+)$", log.read_text(), re.MULTILINE)
    return Path(f"/proc/{worker}").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=["Ctrl-C", "kill"],
)
def test_an_engine_is_stopped_by_a_signal(number: int, export: Path, launcher: Any, tmp_path: Path) -> None:
    port = free_ports()
    command = ["bench", str(export), "--engine", "vllm", "--serve", "--port", str(port)]
    child = launcher.start(*command, cwd=tmp_path)
    while f"serving at http://127.0.0.1:{port}/v1" not in child.errors:
        assert child.poll() is None, child.errors
        time.sleep(0.01)
    log = tmp_path / "serve-vllm.log"
    assert alive(log)
    child.send_signal(number)
    assert child.ended()[0] == 128 + number
    assert not alive(log)
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("options", "message"),
    [("--dies 'with drafts'", "no kernel image"), ("--ends-the-other yes", "ended with code 9")],
    ids=["at its start", "while the other starts"],
)
def test_the_error_of_a_failed_engine_is_shown(
    options: str, message: str, export: Path, cli: Callable[..., Any], tmp_path: Path
) -> None:
    questions(tmp_path)
    values = ["--prompts", "questions.json", "--port", str(free_ports()), "--engine-options", options]
    done = cli("bench", str(export), "--engine", "vllm", *values, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "says the engine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("vllm")
def test_bench_of_an_export(export: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    """The stand-in generates three tokens per step with a drafter, and one without."""
    questions(tmp_path)
    options = ["--port", str(free_ports()), "--prompts", "questions.json", "--out", "bench.json"]
    done = cli("bench", str(export), "--engine", "vllm", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    server, baseline = load_results(tmp_path / "bench.json")["methods"]
    assert server["failed"] == baseline["failed"] == 0
    assert server["tokens_per_step"] > 2
    assert not any(alive(tmp_path / f"serve-vllm{name}.log") for name in ("", "-baseline"))


@pytest.mark.parametrize(
    ("form", "engine", "target", "match"),
    [
        ("vllm-sglang", "vlm", None, "'vlm'.*vllm.*sglang"),
        ("gguf", "vllm", None, "gguf.*vllm-sglang"),
        (None, "vllm", None, "not an export.*--to"),
        ("gguf", "llama.cpp", None, "some/target.*--target"),
        ("vllm-sglang", "vllm", "", "--target"),
    ],
)
def test_unsupported_exports_are_refused(
    form: str | None, engine: str, target: str | None, match: str, export: Path
) -> None:
    manifest = json.loads((export / MANIFEST_FILE).read_text())
    about: dict[str, Any] = {key: {} for key in ("recipe", "data", "training", "shapes")}
    about |= {"vocab_size": 16, "tokenizer_fingerprint": None, "target": None if target == "" else manifest["target"]}
    about["export"] = None if form is None else load_manifest(export).export | {"format": form}  # type: ignore[operator]
    other = export.with_name("other")
    save_artifact(other, kind="drafter", write=lambda folder: (folder / "x").write_text("x"), **about)
    with pytest.raises(ValueError, match=match):
        commands_of(other, engine)


@pytest.mark.parametrize("form", ["dflash", "dspark"])
def test_a_block_is_drafted_with_one_forward(export: Path, form: str) -> None:
    """The number of draft tokens of SGLang includes the anchor."""
    about: dict[str, Any] = {key: {} for key in ("recipe", "data", "training")} | {"shapes": {"num_heads": 7}}
    about |= {"vocab_size": 16, "tokenizer_fingerprint": None, "target": {"id": "some/target"}}
    about["export"] = load_manifest(export).export | {"format": form}  # type: ignore[operator]
    drafter = export.with_name(form)
    save_artifact(drafter, kind="heads", write=lambda folder: (folder / "x").write_text("x"), **about)
    assert max_draft_tokens(drafter) == 7
    vllm, sglang = (" ".join(commands_of(drafter, engine)[0]) for engine in ("vllm", "sglang"))
    assert f'"method": "{form}"' in vllm
    assert '"num_speculative_tokens": 7' in vllm
    assert f"--speculative-algorithm {form.upper()}" in sglang
    assert "--speculative-num-draft-tokens 8" in sglang


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_bench_tunes_the_draft_length(export: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    """The stand-in accepts two draft tokens for every draft length. Finished measurements are reused."""
    questions(tmp_path)
    options = ["--prompts", "questions.json", "--drafter", str(export), "--concurrency", "1,4", "--out", "lengths.json"]
    done = cli("tune", "--engine", "vllm", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lengths_by_load = json.loads((tmp_path / "lengths.json").read_text())
    for load, concurrency in zip(lengths_by_load["loads"], (1, 4), strict=True):
        assert (load["concurrency"], load["context"]) == (concurrency, None)
        assert {length["tokens_per_step"] for length in load["lengths"]} == {3.0}
        speedups = {length["tokens"]: length["speedup"] for length in load["lengths"]}
        assert load["best"] == max(speedups | {0: 1.0}, key=(speedups | {0: 1.0}).__getitem__)
        command = lengths_by_load["commands"][str(load["best"])]
        assert f'"num_speculative_tokens": {load["best"]}' in command if load["best"] else "speculative" not in command
    (schedule,) = lengths_by_load["schedules"]
    best = {load["concurrency"]: load["best"] for load in lengths_by_load["loads"]}
    assert schedule["off_from"] == switch_off_point(best)
    assert (schedule["command"] is None) == (not any(best.values()))
    before = (tmp_path / "lengths.1.json").stat().st_mtime_ns
    (tmp_path / "lengths.2.json").unlink()
    again = cli("tune", "--engine", "vllm", *options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "lengths.1.json").stat().st_mtime_ns == before, "a finished measurement was repeated"


@pytest.mark.parametrize(
    ("best", "ranges", "off"),
    [
        ({1: 4, 4: 4, 16: 2, 64: 0}, [[1, 15, 4], [16, 63, 2], [64, 64, 0]], 64),
        ({4: 3, 16: 0, 64: 0}, [[1, 15, 3], [16, 64, 0]], 16),
        ({1: 2, 8: 3}, [[1, 7, 2], [8, 8, 3]], None),
        ({1: 0, 8: 3}, [[1, 7, 0], [8, 8, 3]], None),
        ({1: 0, 8: 0}, None, 1),
    ],
)
def test_a_schedule_of_draft_lengths(best: dict[int, int], ranges: Any, off: int | None, tmp_path: Path) -> None:
    """vLLM requires ranges that start at 1 and do not overlap. SGLang reads the lengths from a file."""
    assert switch_off_point(best) == off
    path = tmp_path / "steps.json"
    plain = ["vllm", "serve", "t", "--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 4}', "--x"]
    command = schedule_command("vllm", plain, best, path)
    assert (command is None) == (ranges is None)
    if command is None:
        return
    config = json.loads(command[4])
    assert (config.pop("num_speculative_tokens_per_batch_size"), command[5]) == (ranges, "--x")
    assert config == json.loads(plain[4])
    command = schedule_command("sglang", ["python", "EAGLE3"], best, path)
    assert command is not None
    assert command[-1] == str(path)
    steps = {int(load): one["candidate_steps"] for load, one in json.loads(path.read_text()).items()}
    assert steps == {start: [tokens] for start, _, tokens in ranges}
    assert schedule_command("sglang", ["python", "DFLASH"], best, path) is None
    assert schedule_command("llama.cpp", ["llama-server"], best, path) is None
