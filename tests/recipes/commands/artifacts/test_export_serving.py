"""SERVING.md of every format, where the target or an adapter's base has a name that is code and Markdown itself."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact, tokenizer_fingerprint
from draftsmith.checkpoints.artifact.markdown import python, shell, span
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import train_bpe
from draftsmith.recipes.commands.artifacts.export import FORMATS
from markdown_it import MarkdownIt
from markdown_it.token import Token
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

VOCAB, HIDDEN = 270, 16
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2}
EVIL = 'x")\n```\n# head `a``b`\nimport os; os.system("echo pwned")  # \' <b> $(echo pwned) {folder} _i_\u202e'
CONVERTER = Path(__file__).parents[3] / "checkpoints" / "gguf_converter.py"
PRINT = 'command_not_found_handle() { printf "%s\\0" "$@" END; }; cp() { :; }; PATH=/nowhere\n'
"""Whatever would be run says its arguments instead."""
PRINT_PATH = PRINT.replace("END", '"${PYTHONPATH#"$PWD"/}" END')
MORE: dict[str, dict[str, Any]] = {"medusa-pt": {"pickle": True}, "adapter": {"merge": False}}


def serving(
    form: str, place: Path, name: str, make_llama: Callable[..., LlamaForCausalLM], out: str = "out"
) -> tuple[str, str]:
    """SERVING.md of an export to a folder `out`, for a target, or of an adapter for a base, in a folder of this name;
    and that folder."""
    tokenizer = train_bpe(["some words of a text, other words"], VOCAB, ("<pad>", "</s>"))
    target = place / name
    model = make_llama(VOCAB, 1, **SIZES)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    kind = "drafter" if form == "adapter" else FORMATS[form].kind

    def write(folder: Path) -> None:
        if form == "adapter":
            wrapper = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
            wrapper.peft_config["default"].base_model_name_or_path = str(target)
            wrapper.save_pretrained(folder)
        elif kind == "drafter":
            make_llama(VOCAB, 2, **SIZES).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        elif kind == "heads":
            save_heads(PredictionHeads.from_lm_head(model.lm_head.weight.detach().clone(), 3, 1), folder, str(target))
        else:
            BigramTable.from_documents([[1, 2, 3, 1, 2], [3, 3, 1]], VOCAB).save(folder)

    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    about |= {"target": {"id": str(target)}, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    save_artifact(place / "artifact", kind=kind, write=write, vocab_size=VOCAB, **about)
    shutil.copyfile(CONVERTER, place / "convert_hf_to_gguf.py")
    options = {"llama_cpp": place} if form == "gguf" else MORE.get(form, {})
    chosen = "transformers" if form == "adapter" else form
    export_artifact(place / "artifact", chosen, place / out, FORMATS, ExportOptions(**options))
    return (place / out / SERVING_FILE).read_text(), str(target)


def parsed(text: str) -> list[Token]:
    tokens = MarkdownIt("commonmark", {"html": True}).parse(text)
    return [each for token in tokens for each in (token, *(token.children or ())) if each.type != "text"]


def constants(code: str, name: str) -> str:
    """A program as it is read, with another name for a model of this one."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = node.value.replace(name, "NAME")
    return ast.dump(tree)


def commands(code: str, name: str) -> list[str]:
    """What a shell would run, argument by argument."""
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", PRINT + code], capture_output=True, check=False, env=env, cwd="/")
    return [*done.stdout.decode().replace(name, "NAME").split("\x00"), done.stderr.decode()]


@pytest.mark.parametrize("form", [*FORMATS, "adapter"])
def test_a_name_is_no_code_and_no_markdown(
    form: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    plain, good = serving(form, tmp_path / "one", "model", make_llama)
    text, evil = serving(form, tmp_path / "two", EVIL, make_llama)
    known, found = parsed(plain), parsed(text)
    assert [token.type for token in known] == [token.type for token in found]
    assert not {"html_block", "html_inline"} & {token.type for token in found}
    fences = [(one, other) for one, other in zip(known, found, strict=True) if one.type == "fence"]
    assert fences
    named = 0
    for one, other in fences:
        assert one.info == other.info
        reader = constants if one.info == "python" else commands
        assert reader(one.content, good) == reader(other.content, evil)
        named += "NAME" in str(reader(one.content, good))
    assert named == 0 if form in ("npz", "llama-ngrams", "medusa-pt", "medusa-2") else named > 0
    assert "\u202e" not in text


def named_in(text: str, folder: str) -> int:
    """How often the commands and programs in a text name a folder, or a file in it."""
    found: list[str] = []
    for block in parsed(text):
        if block.type == "fence" and block.info == "python":
            values = [one.value for one in ast.walk(ast.parse(block.content)) if isinstance(one, ast.Constant)]
            found += [value for value in values if isinstance(value, str)]
        elif block.type == "fence":
            words = commands(PRINT_PATH + block.content, "no name")
            found += [str(json.loads(word)["model"]) if word.startswith('{"') else word for word in words]
    return sum(name == folder or name.startswith(f"{folder}/") for name in found)


@pytest.mark.parametrize("form", [*FORMATS, "adapter"])
def test_a_folder_of_any_name_is_found_by_what_is_typed(
    form: str, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    plain, odd = "out", """my drafter's "out" \\ $c `d`"""
    known = named_in(serving(form, tmp_path / "one", "model", make_llama, plain)[0], plain)
    text = serving(form, tmp_path / "two", "model", make_llama, odd)[0]
    assert named_in(text, odd) == known > 0, text


@pytest.mark.parametrize("value", ["a/b", EVIL, "it's\\n\n`x`", "\x01f\x80\U000e0001😀\u2028", "`", "--option", "a b"])
def test_names_are_read_back_as_they_were(value: str) -> None:
    assert ast.literal_eval(python(value)) == value
    assert [each.content for each in parsed(span(value)) if each.type == "code_inline"] == [
        "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in value)
    ]
    arguments = commands(f"serve {shell(value)}", "no name")
    assert arguments == ["serve", f"./{value}" if value.startswith("-") else value, "END", "", ""]
    assert all(len(write(value).splitlines()) == 1 for write in (python, shell, span))
