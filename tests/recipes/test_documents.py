"""Run the code blocks of README and the tutorials in a folder with tiny stand-ins for the models.

A page's blocks run in order as one script: `bash` and `python` run, and `yaml title="FILE"` writes a file. A comment
`<!-- test` with a YAML mapping names the replacements for the page's blocks, and `<!-- test slow` marks the page slow.
`stand-ins/` holds target, drafter, heads, table, answers.jsonl and corpus/heldout.jsonl.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from draftsmith.recipes.commands.cli import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"^<!-- test( slow)?\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r'^( *)```(?:(bash|python)|yaml title="(.+?)")\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^ *```(?:bash|sh|shell|python|yaml title)", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def script_of(page: str) -> str:
    """Join the code blocks of a page into one shell script, with the replacements of the page's test comments."""
    changes = {key: value for _, text in COMMENT.findall(page) for key, value in yaml.safe_load(text or "{}").items()}
    blocks, unused = BLOCK.findall(page), set(changes)
    assert len(blocks) == len(OPENING.findall(page)), "a block is not closed, or its language is not `bash` or `python`"
    commands = ["set -euo pipefail"]
    for _, language, file, code in blocks:
        code = dedent(code)
        for old, new in changes.items():
            unused -= {old} if old in code else set()
            code = code.replace(old, new)
        reader = {"": f"cat > {file}", "python": "python -"}.get(language)
        commands.append(f"{reader} <<'END OF BLOCK'\n{code}END OF BLOCK" if reader else code)
    assert not unused, f"no block contains {unused}"
    return "\n".join(commands)


def parameters() -> list[object]:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    return [
        pytest.param(text, id=page.stem, marks=[pytest.mark.slow] if "<!-- test slow\n" in text else [])
        for page, text in texts.items()
        if OPENING.search(text)
    ]


@pytest.mark.parametrize("page", parameters())
def test_the_blocks_of_a_page_run(page: str, tiny_pair: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_pair, tmp_path / "stand-ins")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", script_of(page)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_blocks_become_a_script(tmp_path: Path) -> None:
    yaml_block, bash_block = '```yaml title="a.yaml"\ntarget: model\n```\n', "    ```bash\n    cat a.yaml\n    ```\n"
    page = f"<!-- test\nmodel: tiny\n-->\n{yaml_block}- item\n\n{bash_block}"
    done = subprocess.run(["bash", "-c", script_of(page)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "target: tiny\n"
    with pytest.raises(AssertionError, match="no block contains"):
        script_of(page.replace("model: tiny", "other: tiny"))


def test_commands_have_the_options_that_pages_name() -> None:
    known, names = get_command(app).commands, list[str]()  # type: ignore[attr-defined]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(r"draftsmith ([a-z]+)(?![a-z:.])([^`|#\n]*)", text):
            options = {option for each in known[name].params for option in each.opts} if name in known else {name}
            assert set(re.findall(r"(?<=\s)--[a-z-]+", rest.partition("'")[0])) <= options, f"{page}: {name}{rest}"
            names.append(name)
    assert set(known) <= set(names)
