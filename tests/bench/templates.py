"""Check which published chat templates can render prompts and training documents.

    python tests/bench/templates.py [FOLDER ...]

The templates are those of trl 1.16 and axolotl 0.19, without the `_training` variants of trl. They are read from the
unpacked wheels in FOLDER, or downloaded from the package index. Each template gets a small tokenizer with its special
tokens. Two exchanges are rendered and compared with `apply_chat_template`. Prints a Markdown table. The last line of
the output is one JSON object.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import finish
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.lint import Linter
from draftsmith.data.rendering.render import Renderer, prompt_renderer
from draftsmith.data.rendering.templates import Template, get_template, in_parts
from draftsmith.data.tokenizers import train_bpe

WHEELS = ("trl==1.16", "axolotl==0.19")
PLACES = ("trl/chat_templates", "axolotl/utils/chat_templates/templates")
TEXT = (
    "the quick brown fox asks a question and the assistant answers with words numbers 0 1 2 3 4 5 6 7 8 9 user "
    "assistant system model hello world think tool call result weather Paris London sum code def return print for in "
    "range"
)
SPECIAL = re.compile(
    r"<\|[^|<>{}'\"\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|</?(?:s|bos|eos|start_of_turn|end_of_turn|start_of_image|turn)>"
    r"|</?(?:end_of_utterance|BOS_TOKEN|EOS_TOKEN|turn\|)>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]|<\|?turn\|?>"
    r"|\[/?(?:TOOL_CALLS|TOOL_RESULTS)\]|\[\|[a-z]+\|\]"
)
TURNS = (Turn("user", "hello world"), Turn("assistant", "the answer"), Turn("user", "1 2"), Turn("assistant", "3"))


def fetched(folder: Path) -> Path:
    """Download and unpack the wheels into the folder, and return it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def outcomes(folders: list[Path]) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of each template, whether its prompts are correct, and the return value of `fault`."""
    folder_paths = [(path.partition("/")[0], folder / path) for folder in folders for path in PLACES]
    for package, file in ((package, file) for package, path in folder_paths for file in sorted(path.glob("*.jinja"))):
        if file.stem.endswith("_training"):
            continue
        text = re.sub(r"strftime_now\(([^)]*)\)", "'26 Jul 2024'", file.read_text())
        tokenizer = train_bpe([TEXT] * 20, 340, ["<pad>", "<BOS>", *sorted(set(SPECIAL.findall(text))), "<EOS>"])
        tokenizer.bos_token, tokenizer.chat_template = "<BOS>", text
        template = get_template("tokenizer", tokenizer)
        render = prompt_renderer(template, tokenizer)
        is_correct = all(render(TURNS[:k]) == served(tokenizer, template, k, prompt=True) for k in (1, 3))
        yield f"{package}/{file.stem}", is_correct, fault(tokenizer, template)


def served(tokenizer: Any, template: Template, turns: int, *, prompt: bool) -> list[int]:
    """Return transformers' token ids for the first `turns` turns; `prompt` adds the start of the next answer."""
    messages: list[dict[str, Any]] = [{"role": turn.role, "content": turn.text} for turn in TURNS[:turns]]
    messages = in_parts(messages) if template.parts else messages
    options = {"add_generation_prompt": prompt, "return_dict": False, "date_string": "26 Jul 2024"}
    return list(tokenizer.apply_chat_template(messages, **options))


def fault(tokenizer: Any, template: Template) -> str:
    """Return the reason why rendered training documents are wrong, or "" if they are correct."""
    try:
        docs = list(Renderer(template, tokenizer, None)([Conversation("c", TURNS)]))
    except ValueError as error:
        return str(error)
    equal = all(doc.ids.tolist() == served(tokenizer, template, 2 * doc.last + 2, prompt=False) for doc in docs)
    faults = [problems for doc in docs if (problems := Linter(tokenizer, template).check(doc))]
    return "" if equal and not faults and sum(len(doc.spans) for doc in docs) == 2 else f"{faults or 'different ids'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with unpacked wheels")
    folders = parser.parse_args().folders
    with tempfile.TemporaryDirectory() as folder:
        rows = list(outcomes(folders or [fetched(Path(folder))]))
    print("| template | prompts | training |\n|---|---|---|")
    for name, prompts, reason in rows:
        print(f"| {name} | {'yes' if prompts else 'no'} | {f'no: {reason}' if reason else 'yes'} |")
    finish({"templates": len(rows), "prompts": sum(p for _, p, _ in rows), "training": sum(not w for *_, w in rows)})


if __name__ == "__main__":
    main()
