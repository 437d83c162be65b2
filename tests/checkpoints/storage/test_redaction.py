"""Secrets are redacted in files, model cards and messages; other text is unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.card import model_card
from draftsmith.checkpoints.storage.redaction import redacted
from draftsmith.recipes.schema.evaluation import RegenerateRecipe
from draftsmith.recipes.schema.loading import dump_recipe, parse_recipe
from draftsmith.recipes.session.terminal import console, log
from draftsmith.recipes.session.typed import typed_command

SECRET = "corr3cth0rse"
SECRETS = (
    *(f"https://me:{SECRET}@h.org/x", f"https://me:p/{SECRET}@h.org/x", f"postgres://me:{SECRET}@h:5432/x"),
    *(f"https://h/x?apikey={SECRET}&a=1", f"https://h/x?a=1&X-Amz-Signature={SECRET}#b"),
    *(f"Bearer {SECRET}", f"Authorization: Basic {SECRET}", f"OPENAI_API_KEY={SECRET}"),
    *(f"say password = '{SECRET} two', please", json.dumps({"a": {"api_key": SECRET}})),
    *(f"{{token: {SECRET}, url: x}}", f"hf_{SECRET}{SECRET}", f"sk-{SECRET}{SECRET}"),
)
PLAIN = (
    *("https://h.org:8000/a@b", "http://[::1]:8000/x@y", "https://h/x?max_tokens=5&tokenizer=x&page=2", "me@h.org"),
    *("block_tokens=5, max_new_tokens: 6, eos_token: </s>", "the tokens: 7", "monkey=5, keyboard: 7", "user/name@main"),
    *("unknown key 'server.api_key'. Did you mean 'url'?", "key_variable: MY_VARIABLE", "tokenizer=me/horse"),
)


def write(folder: Path) -> None:
    (folder / "some.txt").write_text("text")


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_not_redacted(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_reaches_no_output(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"kind": "regenerate", "out": "x.jsonl", "source": text, "target": "t", "system": f"see {text}."}
    recipe = RegenerateRecipe.model_validate(values)
    about: dict[str, Any] = {
        "recipe": recipe.model_dump(),
        "data": {"source": {"options": {"source": text}}},
        "evaluation": {"why": text},
    }
    about |= {"training": {}, "target": {"id": text}, "shapes": {}, "vocab_size": 8, "tokenizer_fingerprint": None}
    manifest = save_artifact(tmp_path / "a", kind="table", write=write, **about)
    with pytest.raises(ValueError, match="'target'") as refused:
        parse_recipe(values | {"target": [text]}, "recipe.yaml", [f"system={text!r}", f"server.api_key={text}"])
    log(f"error: {text}")
    console().print(text)
    outputs = [
        *(dump_recipe(recipe), json.dumps(recipe.recorded()), model_card(manifest, text), str(refused.value)),
        *(path.read_text() for path in (tmp_path / "a").iterdir()),
        *(*capsys.readouterr(), typed_command(["draftsmith", "train", f"system={text}"], {}), redacted(redacted(text))),
    ]
    assert [output for output in outputs if output is None or SECRET in output] == []
