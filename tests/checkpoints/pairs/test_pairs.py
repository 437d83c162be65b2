"""Pairs with one planted fault each: it is named, and repaired where that can be; then the two decode losslessly."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import (
    load_manifest,
    save_artifact,
    tokenizer_fingerprint,
    verify_artifact,
)
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.repair import Repairs, repair
from draftsmith.checkpoints.pairs.sides import CONSUMERS, Diagnosis, open_side, tensor_shapes
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer, train_bpe
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, OPTConfig, OPTForCausalLM

VOCAB = 300
NEW_TOKENS = 40
SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>", "</s>")
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "bos_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 3,
}  # fmt: skip
ALL = set(CONSUMERS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_bpe(
        ["the draft target keeps, drops or reads a tree of tokens", "a table, fast, slow"], VOCAB, SPECIALS
    )
    made.chat_template = CHATML_JINJA
    return made


@pytest.fixture
def target(tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    make_llama(VOCAB, **SMALL).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """A copy of the target, in which a test plants its fault."""
    return Path(shutil.copytree(target, tmp_path / "drafter"))


def look(target: Path, drafter: Path) -> Diagnosis:
    return examine(*(open_side(str(folder), load_tokenizer) for folder in (target, drafter)))


def checks(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.findings}


def outcomes(diagnosis: Diagnosis, outcome: str) -> set[str]:
    return {name for name, verdict in diagnosis.verdicts.items() if verdict.outcome == outcome}


def mend(target: Path, drafter: Path) -> tuple[Path, Repairs, Diagnosis]:
    """Repair into a new folder, and look at the repaired pair; the drafter itself must stay as it was."""
    sides = [open_side(str(folder), load_tokenizer) for folder in (target, drafter)]
    before = {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()}
    out = drafter.with_name("repaired")
    done = repair(sides[0], sides[1], examine(*sides).findings, out, "draftsmith doctor")
    assert {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()} == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return out, done, look(target, out)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_rows(folder: Path, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the embedding and the output layer of a model by what `make` gives for each."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = (model.get_input_embeddings, model.get_output_embeddings)
    new = [make(layer().weight.detach().clone()) for layer in layers]
    model.resize_token_embeddings(len(new[0]), mean_resizing=False)
    with torch.no_grad():
        for layer, weight in zip(layers, new, strict=True):
            layer().weight.copy_(weight)
    model.save_pretrained(folder)


def reorder(folder: Path, order: dict[int, int]) -> None:
    """Give the tokens of these ids other ids, rows included: the model stays what it was, under other numbers."""
    rewrite(folder / "tokenizer.json", lambda state: state["model"].update(
        vocab={text: order.get(number, number) for text, number in state["model"]["vocab"].items()}
    ))  # fmt: skip
    back = {new: old for old, new in order.items()}
    change_rows(folder, lambda rows: rows[torch.tensor([back.get(i, i) for i in range(len(rows))])])


def decode(target: Path, drafter: Path) -> tuple[list[list[int]], list[list[int]], float]:
    """The target's greedy tokens, those of speculative decoding, and the share of drafts that was accepted."""
    models = [wrap_model(load_model(str(folder))) for folder in (target, drafter)]
    prompts = [[5, 9, 30], [200, 7, 61, 18]]
    found, counts = [], Tally()
    for name, drafts in (("autoregressive", None), ("speculative", models[1])):
        texts: list[list[int]] = [[], []]
        method = build_method(name, Parts(drafts), Sampling())
        for step in generate(models[0], *method, prompts, Limits(NEW_TOKENS), Sampling(), Rng.for_rows(0, 2)):
            for row, new in enumerate(step.new_ids):
                texts[row] += new
                if drafts is not None and step.active[row]:
                    counts.add_step(step, row)
        found.append(texts)
    return found[0], found[1], counts.accepted / counts.examined


def assisted(target: Path, drafter: Path) -> tuple[list[int], list[int], int]:
    """transformers' greedy tokens, those of its assisted generation, and how many forwards of the target these took."""
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (target, drafter)]
    prompt = torch.tensor([[5, 9, 30]])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = models[0].generate(prompt, **options)[0].tolist()
    calls: list[int] = []
    models[0].register_forward_hook(lambda *_: calls.append(1))
    return plain, models[0].generate(prompt, assistant_model=models[1], **options)[0].tolist(), len(calls)


