"""Commands that only read files start without slow imports."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from draftsmith.__main__ import main
sys.argv = ["draftsmith", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
found = {"torch", "transformers", "scipy", "datasets", "accelerate"} & set(sys.modules)
assert not found, found
"""
LIGHT = [
    ("--help",),
    ("recipes", "ls"),
    ("show", "{pair}/drafter"),
    ("show", "{pair}/table", "--json"),
]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_slow_packages_are_not_imported(arguments: tuple[str, ...], tiny_pair: Path, tmp_path: Path) -> None:
    replaced = [word.format(pair=tiny_pair) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *replaced], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
