"""SentencePiece tokenizers: token ids for both values of `legacy`, and loss masks."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.encoding import After, PieceEncoder
from draftsmith.data.rendering.lint import Linter
from draftsmith.data.rendering.render import Renderer, prompt_renderer
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import load_tokenizer
from tokenizers import normalizers

sentencepiece = pytest.importorskip("sentencepiece")

CODE = "def f(x):\n    if x:\n        return  x\n    else:\n        return    [x,  x]\n"
TEXT = "The user asks and the assistant answers. USER: the ASSISTANT: hello there, who are you? "
# settings of a tokenizer for the space before a text
FLAGS: dict[str, dict[str, Any]] = {
    "unset": {},
    "legacy": {"legacy": True},
    "not-legacy": {"legacy": False},
    "no-prefix": {"legacy": True, "add_prefix_space": False},
    "tokenizer-json": {"legacy": True},  # with the normalizer of old conversions
}


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a BPE model like LLaMA's, with byte fallback and white-space pieces of low rank."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text((CODE + TEXT) * 30)
    spaced = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_by_whitespace": True}
    paths = {"input": str(folder / "text.txt"), "model_prefix": str(folder / "tokenizer")}
    sentencepiece.SentencePieceTrainer.train(
        **paths, **spaced, vocab_size=435, model_type="bpe", byte_fallback=True, user_defined_symbols="", minloglevel=2
    )
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    spaces = ["▁" * count for count in range(2, 17)]
    assert not {piece.piece for piece in proto.pieces} & set(spaces)
    merged = [piece for piece in proto.pieces if piece.type == 1 and len(piece.piece) > 1]
    for piece, space in zip(merged[:30:2], spaces, strict=True):
        piece.piece, piece.score = space, -1e9  # low ids but the lowest score, as in LLaMA
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    return folder / "tokenizer.model"


@pytest.fixture(params=sorted(FLAGS))
def folder(request: pytest.FixtureRequest, model_file: Path, tmp_path: Path) -> Path:
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer.model").write_bytes(model_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | FLAGS[request.param]))
    if request.param == "tokenizer-json":
        tokenizer = load_tokenizer(str(tmp_path))
        backend = tokenizer.backend_tokenizer
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
        backend.save(str(tmp_path / "tokenizer.json"))
        fast = config | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fast))
    return tmp_path


def test_indented_text_has_sentencepieces_ids(folder: Path, model_file: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    adds_space = tokenizer.tokenize("x")[0].startswith("▁")
    for text in (CODE, TEXT, "x" + " " * 13 + "y", "a\n\n\t  b", "¿qué? 你好"):
        expected = processor.encode(text) if adds_space else processor.encode("x" + text)[len(processor.encode("x")) :]
        if adds_space or processor.encode("x" + text)[: len(processor.encode("x"))] == processor.encode("x"):
            assert tokenizer(text, add_special_tokens=False).input_ids == expected


def test_masks_are_right_and_prompts_are_prefixes(folder: Path, chats: list[Conversation]) -> None:
    tokenizer = load_tokenizer(str(folder))
    code = Conversation(
        "code", (Turn("user", "  " + CODE), Turn("assistant", CODE), Turn("user", "x"), Turn("assistant", " x"))
    )
    for name in ("vicuna-v1.1", "llama-2-chat", "alpaca", "plain"):
        template = get_template(name)
        linter = Linter(tokenizer, template)
        for chat, document in zip([*chats, code], Renderer(template, tokenizer, None)([*chats, code]), strict=True):
            linter.check(document)
            users = [position for position, turn in enumerate(chat.turns) if turn.role == "user"]
            for (start, _), position in zip(document.spans, users, strict=True):
                prompt = prompt_renderer(template, tokenizer)(chat.turns[: position + 1])
                assert prompt == document.ids[:start].tolist()
        assert linter.report.clean == linter.report.documents == len(chats) + 1, linter.report.summary()


@pytest.mark.parametrize("with_added_token", [False, True])
def test_ids_equal_those_of_sentencepiece(folder: Path, chats: list[Conversation], with_added_token: bool) -> None:
    tokenizer = load_tokenizer(str(folder))
    if with_added_token:
        tokenizer.add_tokens(["<tool>"])
    fast, plain = PieceEncoder(tokenizer, own=True), PieceEncoder(tokenizer)
    plain._pieces = None
    odd = ["use the <tool> here", CODE, " " + CODE, "", " ", "▁x", " ▁", "\x00", "é"]
    texts = [turn.text for chat in chats for turn in chat.turns] + odd
    for after in After:
        one, other = fast.encode(texts, [after] * len(texts)), plain.encode(texts, [after] * len(texts))
        assert one[0].tolist() == other[0].tolist()
        assert one[1].tolist() == other[1].tolist()
    if not with_added_token and "add_prefix_space" not in (folder / "tokenizer_config.json").read_text():
        assert fast._pieces is not None, "the fast path was not used"