def assert_it_is_the_target_again(target: Path, repaired: Path) -> None:
    """Lossless in both engines, and no draft is rejected."""
    greedy, speculative, accepted = decode(target, repaired)
    assert speculative == greedy
    assert accepted == 1.0
    plain, helped, forwards = assisted(target, repaired)
    assert helped == plain
    assert forwards == math.ceil(NEW_TOKENS / 5)  # four drafts and one more token each time


def test_a_sound_pair_has_no_findings(target: Path, drafter: Path) -> None:
    diagnosis = look(target, drafter)
    assert diagnosis.findings == ()
    assert outcomes(diagnosis, "works") == ALL
    json.dumps(diagnosis.plain())


def loud(rows: torch.Tensor, extra: int) -> torch.Tensor:
    """More rows, which win wherever they may."""
    noise = 6 * torch.randn(extra, rows.shape[1], generator=torch.Generator().manual_seed(1))
    return torch.cat((rows, noise))


def test_a_padded_drafter_is_trimmed(target: Path, drafter: Path) -> None:
    change_rows(drafter, lambda rows: loud(rows, 84))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"vocab_size"}
    assert "300 (300 tokens)" in diagnosis.findings[0].target
    assert "384 (300 tokens)" in diagnosis.findings[0].drafter
    assert outcomes(diagnosis, "refused") == ALL - {"llama.cpp"}
    with pytest.raises(ValueError, match="have different tokenizers"):  # as the verdicts say
        assisted(target, drafter)
    with pytest.raises(ValueError, match="they must be the same"):
        decode(target, drafter)
    repaired, done, after = mend(target, drafter)
    assert "84 rows without a token dropped" in done.done
    assert after.findings == ()
    assert_it_is_the_target_again(target, repaired)


def test_llama_cpp_minds_more_than_128_rows(target: Path, drafter: Path) -> None:
    change_rows(drafter, lambda rows: loud(rows, 129))
    assert outcomes(look(target, drafter), "refused") == ALL
    assert "by 129" in look(target, drafter).verdicts["llama.cpp"].reasons[0]


@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_is_padded_to_a_padded_target(target: Path, drafter: Path, tied: bool) -> None:
    if tied:
        for folder in (target, drafter):
            model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=True)
            model.tie_weights()
            model.save_pretrained(folder)
    change_rows(target, lambda rows: torch.cat((rows, rows.mean(0, keepdim=True).expand(20, -1))))
    assert checks(look(target, drafter)) == {"vocab_size"}
    repaired, done, after = mend(target, drafter)
    assert done.done[0].startswith("20 rows added (300 to 320)")
    assert after.findings == ()
    assert ("lm_head.weight" in tensor_shapes(str(repaired), repaired)) != tied
    assert_it_is_the_target_again(target, repaired)


def test_a_swapped_token(target: Path, drafter: Path, tokenizer: Any) -> None:
    reorder(drafter, {100: 150, 150: 100})
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"token texts"}
    (finding,) = diagnosis.findings
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    assert finding.what == "2 ids stand for other tokens, the same tokens in another order"
    assert finding.target == f"100 {texts[100]!r}, 150 {texts[150]!r}"
    assert finding.drafter == f"100 {texts[150]!r}, 150 {texts[100]!r}"
    assert outcomes(diagnosis, "refused") == {"sglang", "llama.cpp"}
    assert outcomes(diagnosis, "works but") == {"transformers", "vllm", "draftsmith"}
    repaired, done, after = mend(target, drafter)
    assert done.done[0] == "2 rows moved, so that ids mean the same tokens"
    assert after.findings == ()
    assert_it_is_the_target_again(target, repaired)


