"""Rules of the repository: layout, imports, dependencies, line budget and the wheel."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from helpers.syntax import parse_file
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("checkpoints", "data", "decode", "train", "recipes")
GROUND = "draftsmith.checkpoints.storage"
MAY_IMPORT = {
    "checkpoints": set(),
    "data": {"checkpoints"},  # only the modules in `GROUND`
    "decode": {"data", "checkpoints"},
    "train": {"data", "checkpoints", "decode"},
    "recipes": {"data", "checkpoints", "decode", "train"},
}
OPTIONAL = (
    *("accelerate", "peft", "datasets", "pyarrow", "deepspeed", "sentencepiece"),
    *("markdownify", "bs4", "py3langid", "openai", "pynvml"),
)
MAX_ENTRIES = 12
MAX_DEPTH = 7
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
LIBRARY_LINES = 39_055
"""Line budget of the five rooms' Python files. It only goes down."""
TEST_LINES = 35_200
"""Line budget of the Python files under `tests/`. It only goes down."""
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYTHON = [sys.executable, "-W", "error::DeprecationWarning:draftsmith"]

NOT_INSTALLED = """
import sys

class Without:
    def __init__(self, finder, refused):
        self.finder, self.refused = finder, refused
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in self.refused else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)

def without(*refused):
    assert not set(refused) & set(sys.modules), "imported too early"
    sys.meta_path[:] = [Without(finder, refused) for finder in sys.meta_path]
"""

DECODES = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import draftsmith
from draftsmith.decode import method

assert draftsmith.__file__.startswith(sys.argv[1]), draftsmith.__file__
torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model, drafter = (LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).eval() for _ in range(2))
ids, plain = torch.tensor([[1, 2, 3]]), dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
found = model.generate(ids, custom_generate=method("speculative", drafter=drafter), **plain)
assert found.tolist() == model.generate(ids, **plain).tolist()
"""


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run a Python process and return its output."""
    base = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [*PYTHON, *arguments], cwd=cwd, env=base | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("draftsmith", *(part for part in parts if part != "__init__")))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    packages = {"draftsmith"} | {name_of(path) for path in MODULES if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages
    assert [path for path in MODULES if not (path.parent / "__init__.py").is_file()] == []
    assert len(MODULES) > 30


def test_the_version_is_given_once(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == draftsmith.__version__
    assert draftsmith.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_root_is_the_package() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert os.readlink(ROOT / ".typing" / "draftsmith") == ".."


def test_every_dependency_is_pinned_to_a_version_it_allows(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {pin.name.lower(): pin for line in lines if line and not line.startswith("#") for pin in [Requirement(line)]}
    extras = project["project"]["optional-dependencies"]
    requirements = itertools.chain(project["project"]["dependencies"], *extras.values())
    for need in (Requirement(text) for text in requirements):
        if need.name == "draftsmith":
            continue
        (pin,) = pins[need.name.lower()].specifier
        assert pin.operator == "=="
        assert need.specifier.contains(pin.version), f"{need} excludes the tested {pin}"


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the level, module and name of every import in a file, including imports inside functions."""
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def imported(path: Path) -> set[str]:
    """Return the names of the package's modules that a file imports."""
    parts, all_modules = name_of(path).split("."), {name_of(module) for module in MODULES}
    if path.name == "__init__.py":
        parts.append("__init__")
    modules = set()
    for level, module, name in imports(path):
        if level:
            path_parts = [*parts[: len(parts) - level], *filter(None, module.split("."))]
            modules |= {".".join(path_parts), ".".join([*path_parts, name])} & all_modules
    return modules


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name_of(path): imported(path) - {name_of(path)} for path in MODULES}


def test_imports_run_one_way(graph: dict[str, set[str]]) -> None:
    for path in MODULES:
        absolute = {module.partition(".")[0] for level, module, _ in imports(path) if level == 0}
        assert not absolute & {"draftsmith", "tests", *FOLDERS}, f"{path}: import relatively"
    for name, others in graph.items():
        room = name.split(".")[1]
        for other in others:
            assert other.split(".")[1] in MAY_IMPORT[room] | {room}, f"{name} imports {other}"
            assert (room, other.split(".")[1]) != ("data", "checkpoints") or other.startswith(GROUND), name


def folder_of(name: str) -> str:
    """Return the name of a module's package, or of the module itself if it lies directly in a top-level package."""
    is_folder = (ROOT / Path(*name.split(".")[1:])).is_dir()
    return name if is_folder or name.count(".") <= 2 else name.rpartition(".")[0]


def depth(graph: dict[str, set[str]]) -> int:
    """Return the number of files on the longest chain of imports."""
    longest: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        longest[name] = 1 + max((longest[other] for other in graph.get(name, ())), default=0)
    return max(longest.values(), default=0)


def test_imports_have_no_cycles(graph: dict[str, set[str]]) -> None:
    folders: dict[str, set[str]] = {}
    for name, others in graph.items():
        folders.setdefault(folder_of(name), set()).update(map(folder_of, others))
    folders = {name: others - {name} for name, others in folders.items()}
    cases = (
        (graph, "draftsmith.decode.custom_generate.method", "draftsmith.decode.engine"),
        (folders, "draftsmith.decode.models", "draftsmith.checkpoints.artifact"),
    )
    for arrows, upper, lower in cases:
        assert lower in arrows[upper]
        with pytest.raises(CycleError):
            depth(arrows | {lower: {upper}})
        assert depth(arrows) > 1


def code_folders() -> list[Path]:
    return sorted({path.parent for path in MODULES})


def test_folders_have_few_entries(graph: dict[str, set[str]]) -> None:
    for folder in code_folders():
        entries = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__", "README.md"}
        assert len(entries) <= MAX_ENTRIES, folder
        inside = {name_of(path) for path in folder.glob("*.py")}
        assert depth({name: graph[name] & inside for name in inside}) <= MAX_DEPTH, folder


@pytest.mark.parametrize("room", FOLDERS)
def test_readmes_name_all_folders(room: str) -> None:
    text = (ROOT / room / "README.md").read_text(encoding="utf-8")
    folders = [path.relative_to(ROOT / room) for path in code_folders() if path.is_relative_to(ROOT / room)]
    assert [str(folder) for folder in folders if folder.parts and f"`{folder}/`" not in text] == []


def test_files_and_functions_are_short() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(parse_file(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or node.lineno) - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name}"


def test_line_budget_holds() -> None:
    def count_lines(paths: Iterable[Path]) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)

    assert count_lines(MODULES) <= LIBRARY_LINES
    assert count_lines((ROOT / "tests").rglob("*.py")) <= TEST_LINES


def test_markdown_lines_fit_into_120_columns() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listed.stdout.split()] or [*ROOT.glob("*.md"), *ROOT.glob("[cddtr]*/README.md")]
    assert len(paths) > 5
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120 or line.startswith("|"), f"{path}:{number} has {len(line)} columns"


