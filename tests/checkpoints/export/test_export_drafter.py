"""Drafters in the forms of transformers, vLLM, SGLang and llama.cpp: read back as they would, and every fault found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact, tokenizer_fingerprint, verify_artifact
from draftsmith.checkpoints.export import drafter as export_drafter
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.export.drafter import ASSISTANT
from draftsmith.checkpoints.export.engines import DRAFT_MODEL
from draftsmith.checkpoints.export.gguf import GGUF, read_gguf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 48
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FORMATS = {form.name: form for form in (ASSISTANT, DRAFT_MODEL, GGUF)}
CONVERTER = Path(__file__).parents[1] / "gguf_converter.py"
Make = Callable[..., Path]


def tokenizer_of(words: int = VOCAB - 2, swapped: bool = False) -> PreTrainedTokenizerFast:
    names = [f"w{number}" for number in range(words)]
    if swapped:
        names[5], names[6] = names[6], names[5]
    vocab = {"<s>": 0, "</s>": 1} | {name: number + 2 for number, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture
def target(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    make_llama(VOCAB, 1, **SIZES).save_pretrained(tmp_path / "target")
    tokenizer_of().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def save(tmp_path: Path, target: Path) -> Callable[..., Path]:
    """A function that writes an artifact of kind drafter from what `write` puts there."""

    def build(write: Callable[[Path], Any], tokenizer: Any = None, named: bool = True, vocab_size: int = VOCAB) -> Path:
        def write_all(folder: Path) -> None:
            write(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            (folder / "recipe.yaml").write_text("kind: drafter\n")

        about: dict[str, Any] = {name: {} for name in ("shapes", "recipe", "data", "training")}
        about |= {"vocab_size": vocab_size, "target": {"id": str(target)} if named else None}
        about["tokenizer_fingerprint"] = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        save_artifact(tmp_path / "drafter", kind="drafter", write=write_all, **about)
        return tmp_path / "drafter"

    return build


@pytest.fixture
def make(save: Callable[..., Path], make_llama: Callable[..., LlamaForCausalLM]) -> Make:
    """A function that writes an artifact of a random Llama."""

    def build(dtype: torch.dtype = torch.float32, also: Any = None, words: int = VOCAB - 2, **overrides: Any) -> Path:
        swapped, bare = overrides.pop("swapped", False), overrides.pop("bare", False)
        vocab_size = overrides.pop("vocab_size", VOCAB)
        model = make_llama(vocab_size, 2, **(SIZES | overrides)).to(dtype)

        def write(folder: Path) -> None:
            model.save_pretrained(folder)
            if also is not None:
                also(folder)

        return save(write, None if bare else tokenizer_of(words, swapped), vocab_size=vocab_size)

    return build


@pytest.fixture
def adapter(save: Callable[..., Path], make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Make:
    """A function that writes an artifact of a LoRA adapter, and its base to `base`."""

    def build(dtype: torch.dtype = torch.float32) -> Path:
        make_llama(VOCAB, 4, **SIZES).to(dtype).save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        wrapper = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in wrapper.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.3)
        wrapper.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        return save(wrapper.save_pretrained, tokenizer_of())

    return build


def export(artifact: Path, form: str, **options: Any) -> tuple[Path, str]:
    """The folder, and what was found equal."""
    out = artifact.with_name(f"exported-{form}")
    lines = export_artifact(artifact, form, out, FORMATS, ExportOptions(**options))
    assert verify_artifact(out).export
    if (out / "tokenizer_config.json").is_file():
        assert '"PreTrainedTokenizerFast"' in (out / "tokenizer_config.json").read_text(), "as older readers take it"
    return out, "\n".join(lines)


def refused(artifact: Path, form: str, **options: Any) -> str:
    """The message of an export that fails, and leaves nothing."""
    before = sorted(path.name for path in artifact.parent.iterdir())
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - who calls looks at the message
        export(artifact, form, **options)
    assert sorted(path.name for path in artifact.parent.iterdir()) == before
    return str(caught.value)


def served(out: Path) -> dict[str, Any]:
    """What the Python in SERVING.md leaves, run as it stands there."""
    code = (out / SERVING_FILE).read_text().partition("```python\n")[2].partition("```")[0]
    values: dict[str, Any] = {}
    exec(code.replace(f'"{out.name}"', repr(str(out))).replace("Question", "w1 w2"), values)
    return values


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None] % VOCAB).logits.float()


def test_an_assistant_carries_its_settings_and_changes_no_answer(make: Make, target: Path) -> None:
    artifact = make()
    out, said = export(artifact, "transformers", speculative_tokens=3)
    drafter = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(drafter), logits(AutoModelForCausalLM.from_pretrained(artifact)))
    settings = GenerationConfig.from_pretrained(out)
    assert settings.num_assistant_tokens == drafter.generation_config.num_assistant_tokens == 3
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0
    assert f"greedy decoding of the target {target} with and without it" in said
    assert "all 21 tensors, bit by bit" in said
    assert not (out / "recipe.yaml").exists()
    values = served(out)
    alone = values["target"].generate(**values["inputs"], max_new_tokens=12, do_sample=False)
    assert torch.equal(values["answer"][:, : alone.shape[1]], alone)
    assert export(artifact, "transformers")[0] == out, "an earlier export of the same form is replaced"
    assert GenerationConfig.from_pretrained(out).num_assistant_tokens == 4


def test_it_drafts_as_many_tokens_as_it_says(make: Make, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = export(make(), "transformers", speculative_tokens=3)
    model = AutoModelForCausalLM.from_pretrained(target)
    widths = []
    good = LlamaForCausalLM.forward

    def watch(self: Any, input_ids: Any = None, **named: Any) -> Any:
        if self is model:
            widths.append(input_ids.shape[1])
        return good(self, input_ids, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watch)
    ids = torch.tensor([[3, 9, 4]])
    drafter = AutoModelForCausalLM.from_pretrained(out)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, max_new_tokens=12, do_sample=False
    )
    assert max(widths[1:]) == 4, "three drafted tokens and the one before them"


def test_without_its_target_that_part_is_left_out(save: Callable[..., Path], make: Make, target: Path) -> None:
    shutil.rmtree(target)
    _, said = export(make(), "transformers")
    assert f"not compared: greedy decoding with the target, as the target {target} is no folder here" in said
    assert "configuration of" in refused(make(), "transformers", target=str(target))


def test_a_target_of_another_vocabulary_is_refused(make: Make, target: Path) -> None:
    said = refused(make(vocab_size=VOCAB + 8), "transformers")
    assert f"has a vocabulary of {VOCAB + 8} tokens, the target {target} of {VOCAB}" in said
    assert f"draftsmith doctor {target}" in said


def test_an_encoder_decoder_assists_too(save: Callable[..., Path], target: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    shutil.rmtree(target)
    T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).save_pretrained(target)
    tokenizer_of().save_pretrained(target)
    artifact = save(T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).save_pretrained)
    out, said = export(artifact, "transformers")
    assert "with and without it" in said
    assert AutoModelForSeq2SeqLM.from_pretrained(out).generation_config.num_assistant_tokens == 4
    values = served(out)
    assert isinstance(values["drafter"], T5ForConditionalGeneration)
    alone = values["target"].generate(**values["inputs"], max_new_tokens=128, do_sample=False)
    assert torch.equal(values["answer"], alone)


VICUNA = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1, "bos_token_id": 0, "max_length": 60}
"""What its generation_config.json says: it is loaded with a warning, and not saved where anything of it is changed."""


def vicuna(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(VICUNA))


def test_settings_that_transformers_would_not_save_stay(make: Make, adapter: Make, tmp_path: Path) -> None:
    out, said = export(make(also=vicuna), "transformers", speculative_tokens=3)
    assert "with and without it" in said
    assert json.loads((out / "generation_config.json").read_text()) == VICUNA | export_drafter.speculation(3)
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.top_p == 0.6
    artifact = adapter()
    vicuna(tmp_path / "base")
    out, _ = export(artifact, "transformers")
    assert json.loads((out / "generation_config.json").read_text()).items() >= VICUNA.items()
    settings = [folder / "generation_config.json" for folder in (tmp_path / "base", out)]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    saved.save_pretrained(tmp_path / "base")  # as training does, which says how to draft after that
    export_drafter.save_speculation(tmp_path / "base")
    assert GenerationConfig.from_pretrained(settings[0].parent).num_assistant_tokens == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"dtype": "bogus"},
        {"num_hidden_layers": 10**9},
    ],
)
@pytest.mark.parametrize("form", ["transformers", "vllm-sglang"])
def test_a_configuration_of_nothing_is_one_refusal(form: str, change: dict[str, Any], make: Make) -> None:
    artifact = make(also=edit_config(**change))
    assert str(artifact.parent) in refused(artifact, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged(dtype: torch.dtype, adapter: Make, tmp_path: Path) -> None:
    out, said = export(adapter(dtype), "transformers")
    assert "with the adapter merged" in said
    assert "with those of the model with the adapter beside it, to within" in said
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == dtype
    assert not (out / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    apart = PeftModel.from_pretrained(base, str(tmp_path / "drafter"))
    difference = (logits(merged) - logits(apart)).abs().max() / logits(apart).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 1e-1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(merged) - logits(plain)).abs().max() > 0.1


def test_an_adapter_stays_apart(adapter: Make, tmp_path: Path) -> None:
    artifact = adapter()
    out, said = export(artifact, "transformers", merge=False)
    assert "all 8 tensors of the adapter, bit by bit" in said
    assert "with and without it" in said
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (artifact, out))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())
    assert not (out / "model.safetensors").exists()
    text = (out / SERVING_FILE).read_text()
    assert f"a LoRA adapter for `{tmp_path / 'base'}`, which must be there" in text
    assert served(out)["drafter"].generation_config.num_assistant_tokens == 4


def test_adapters_that_cannot_be_used_say_why(adapter: Make, make: Make, tmp_path: Path) -> None:
    for merge in (True, False):
        assert f"{'--merge' if merge else '--no-merge'} is for LoRA" in refused(make(), "transformers", merge=merge)
    artifact = adapter()
    shutil.rmtree(tmp_path / "base")
    assert f"no language model could be loaded from {tmp_path / 'base'}" in refused(artifact, "transformers")


def test_a_merge_that_is_wrong_is_found(adapter: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are merged alike: only the model with the adapter beside it can tell."""
    good = export_drafter.with_adapter

    def forget(folder: Path, *, merged: bool) -> Any:
        return export_drafter.load_drafter(export_drafter.base_of(folder)) if merged else good(folder, merged=False)

    artifact = adapter()
    monkeypatch.setattr(export_drafter, "with_adapter", forget)
    assert "differ from the artifact's by" in refused(artifact, "transformers")