def test_rows_that_are_no_token_to_either_stay(target: Path, drafter: Path) -> None:
    for folder in (target, drafter):
        change_rows(folder, lambda rows: loud(rows, 8))
    assert look(target, drafter).findings == ()
    reorder(drafter, {100: 150, 150: 100})
    weights = [load_file(folder / "model.safetensors") for folder in (target, mend(target, drafter)[0])]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_shuffled_and_padded_vocabulary(target: Path, drafter: Path) -> None:
    plain = range(len(SPECIALS), VOCAB)
    shuffled = torch.randperm(len(plain), generator=torch.Generator().manual_seed(3)) + len(SPECIALS)
    reorder(drafter, dict(zip(plain, shuffled.tolist(), strict=True)))
    change_rows(drafter, lambda rows: loud(rows, 20))
    assert checks(look(target, drafter)) == {"token texts", "vocab_size"}
    _, _, accepted = decode(target, trimmed(drafter))
    assert accepted < 0.5, "or the repair would have nothing to do"
    repaired, _, after = mend(target, drafter)
    assert after.findings == ()
    assert_it_is_the_target_again(target, repaired)


def trimmed(folder: Path) -> Path:
    """The drafter with as many rows as the target, under its own wrong ids."""
    copy = Path(shutil.copytree(folder, folder.with_name("trimmed")))
    change_rows(copy, lambda rows: rows[:VOCAB])
    return copy


def test_llama_cpp_compares_texts_from_id_5_on(target: Path, drafter: Path) -> None:
    def swap(state: dict[str, Any]) -> None:
        order = {1: 2, 2: 1}
        state["model"]["vocab"] = {text: order.get(number, number) for text, number in state["model"]["vocab"].items()}
        for token in state["added_tokens"]:
            token["id"] = order.get(token["id"], token["id"])

    rewrite(drafter / "tokenizer.json", swap)
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"token texts"}
    assert outcomes(diagnosis, "works") == {"llama.cpp"}
    reorder(drafter, {5: 260, 260: 5})
    assert "5 is the first" in look(target, drafter).verdicts["llama.cpp"].reasons[0]


def test_a_token_that_the_drafter_lacks(target: Path, drafter: Path, tokenizer: Any) -> None:
    grown = load_tokenizer(str(target))
    grown.add_tokens(["<tool>"], special_tokens=True)
    grown.save_pretrained(target)
    change_rows(target, lambda rows: torch.cat((rows, rows.mean(0, keepdim=True))))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"vocab_size", "missing tokens"}
    assert next(one.target for one in diagnosis.findings if one.check == "missing tokens") == "300 '<tool>'"
    repaired, done, after = mend(target, drafter)
    assert done.done[0].startswith("1 rows added")
    assert after.findings == ()
    assert_it_is_the_target_again(target, repaired)


def test_other_special_ids(target: Path, drafter: Path) -> None:
    own = load_tokenizer(str(drafter))
    own.eos_token = "<|im_end|>"
    own.save_pretrained(drafter)
    for name in ("config.json", "generation_config.json"):
        rewrite(drafter / name, lambda values: values.update(eos_token_id=[2, 3]))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"special ids"}
    (finding,) = diagnosis.findings
    assert finding.what == "eos is another token"
    assert finding.target == "tokenizer 3, config 3, generation_config 3"
    assert finding.drafter == "tokenizer 2, config 2+3, generation_config 2+3"
    assert outcomes(diagnosis, "works") == {"llama.cpp"}, "neither adds one"
    repaired, _, after = mend(target, drafter)
    assert after.findings == ()
    assert json.loads((repaired / "generation_config.json").read_text())["eos_token_id"] == 3
    assert_it_is_the_target_again(target, repaired)


def test_other_flags_of_an_added_token(target: Path, drafter: Path) -> None:
    def plant(state: dict[str, Any]) -> None:
        (token,) = (one for one in state["added_tokens"] if one["content"] == "<|im_start|>")
        token["lstrip"] = True

    rewrite(drafter / "tokenizer.json", plant)
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"added tokens"}
    (finding,) = diagnosis.findings
    assert "lstrip" in finding.drafter
    assert "lstrip" not in finding.target
    assert "'<|im_start|>'" in finding.drafter
    assert mend(target, drafter)[2].findings == ()