@pytest.mark.parametrize(
    ("rooms", "more", "refused"),
    [
        (FOLDERS, [], OPTIONAL),
        (("decode", "checkpoints"), ["draftsmith.train.losses.drafter"], (*OPTIONAL, "pydantic", "typer", "rich")),
    ],
    ids=["all modules, without optional packages", "decoding and losses, without packages for recipes"],
)
def test_modules_import(rooms: tuple[str, ...], more: list[str], refused: tuple[str, ...], tmp_path: Path) -> None:
    names = [name_of(path) for path in MODULES if path.relative_to(ROOT).parts[0] in rooms]
    script = f"""{NOT_INSTALLED}
without{refused!r}
import importlib
for name in {names + more!r}:
    importlib.import_module(name)
assert not set({refused!r}) & {{name.partition('.')[0] for name in sys.modules}}
"""
    assert run("-c", script, cwd=tmp_path) == ""


def test_gpu_benches_need_few_packages(tmp_path: Path) -> None:
    script = f"""{NOT_INSTALLED}
without("pydantic", "datasets", "deepspeed")
sys.path.insert(0, {str(ROOT / "tests" / "bench")!r})
import decode, train_heads
"""
    assert run("-c", script, cwd=tmp_path) == ""


def test_importing_has_no_effects(tmp_path: Path) -> None:
    script = f"""
import importlib, logging, os, sys, warnings
import torch, transformers

def state():
    return (dict(os.environ), list(sys.path), list(logging.getLogger().handlers), torch.get_default_dtype(),
            torch.get_num_threads(), torch.initial_seed(), torch.is_grad_enabled(), os.getcwd())

before = state()
for name in {[name_of(path) for path in MODULES]!r}:
    importlib.import_module(name)
    assert state() == before, name
"""
    assert run("-c", script, cwd=tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a copy of this checkout that also has files which must not be packed."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=ignored)
    for stray in ("runs/a/recipe.yaml", ".venv/lib/module.py", "runs/script.py", "tests/data/more.yaml"):
        (folder / "checkout" / stray).parent.mkdir(parents=True, exist_ok=True)
        (folder / "checkout" / stray).write_text("")
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(folder / "checkout"))
    run(*build, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """Install the wheel into a separate folder and return it."""
    folder = wheel.parent / "installed"
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=wheel.parent)
    return folder


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    info = f"draftsmith-{draftsmith.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"draftsmith", info}
    shipped = {name.removeprefix("draftsmith/") for name in names if name.startswith("draftsmith/")}
    recipes = {path for kind in ("yaml", "json", "md", "html") for path in (ROOT / "recipes").rglob(f"*.{kind}")}
    other_files = (
        *(ROOT / "checkpoints").rglob("*.j2"),
        *(ROOT / "data").rglob("*.json"),
        *(ROOT / "decode").rglob("*.[ch]"),
    )
    expected = {str(path.relative_to(ROOT)) for path in (*MODULES, *recipes, *other_files)}
    assert len(recipes) >= 2
    assert shipped == expected | {"__init__.py", "__main__.py", "py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata


def test_the_installed_wheel_has_a_command_line_and_decodes(installed: Path) -> None:
    output = run("-m", "draftsmith", "--help", cwd=installed.parent, PYTHONPATH=str(installed))
    assert all(command in output for command in ("quickstart", "train", "evaluate", "recipes", "doctor"))
    run("-c", DECODES, str(installed), cwd=installed.parent, PYTHONPATH=str(installed))


def test_the_repository_contains_no_secrets() -> None:
    pattern = re.compile(
        r"\bhf_[A-Za-z]{30,}\b|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{24,}"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@'\"<>{}]+:[^/\s:@'\"<>{}]{8,}@"
    )
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0") if listed.returncode == 0 else [str(path.relative_to(ROOT)) for path in MODULES]
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert len(files) > 30
    suspects = [path for path in files if pattern.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert not suspects, "these files contain text that looks like a secret"
