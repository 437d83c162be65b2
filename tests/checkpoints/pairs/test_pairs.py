"""Target/drafter pairs with a planted difference, which must be found, judged, and repaired if possible."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, verify_artifact
from draftsmith.checkpoints.artifact.model_ref import tokenizer_fingerprint
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.repair import repair
from draftsmith.checkpoints.pairs.sides import CONSUMERS, Diagnosis, read_model_info
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

VOCAB = 300
SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>", "</s>")
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "bos_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 3,
}  # fmt: skip
ALL = set(CONSUMERS)
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = ["the draft target keeps, drops or reads a tree of tokens", "a table, fast, slow"]
    trained = train_bpe(texts, VOCAB, SPECIALS)
    trained.chat_template = CHATML_JINJA
    return trained


@pytest.fixture
def target(tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    make_llama(VOCAB, **SMALL).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """Return a copy of the target that tests may change."""
    return Path(shutil.copytree(target, tmp_path / "drafter"))


def look(target: Path, drafter: Path) -> Diagnosis:
    return examine(*(read_model_info(str(folder), load_tokenizer) for folder in (target, drafter)))


def checks(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.findings}


def outcomes(diagnosis: Diagnosis, outcome: str) -> set[str]:
    return {name for name, verdict in diagnosis.verdicts.items() if verdict.outcome == outcome}


def mend(target: Path, drafter: Path) -> tuple[Path, list[str], Diagnosis]:
    """Repair a drafter into a new folder and examine the result; the original must be unchanged."""
    sides = [read_model_info(str(folder), load_tokenizer) for folder in (target, drafter)]
    before = {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()}
    out = drafter.with_name("repaired")
    done = repair(sides[0], sides[1], out, "draftsmith doctor")
    assert {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()} == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return out, done, look(target, out)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def setting(name: str = "config.json", **values: Any) -> Change:
    return lambda folder: rewrite(folder / name, lambda settings: settings.update(values))


def state(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: rewrite(folder / "tokenizer.json", change)


def retokenized(change: Callable[[Any], object]) -> Change:
    def save(folder: Path) -> None:
        own = load_tokenizer(str(folder))
        change(own)
        own.save_pretrained(folder)

    return save


def template(text: str) -> Change:
    return retokenized(lambda own: setattr(own, "chat_template", text))


def adds_bos(text: str, number: int) -> Change:
    def change(own: Any) -> None:
        own.bos_token = text
        special = [(text, number)]
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{text} $A", special_tokens=special)

    return retokenized(change)


def change_rows(folder: Path, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply `make` to the weights of the embedding and the output layer of a model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = (model.get_input_embeddings, model.get_output_embeddings)
    new = [make(layer().weight.detach().clone()) for layer in layers]
    model.resize_token_embeddings(len(new[0]), mean_resizing=False)
    with torch.no_grad():
        for layer, weight in zip(layers, new, strict=True):
            layer().weight.copy_(weight)
    model.save_pretrained(folder)


def swap_texts(values: dict[str, Any], order: dict[int, int]) -> None:
    values["model"]["vocab"] = {text: order.get(i, i) for text, i in values["model"]["vocab"].items()}
    for token in values["added_tokens"]:
        token["id"] = order.get(token["id"], token["id"])


def reorder(folder: Path, order: dict[int, int]) -> None:
    """Exchange the ids of tokens and the corresponding rows of the model."""
    rewrite(folder / "tokenizer.json", lambda values: swap_texts(values, order))
    back = {new: old for old, new in order.items()}
    change_rows(folder, lambda rows: rows[torch.tensor([back.get(i, i) for i in range(len(rows))])])


def swapped(*ids: int) -> Change:
    return lambda folder: reorder(folder, {ids[0]: ids[1], ids[1]: ids[0]})


def loud(extra: int) -> Change:
    """Return a change that adds tokens whose large weights often make them the most likely tokens."""

    def grow(rows: torch.Tensor) -> torch.Tensor:
        noise = 6 * torch.randn(extra, rows.shape[1], generator=torch.Generator().manual_seed(1))
        return torch.cat((rows, noise))

    return lambda folder: change_rows(folder, grow)


def padded(extra: int) -> Change:
    more = lambda rows: torch.cat((rows, rows.mean(0, keepdim=True).expand(extra, -1)))  # noqa: E731
    return lambda folder: change_rows(folder, more)


def with_another_end(folder: Path) -> None:
    retokenized(lambda own: setattr(own, "eos_token", "<|im_end|>"))(folder)
    for name in ("config.json", "generation_config.json"):
        setting(name, eos_token_id=[2, 3])(folder)


def strip_before(values: dict[str, Any]) -> None:
    values["added_tokens"][1]["lstrip"] = True


def assert_equals_target(target: Path, repaired: Path) -> None:
    """Assert that a repaired drafter has the same logits as the target."""
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (target, repaired)]
    ids = torch.arange(VOCAB)[None]
    with torch.no_grad():
        expected, actual = (model(ids).logits for model in models)
    assert torch.equal(expected[..., :VOCAB], actual[..., :VOCAB])
    assert torch.equal(expected.argmax(-1), actual.argmax(-1)), "an added row is the most likely token"


def test_a_correct_pair_has_no_findings(target: Path, drafter: Path) -> None:
    template("{# the same #}" + CHATML_JINJA)(drafter)
    diagnosis = look(target, drafter)
    assert diagnosis.findings == ()
    assert outcomes(diagnosis, "works") == ALL
    json.dumps(diagnosis.as_json())


def nothing(folder: Path) -> None:
    pass


def with_a_token_more(folder: Path) -> None:
    retokenized(lambda own: own.add_tokens(["<tool>"], special_tokens=True))(folder)
    padded(1)(folder)


PLANTS: dict[str, tuple[Change, Change, set[str], set[str], str]] = {
    "too many rows for llama.cpp": (nothing, loud(129), {"vocab_size"}, ALL, "129 dropped"),
    "a padded target": (padded(20), nothing, {"vocab_size"}, ALL - {"llama.cpp"}, "20 added"),
    "a token more": (with_a_token_more, nothing, {"vocab_size", "token texts"}, ALL - {"llama.cpp"}, "1 added"),
    "two tokens swapped": (nothing, swapped(100, 150), {"token texts"}, {"sglang", "llama.cpp"}, "2 rows moved"),
    "another end": (nothing, with_another_end, {"special ids"}, set(), ""),
    "flags": (nothing, state(strip_before), {"encoding"}, set(), ""),
    "template": (nothing, template(CHATML_JINJA.replace("start", "end")), {"chat template"}, set(), ""),
    "rows and config": (nothing, setting(vocab_size=320), {"vocab_size", "rows"}, ALL, ""),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_difference_is_found_and_repaired(plant: str, target: Path, drafter: Path) -> None:
    change_target, change, expected, refusing, done = PLANTS[plant]
    change_target(target)
    change(drafter)
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == expected
    assert outcomes(diagnosis, "refused") == refusing
    repaired, repairs, after = mend(target, drafter)
    assert done in " ".join(repairs)
    assert after.findings == ()
    assert_equals_target(target, repaired)


def test_llama_cpp_compares_texts_from_id_5_on(target: Path, drafter: Path) -> None:
    rewrite(drafter / "tokenizer.json", lambda values: swap_texts(values, {1: 2, 2: 1}))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"token texts"}
    assert outcomes(diagnosis, "works") == {"llama.cpp"}
    reorder(drafter, {5: 260, 260: 5})
    assert "id 5 differs" in look(target, drafter).verdicts["llama.cpp"].reasons[0]


def as_artifact(folder: Path, tokenizer: Any) -> Path:
    about: dict[str, Any] = {"shapes": {"vocab_size": VOCAB}}
    about |= {"target": {"id": "x"}, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer), "vocab_size": VOCAB}
    artifact = folder.with_name("artifact")
    save_artifact(artifact, kind="drafter", write=lambda out: shutil.copytree(folder, out, dirs_exist_ok=True), **about)
    return artifact


def test_an_artifact_is_repaired_to_an_artifact(target: Path, drafter: Path) -> None:
    reorder(drafter, {100: 150, 150: 100})
    artifact = as_artifact(drafter, load_tokenizer(str(drafter)))
    diagnosis = look(target, artifact)
    assert checks(diagnosis) == {"token texts"}
    assert "draftsmith" in outcomes(diagnosis, "refused"), "the fingerprints differ"
    repaired, repairs, after = mend(target, artifact)
    assert after.findings == ()
    manifest = verify_artifact(repaired, "drafter")
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(str(target)))
    assert manifest.training["repairs"] == repairs
    assert manifest.command == "draftsmith doctor"
    assert_equals_target(target, repaired)
    shutil.rmtree(repaired)
    with (artifact / "model.safetensors").open("r+b") as file:
        file.write(b"\x07")
    with pytest.raises(ValueError, match="safetensors"):
        mend(target, artifact)
    assert not repaired.exists()


def test_a_manifest_of_a_different_tokenizer(target: Path, drafter: Path) -> None:
    other = load_tokenizer(str(drafter))
    other.eos_token = "<|im_end|>"
    artifact = as_artifact(drafter, other)
    diagnosis = look(target, artifact)
    assert checks(diagnosis) == {"fingerprint"}
    assert outcomes(diagnosis, "refused") == {"draftsmith"}
    with pytest.raises(ValueError, match="different tokenizer"):
        mend(target, artifact)


def test_a_drafter_without_a_tokenizer(target: Path, drafter: Path, tokenizer: Any) -> None:
    for path in (*drafter.glob("*token*"), drafter / "chat_template.jinja"):
        path.unlink()
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"tokenizer"}
    assert outcomes(diagnosis, "works but") == ALL - {"llama.cpp"}
    with pytest.raises(ValueError, match="must both have a tokenizer"):
        mend(target, drafter)
    artifact = as_artifact(drafter, tokenizer)
    assert outcomes(look(target, artifact), "works") == ALL - {"llama.cpp"}


def t5(folder: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    ids = {"eos_token_id": 3, "bos_token_id": 0, "pad_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **ids)).save_pretrained(folder)


def sliding(kind: str = "mistral", window: int = 64, **more: Any) -> Change:
    return setting(model_type=kind, architectures=None, head_dim=8, sliding_window=window, **more)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


recurrent = setting(model_type="mamba", architectures=None)
alibi = setting(model_type="bloom", architectures=None)
_FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
longrope = setting(model_type="phi3", architectures=None, original_max_position_embeddings=16, rope_parameters=_FACTORS)


RARER: dict[str, tuple[Change, Change, dict[str, str], set[str]]] = {
    "an encoder-decoder for a decoder": (nothing, t5, {"kind of model": "fault"}, ALL),
    "bos": (nothing, adds_bos("<pad>", 0), {"bos and eos around a text": "fault"}, {"llama.cpp"}),
    "positions": (nothing, setting(max_position_embeddings=32), {"context length": "weakness"}, set()),
    "recurrent state": (recurrent, recurrent, {"family": "fault"}, {"transformers"}),
    "slots for positions": (alibi, alibi, {"family": "weakness"}, set()),
    "first factors": (longrope, longrope, {"context length": "weakness"}, set()),
    "a window": (nothing, sliding(), {"context length": "weakness"}, set()),
    "a shorter window of the target": (sliding(window=32), sliding(), {}, set()),
    "no tokenizer of the target": (without_tokenizer, nothing, {"tokenizer": "fault"}, {"llama.cpp"}),
}


@pytest.mark.parametrize("case", RARER)
def test_rare_differences(case: str, target: Path, drafter: Path) -> None:
    change_target, change, expected, refusing = RARER[case]
    change_target(target)
    change(drafter)
    diagnosis = look(target, drafter)
    severities = {finding.check: finding.severity for finding in diagnosis.findings}
    assert expected.items() <= severities.items()
    assert set(severities) - set(expected) <= {"tensors", "encoding", "special ids", "context length"}
    if "tensors" not in severities:
        assert outcomes(diagnosis, "refused") == refusing