def test_another_chat_template(target: Path, drafter: Path) -> None:
    own = load_tokenizer(str(drafter))
    own.chat_template = CHATML_JINJA.replace("<|im_start|>", "<|im_end|>")
    own.save_pretrained(drafter)
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"chat template"}
    repaired, done, after = mend(target, drafter)
    assert after.findings == ()
    assert any("stays learnt" in line for line in done.left)
    assert load_tokenizer(str(repaired)).chat_template == CHATML_JINJA


def test_a_template_that_writes_the_same_is_the_same(target: Path, drafter: Path) -> None:
    own = load_tokenizer(str(drafter))
    own.chat_template = "{# the same #}" + CHATML_JINJA
    own.save_pretrained(drafter)
    assert look(target, drafter).findings == ()


def test_a_shorter_context(target: Path, drafter: Path) -> None:
    rewrite(drafter / "config.json", lambda values: values.update(max_position_embeddings=32))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"context length"}
    assert (diagnosis.findings[0].target, diagnosis.findings[0].drafter) == ("256 positions", "32 positions")
    assert outcomes(diagnosis, "works but") == ALL
    with pytest.raises(ValueError, match="the drafter has 32 positions"):
        decode(target, drafter)
    repaired, done, after = mend(target, drafter)
    assert any("beyond 32 is not known" in line for line in done.done)
    assert after.findings == ()
    weights = "model.safetensors"
    assert (repaired / weights).read_bytes() == (drafter / weights).read_bytes(), "rows stay, so files are copied"
    assert_it_is_the_target_again(target, repaired)


@pytest.mark.parametrize("change", [
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {"model_type": "opt"},
])  # fmt: skip
def test_a_context_that_cannot_be_raised(target: Path, drafter: Path, change: dict[str, Any]) -> None:
    if change.get("model_type") == "opt":
        sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        ids = {name: SMALL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model = OPTForCausalLM(
            OPTConfig(vocab_size=VOCAB, max_position_embeddings=32, word_embed_proj_dim=16, **sizes, **ids)
        )
        model.save_pretrained(drafter)
    else:
        rewrite(drafter / "config.json", lambda values: values.update(max_position_embeddings=32, **change))
    assert checks(look(target, drafter)) == {"context length"}
    _, done, after = mend(target, drafter)
    assert checks(after) == {"context length"}
    assert any("learnt, one by one" in line or "'dynamic' change" in line for line in done.left)


def test_another_tokenizer_is_not_repaired(target: Path, drafter: Path) -> None:
    train_bpe(["quite other words than those before"] * 3, 280, ("<pad>", "</s>")).save_pretrained(drafter)
    diagnosis = look(target, drafter)
    assert {"token texts", "missing tokens", "special ids", "encoding"} <= checks(diagnosis)
    assert outcomes(diagnosis, "refused") == {"sglang", "llama.cpp"}
    _, done, after = mend(target, drafter)
    assert done.rows is None
    assert any("needs training" in line for line in done.left)
    assert "token texts" in checks(after)


def test_merges_in_another_order(target: Path, drafter: Path) -> None:
    rewrite(drafter / "tokenizer.json", lambda state: state["model"]["merges"].reverse())
    diagnosis = look(target, drafter)
    assert checks(diagnosis) <= {"encoding", "tokenizer settings"}
    assert "merges" in diagnosis.findings[0].what + diagnosis.findings[0].target
    assert mend(target, drafter)[2].findings == ()


def as_artifact(folder: Path, tokenizer: Any) -> Path:
    def write(out: Path) -> None:
        for path in folder.iterdir():
            shutil.copyfile(path, out / path.name)

    about = {name: {} for name in ("recipe", "data", "training")} | {"shapes": {"vocab_size": VOCAB}}
    place = folder.with_name("artifact")
    save_artifact(
        place, kind="drafter", write=write, vocab_size=VOCAB, target={"id": "x"},
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), **about,
    )  # fmt: skip
    return place


