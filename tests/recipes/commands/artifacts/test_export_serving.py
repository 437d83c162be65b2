"""SERVING.md of every export format, with target and folder names that must be quoted."""

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import tokenizer_fingerprint
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.heads.dflash import DFlashHeads, save_dflash
from draftsmith.checkpoints.heads.dspark import DSparkHeads
from draftsmith.checkpoints.heads.eagle import EagleHeads, save_eagle
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import train_bpe
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.serving.engines import ENGINES, commands_of
from markdown_it import MarkdownIt
from markdown_it.token import Token
from transformers import LlamaForCausalLM

VOCAB, HIDDEN = 270, 16
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2}
ODD = """my model's "x" $c `d` <b>"""
CONVERTER = Path(__file__).parents[3] / "checkpoints" / "gguf_converter.py"
PRINT = """command_not_found_handle() { printf "%s\\0" "$@" "${PYTHONPATH#"$PWD"/}"; }; cp() { :; }; PATH=/nowhere
"""
"""Shell code after which commands print their arguments instead of running."""


def serving(
    form: str, root: Path, name: str, make_llama: Callable[..., LlamaForCausalLM], out: str = "out"
) -> tuple[str, str]:
    """Save an artifact and export it in the format `form`; return the text of SERVING.md and the target's path."""
    tokenizer = train_bpe(["some words of a text, other words"], VOCAB, ("<pad>", "</s>"))
    target = root / name
    model = make_llama(VOCAB, 1, **SIZES, num_hidden_layers=4)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    kind = FORMATS[form].kind

    def write(folder: Path) -> None:
        if kind == "drafter":
            make_llama(VOCAB, 2, **SIZES).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        elif form.startswith("eagle3"):
            eagle = EagleHeads.for_target(model.config, [0, 1, 3], torch.arange(40, VOCAB))
            save_eagle(eagle.attach(model.get_input_embeddings().weight, model.lm_head.weight), folder)
        elif form.startswith(("dflash", "dspark")):
            block = (DSparkHeads if form == "dspark" else DFlashHeads).for_target(model.config, 3, 6, 2)
            save_dflash(block.attach(model.get_input_embeddings().weight, model.lm_head.weight), folder)
        elif kind == "heads":
            save_heads(PredictionHeads.from_lm_head(model.lm_head.weight.detach().clone(), 3, 1), folder, str(target))
        else:
            BigramTable.from_documents([[1, 2, 3, 1, 2], [3, 3, 1]], VOCAB).save(folder)

    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    if kind == "heads":
        about["shapes"] = {"num_heads": 3} | ({"architecture": "eagle3"} if form.startswith("eagle3") else {})
    about |= {"target": {"id": str(target)}, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    save_artifact(root / "artifact", kind=kind, write=write, vocab_size=VOCAB, **about)
    shutil.copyfile(CONVERTER, root / "convert_hf_to_gguf.py")
    options: dict[str, Any] = {"llama_cpp": root} if form.endswith("gguf") else {}
    if "speculative_tokens" in FORMATS[form].options:
        options |= {"speculative_tokens": 5}
    export_artifact(root / "artifact", form, root / out, FORMATS, ExportOptions(**options))
    return (root / out / SERVING_FILE).read_text(), str(target)


def parsed(text: str) -> list[Token]:
    tokens = MarkdownIt("commonmark", {"html": True}).parse(text)
    return [each for token in tokens for each in (token, *(token.children or ())) if each.type != "text"]


def arguments(code: str, language: str) -> list[str]:
    """Return the strings of a Python block, or the arguments of all commands of a shell block."""
    if language == "python":
        return [str(node.value) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    words = words_of(code)
    return [part for word in words for part in (json.loads(word).values() if word.startswith('{"') else [word])]


def words_of(code: str) -> list[str]:
    """Run shell code with stub commands. Return the arguments of each command, and the shell's error output."""
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", PRINT + code], capture_output=True, check=False, env=env, cwd="/")
    return [*done.stdout.decode().split("\x00"), done.stderr.decode()]


@pytest.mark.parametrize("form", FORMATS)
def test_names_are_quoted(form: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    plain, odd = "exported-folder", """my drafter's "out" $c `d`"""
    known, plain_path = serving(form, tmp_path / "one", "model", make_llama, plain)
    text, odd_path = serving(form, tmp_path / "two", ODD, make_llama, odd)
    blocks = [[token for token in parsed(each) if token.type != "softbreak"] for each in (known, text)]
    assert [token.type for token in blocks[0]] == [token.type for token in blocks[1]]
    assert not {"html_block", "html_inline"} & {token.type for token in blocks[1]}
    names, folders = 0, 0
    for one, other in zip(*([token for token in tokens if token.type == "fence"] for tokens in blocks), strict=True):
        assert one.info == other.info
        first, second = arguments(one.content, one.info), arguments(other.content, other.info)
        assert [str(word).replace(plain_path, odd_path).replace(plain, odd) for word in first] == list(map(str, second))
        names += sum(odd_path in str(word) for word in second)
        folders += sum(odd in str(word) for word in second)
    assert folders > 0
    options = FORMATS[form].options
    assert (names > 0) == ("target" in options), "SERVING.md names the target if the format has this option"


@pytest.mark.parametrize(("engine", "form"), [(name, form) for name, each in ENGINES.items() for form in each.forms])
def test_serve_starts_the_command_of_serving_md(
    engine: str, form: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = serving(form, tmp_path, "a 'target'", make_llama)
    monkeypatch.chdir(tmp_path)
    started, alone = commands_of(Path("out"), engine, "target.gguf" if engine == "llama.cpp" else None)
    words = [word for token in parsed(text) if token.type == "fence" for word in words_of(token.content)]
    assert started in [words[at : at + len(started)] for at in range(len(words))]
    assert started[: len(alone)] == alone