@pytest.mark.parametrize("form", ["transformers", "vllm-sglang"])
@pytest.mark.parametrize("fault", ["a weight", "a tokenizer", "its special tokens"])
def test_a_copy_that_errs_leaves_nothing(form: str, fault: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make()
    good = shutil.copyfile

    def err(source: Path, place: Path) -> None:
        good(source, place)
        if fault == "a weight" and place.name == "model.safetensors":
            data = bytearray(place.read_bytes())
            data[-7] ^= 1
            place.write_bytes(data)
        if fault == "a tokenizer" and place.name == "tokenizer.json":
            place.write_text(place.read_text().replace('"w3"', '"ww"'))
        if fault == "its special tokens" and place.name == "tokenizer_config.json":
            place.write_text(place.read_text().replace('"eos_token"', '"no_token"'))

    monkeypatch.setattr(export_drafter.shutil, "copyfile", err)
    said = refused(artifact, form)
    assert "read back from" in said or (form == "vllm-sglang" and {"a tokenizer": "'w3'"}.get(fault, "eos") in said)


def test_an_assistant_that_changes_answers_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    good = LlamaForCausalLM.generate

    def err(self: Any, *rest: Any, assistant_model: Any = None, **named: Any) -> Any:
        found = good(self, *rest, assistant_model=assistant_model, **named)
        return found if assistant_model is None else found.flip(1)

    artifact = make()
    monkeypatch.setattr(LlamaForCausalLM, "generate", err)
    assert "decodes otherwise with" in refused(artifact, "transformers")


def test_a_draft_model_for_vllm_and_sglang(make: Make, adapter: Make, target: Path) -> None:
    out, said = export(make(), "vllm-sglang", speculative_tokens=5)
    assert f"vocabulary size, every token and the positions with those of {target}" in said
    text = (out / SERVING_FILE).read_text()
    assert '"method": "draft_model", "model": "exported-vllm-sglang", "num_speculative_tokens": 5' in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in text
    out, _ = export(adapter(), "vllm-sglang")
    assert not (out / "adapter_config.json").exists()
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors"]


def test_vllm_is_told_to_keep_one_kind_of_cache(save: Callable[..., Path], make: Make) -> None:
    """Without the flag it stops where a drafter's layers attend in two ways, as every other of Gemma 2 does."""
    config = Gemma2Config(vocab_size=VOCAB, head_dim=4, num_hidden_layers=2, **SIZES)
    assert len(set(config.layer_types)) == 2
    model = AutoModelForCausalLM.from_config(config)
    flag = " --disable-hybrid-kv-cache-manager \\\n"
    out, _ = export(save(model.save_pretrained, tokenizer_of()), "vllm-sglang")
    assert flag in (out / SERVING_FILE).read_text()
    out, _ = export(make(), "vllm-sglang")
    assert flag not in (out / SERVING_FILE).read_text()


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def mix_types(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "size": ({"vocab_size": VOCAB + 16}, [f"{VOCAB + 16}", f"{VOCAB}", "vocab_size"]),
    "token": ({"swapped": True}, ["'w5'", "'w6'", "get_vocab()"]),
    "fewer tokens": ({"words": VOCAB - 4}, ["ids are tokens of the target alone"]),
    "positions": ({"max_position_embeddings": 32}, ["64 positions", "32 positions"]),
    "no tokenizer": ({"bare": True}, ["it has no tokenizer"]),
    "code in the config": ({"also": edit_config(auto_map={"AutoModel": "x.Y"})}, ["auto_map"]),
    "code": ({"also": lambda folder: (folder / "modeling.py").write_text("")}, ["modeling.py is code"]),
    "pickled weights": ({"also": lambda folder: (folder / "pytorch_model.bin").write_text("")}, ["pytorch_model.bin"]),
    "types": ({"also": mix_types}, ["F16 and F32"]),
    "no architecture": ({"also": edit_config(architectures=3)}, ["not given"]),
    "architecture": ({"also": edit_config(architectures=["MyForCausalLM"])}, ["MyForCausalLM", "LlamaForCausalLM"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checklist_of_vllm_and_sglang(fault: str, make: Make, target: Path) -> None:
    settings, words = FAULTS[fault]
    said = refused(make(**settings), "vllm-sglang")
    for word in words:
        assert word in said
    if fault in ("size", "token", "fewer tokens", "positions"):
        assert str(target) in said
        assert f"draftsmith doctor {target}" in said
        assert "--fix" in said


def test_a_target_without_a_tokenizer_is_compared_with_nothing(make: Make, target: Path) -> None:
    for path in target.glob("*token*"):
        path.unlink()
    said = refused(make(), "vllm-sglang")
    assert "tokenizer: there are not two to compare (target: none; drafter: one)" in said
    assert str(target) in said


def test_the_target_of_a_draft_model_must_be_there(save: Callable[..., Path], make: Make, target: Path) -> None:
    def write(folder: Path) -> None:
        make()
        shutil.copytree(folder.with_name("drafter"), folder, dirs_exist_ok=True)
        (folder / "artifact.json").unlink()

    assert "does not name its target" in refused(save(write, named=False), "vllm-sglang")
    said = refused(make(), "vllm-sglang", target=f"{target}/nowhere")
    assert "there is no" in said
    assert f"{target}/nowhere" in said


def test_a_model_of_another_family_is_refused(save: Callable[..., Path]) -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    assert "BloomForCausalLM" in refused(save(model.save_pretrained, tokenizer_of()), "vllm-sglang")


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    (tmp_path / "llama cpp").mkdir()
    shutil.copyfile(CONVERTER, tmp_path / "llama cpp" / "convert_hf_to_gguf.py")
    return tmp_path / "llama cpp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gguf_by_the_users_converter(dtype: torch.dtype, make: Make, llama_cpp: Path, target: Path) -> None:
    out, said = export(make(dtype), "gguf", llama_cpp=llama_cpp)
    assert f"{VOCAB} tokens, 21 tensors" in said
    assert "all 21 tensors, bit by bit" in said
    assert f"tokens with those of {target}" in said
    names = {path.name for path in out.iterdir()}
    assert names == {"artifact.json", "README.md", "SERVING.md", "model.gguf"}
    found = read_gguf(out / "model.gguf")
    assert found.settings["llama.block_count"] == 2
    assert len(found.settings["tokenizer.ggml.scores"]) == 3
    weight = AutoModelForCausalLM.from_pretrained(out.with_name("drafter")).lm_head.weight
    assert torch.equal(found.load("output.weight"), weight)
    assert "--spec-draft-n-max 4" in (out / SERVING_FILE).read_text()


def test_tied_weights_stay_tied(make: Make, llama_cpp: Path) -> None:
    artifact = make(tie_word_embeddings=True)
    for form in FORMATS:
        out, said = export(artifact, form, **({"llama_cpp": llama_cpp} if form == "gguf" else {}))
        assert f"all {20 if form == 'gguf' else 21} tensors, bit by bit" in said
    assert "output.weight" not in read_gguf(out / "model.gguf").tensors


def test_gguf_of_an_adapter(adapter: Make, llama_cpp: Path) -> None:
    out, _ = export(adapter(), "gguf", llama_cpp=llama_cpp, speculative_tokens=7)
    assert not [path for path in out.iterdir() if path.is_dir()]
    assert "--spec-draft-n-max 7" in (out / SERVING_FILE).read_text()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fails", ["failed with exit code 1", "an architecture that it does not know", "line 39"]),
        ("writes nothing", ["left no model.gguf"]),
        ("empty", ["is not a GGUF file"]),
        ("not GGUF", ["begins with b'GGML'"]),
        ("cut off", ["before the end of"]),
        ("claims too much", ["is not a GGUF file"]),
        ("fewer tokens", [f"has {VOCAB - 1} tokens, the artifact's vocabulary {VOCAB}"]),
        ("one value", ["blk.0.attn_q.weight", "differs from the artifact's"]),
        ("one less", ["model.layers.1.mlp.up_proj.weight"]),
    ],
)
def test_a_converter_that_writes_nonsense_is_refused(
    fault: str, words: list[str], make: Make, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    said = refused(make(), "gguf", llama_cpp=llama_cpp)
    for word in words:
        assert word in said
    assert "line 20\n" not in said


def test_gguf_needs_a_converter_and_a_fitting_target(make: Make, llama_cpp: Path, tmp_path: Path) -> None:
    assert "say with --llama-cpp" in refused(make(), "gguf")
    said = refused(make(), "gguf", llama_cpp=tmp_path)
    assert f"there is no {tmp_path / 'convert_hf_to_gguf.py'}" in said
    said = refused(make(swapped=True), "gguf", llama_cpp=llama_cpp)
    assert "texts must be the same from id 5 on, 7 is the first that differs" in said