def test_an_artifact_is_repaired_to_an_artifact(target: Path, drafter: Path) -> None:
    reorder(drafter, {100: 150, 150: 100})
    artifact = as_artifact(drafter, load_tokenizer(str(drafter)))
    diagnosis = look(target, artifact)
    assert checks(diagnosis) == {"token texts"}
    assert "draftsmith" in outcomes(diagnosis, "refused"), "fingerprints are compared"
    repaired, done, after = mend(target, artifact)
    assert after.findings == ()
    manifest = verify_artifact(repaired, "drafter")
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(str(target)))
    assert manifest.training["repairs"] == done.done
    assert manifest.target == {"id": "x"}
    assert manifest.command == "draftsmith doctor"
    assert load_manifest(artifact).command is None
    assert_it_is_the_target_again(target, repaired)
    shutil.rmtree(repaired)
    with (artifact / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x07")
    with pytest.raises(ValueError, match=r"model\.safetensors has the hash .*delete .*artifact\.json"):
        mend(target, artifact)
    assert not repaired.exists()


def test_a_manifest_that_names_another_tokenizer(target: Path, drafter: Path) -> None:
    other = load_tokenizer(str(drafter))
    other.eos_token = "<|im_end|>"
    artifact = as_artifact(drafter, other)
    diagnosis = look(target, artifact)
    assert checks(diagnosis) == {"fingerprint"}
    assert outcomes(diagnosis, "refused") == {"draftsmith"}
    assert any("which its rows are of" in line for line in mend(target, artifact)[1].left)


def test_a_drafter_without_a_tokenizer(target: Path, drafter: Path, tokenizer: Any) -> None:
    for path in drafter.glob("*token*"):
        path.unlink()
    (drafter / "chat_template.jinja").unlink()
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"tokenizer"}
    assert outcomes(diagnosis, "works but") == ALL - {"llama.cpp"}
    assert any("is not known" in line for line in mend(target, drafter)[1].left)
    artifact = as_artifact(drafter, tokenizer)
    assert outcomes(look(target, artifact), "works") == ALL - {"llama.cpp"}
    shutil.rmtree(drafter.with_name("repaired"))
    assert mend(target, artifact)[2].findings == ()


def test_weights_and_configuration_that_disagree(target: Path, drafter: Path) -> None:
    rewrite(drafter / "config.json", lambda values: values.update(vocab_size=320))
    diagnosis = look(target, drafter)
    assert checks(diagnosis) == {"vocab_size", "rows"}
    assert outcomes(diagnosis, "refused") == ALL
    assert mend(target, drafter)[2].findings == ()


def test_nothing_is_written_over_or_without_need(target: Path, drafter: Path, tmp_path: Path) -> None:
    sides = [open_side(str(folder), load_tokenizer) for folder in (target, drafter)]
    for out, said in ((target, "one of the pair"), (drafter, "one of the pair"), (tmp_path, "exists already")):
        with pytest.raises(ValueError, match=said):
            repair(*sides, (), out, "")
    sides[1] = open_side(str(mend(target, drafter)[0]), load_tokenizer)
    with pytest.raises(ValueError, match="the two fit"):
        repair(*sides, (), tmp_path / "again", "")
    assert not (tmp_path / "again").exists()


def test_what_is_no_model_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        open_side(str(tmp_path / "nowhere"), load_tokenizer)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="LoRA adapter"):
        open_side(str(tmp_path / "adapter"), load_tokenizer)
    (tmp_path / "remote").mkdir()
    remote = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "remote" / "config.json").write_text(json.dumps(remote))
    (tmp_path / "remote" / "code.py").write_text("raise SystemExit('this was run')\n")
    with pytest.raises(ValueError, match="configuration cannot be read"):
        open_side(str(tmp_path / "remote"), load_tokenizer)


def test_pickled_weights_are_not_read(target: Path, drafter: Path) -> None:
    (drafter / "model.safetensors").unlink()
    (drafter / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch broken'\ntR.")
    assert checks(look(target, drafter)) == {"weights"}
    rewrite(drafter / "config.json", lambda values: values.update(vocab_size=320))
    sides = [open_side(str(folder), load_tokenizer) for folder in (target, drafter)]
    with pytest.raises(ValueError, match="no safetensors weights"):
        repair(*sides, (), drafter.with_name("out"), "")
    assert not drafter.with_name("out").exists()
