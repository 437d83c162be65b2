"""Text of messages: system errors without error numbers, and install commands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.storage import messages
from draftsmith.checkpoints.storage.messages import error_text, first_line, install_hint

ROOT = Path(__file__).parents[3]


def test_system_errors_are_shown_without_error_numbers(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno") as raised:
        (tmp_path / "nowhere").read_text()
    assert error_text(raised.value) == f"{tmp_path / 'nowhere'}: No such file or directory"
    assert first_line(raised.value) == error_text(raised.value)
    assert error_text(OSError("[Errno -2] in a library's words")) == "in a library's words"
    assert first_line(ValueError()) == "ValueError"


def test_a_heading_is_shown_with_the_next_line() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
    assert "[3, 2]" in first_line(raised.value)
    assert first_line(ValueError("Reasons:\n\n\tone\n\ttwo\n")) == "Reasons: one"
    assert first_line(ValueError("Nothing:")) == "Nothing:"


def test_install_commands_for_a_checkout_and_for_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_hint("clean") == "pip install -e '.[clean]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("clean") == f"pip install -e '{ROOT}[clean]'"
    installed = tmp_path / "draftsmith" / "checkpoints" / "storage" / "messages.py"
    installed.parent.mkdir(parents=True)
    shutil.copyfile(messages.__file__, installed)
    code = "from messages import install_hint; print(install_hint('clean'), install_hint(), sep='; ')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "pip install 'draftsmith[clean]'; pip install draftsmith"
