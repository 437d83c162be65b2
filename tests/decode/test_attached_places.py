"""Saved methods where others find them: on the hub, and beside a model that transformers serves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode import CustomGenerate, method
from draftsmith.decode.custom_generate.export import ATTACHED_FORMATS
from transformers import LlamaForCausalLM

VOCAB = 64
REPO = "somebody/method"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ASKED = [{"role": "user", "content": "What does the token do?"}]
PATIENCE = 120.0


def some_table(vocab_size: int = VOCAB) -> BigramTable:
    return BigramTable.from_documents([np.random.default_rng(0).integers(0, vocab_size, 3000)], vocab_size)


def exported(folder: Path) -> None:
    about: dict[str, Any] = {key: {} for key in ("shapes", "recipe", "data", "training")}
    about |= {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None}
    save_artifact(folder.with_name("table"), kind="table", write=some_table().save, **about)
    formats = {form.name: form for form in ATTACHED_FORMATS}
    export_artifact(folder.with_name("table"), "custom-generate-bigrams", folder, formats)


@pytest.mark.parametrize("kind", ["saved", "exported"])
def test_a_method_is_loaded_from_the_hub(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    stand_in: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    folder = tmp_path / "mine"
    if kind == "exported":
        exported(folder)
    else:
        method("speculative", drafter=drafter, gamma=2).save_pretrained(folder)
    ids = torch.tensor([[1, 2, 3]])
    with stand_in.running_hub() as hub:
        stand_in.point_client(hub.url, tmp_path / "home", monkeypatch)
        first = hub.repo(REPO, stand_in.files_of(folder)).at("main")
        loaded = [CustomGenerate.from_pretrained(REPO), CustomGenerate.from_pretrained(REPO, revision=first)]
        loaded.append(CustomGenerate.from_pretrained(f"{REPO}@{first}"))
        with pytest.raises(ValueError, match="has no such branch, tag or commit"):
            CustomGenerate.from_pretrained(REPO, revision="elsewhere")
        with pytest.raises(ValueError, match="somebody/methods on the hub is not there"):
            CustomGenerate.from_pretrained("somebody/methods")
    plain = target.generate(ids, max_new_tokens=12).tolist()
    for custom in loaded:
        assert custom.options["gamma"] == 2
        assert target.generate(ids, max_new_tokens=12, custom_generate=custom).tolist() == plain


def test_a_reader_finds_one_saved_method_or_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    customs = [method("bigram", table=some_table(VOCAB + gamma), gamma=gamma) for gamma in (2, 3)]
    customs[0].save_pretrained(folder)
    saved = 0

    def write() -> None:
        nonlocal saved
        while not finished.is_set():
            customs[saved % 2].save_pretrained(folder)
            saved += 1

    finished = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        while saved < 30 and writer.is_alive():
            found = CustomGenerate.from_pretrained(folder)
            assert found.table is not None
            assert found.table.vocab_size == VOCAB + found.options["gamma"]
    finally:
        finished.set()
        writer.join()
    assert saved >= 30
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            ask(url)
            return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)


def test_transformers_serves_a_model_with_the_method_beside_it(
    make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    for library in ("fastapi", "uvicorn", "openai"):  # what transformers[serving] has
        pytest.importorskip(library)
    folder = tmp_path / "served"
    tokenizer = train_bpe(["The user asks and the assistant answers. What does the token do?"], 280, SPECIALS)
    tokenizer.chat_template = CHATML_JINJA
    target = make_llama(280, bos_token_id=0, eos_token_id=2)
    method("bigram", table=some_table(280)).save_pretrained(folder)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    inputs = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--trust-remote-code"]
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], env=environment, stdout=log, stderr=log
    )
    body = {"model": str(folder), "messages": ASKED, "max_tokens": 12}
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        said = answer["choices"][0]["message"]["content"]
        assert said == tokenizer.decode(plain, skip_special_tokens=True), (tmp_path / "log").read_text()
        settings = json.loads((folder / "custom_generate.json").read_text())
        (folder / "custom_generate.json").write_text(json.dumps(settings | {"method": "trigram"}))
        with pytest.raises(urllib.error.HTTPError, match="500"):  # it is the method that decodes, read anew
            ask(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()
