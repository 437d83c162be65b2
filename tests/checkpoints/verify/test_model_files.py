"""Models with pickled weights, with an index that refers to other folders, or with an invalid configuration."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export.target import output_projection
from draftsmith.checkpoints.pairs.sides import read_model_info
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.models import build_model
from draftsmith.recipes.schema.training import ModelSection
from draftsmith.train.teachers.teacher import load_teacher
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

VOCAB = 16


@pytest.fixture
def model(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB)


@pytest.fixture
def folder(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def pickle_weights(folder: Path, stem: str = "model", pickled: str = "pytorch_model.bin") -> None:
    torch.save(load_file(folder / f"{stem}.safetensors"), folder / pickled)
    (folder / f"{stem}.safetensors").unlink()


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    ids = torch.arange(8)[None] % VOCAB
    return torch.equal(one(ids).logits, other(ids).logits)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(folder: Path, **files: str) -> None:
    """Replace the weights by two shards and an index; `files` overrides the file of individual tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + (name == 'lm_head.weight')}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places | files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_pickled_weights_are_read_only_with_the_flag(
    folder: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle_weights(folder)
    message = r"pickled weights.*DRAFTSMITH_UNPICKLE=1"
    for load in (load_model, load_teacher):
        with pytest.raises(ValueError, match=message):
            load(str(folder))
    with pytest.raises(ValueError, match=message):
        build_model(ModelSection(source=str(folder)), 0)
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "yes")
    with pytest.raises(ValueError, match=message):
        load_model(str(folder))
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    assert same(load_model(str(folder)), model)


def test_a_pickled_adapter_is_read_only_with_the_flag(
    folder: Path, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    changed = get_peft_model(LlamaForCausalLM.from_pretrained(folder), config)
    changed.save_pretrained(str(tmp_path / "adapter"))
    assert not same(load_model(str(tmp_path / "adapter")), model)
    pickle_weights(tmp_path / "adapter", "adapter_model", "adapter_model.bin")
    combined = Path(shutil.copytree(folder, tmp_path / "beside"))  # transformers would load this adapter
    for path in (tmp_path / "adapter").iterdir():
        shutil.copyfile(path, combined / path.name)
    for path_to_load in (tmp_path / "adapter", combined):
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is missing; pickled"):
            load_model(str(path_to_load))
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    assert same(load_model(str(tmp_path / "adapter")), changed.merge_and_unload().eval())


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]},
    ],
)
def test_adapters_of_tied_embeddings_merge_as_in_peft(
    changed: dict[str, Any], make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    make_llama(VOCAB, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **changed)
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 4)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.arange(8)[None] % VOCAB
    expected = adapted.eval()(ids).logits
    merged = load_model(str(tmp_path / "adapter"))
    merged.save_pretrained(tmp_path / "merged")
    for loaded in (merged, load_model(str(tmp_path / "merged"))):
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_for_more_tokens_names_both_numbers(
    make_llama: Callable[..., LlamaForCausalLM], folder: Path, tmp_path: Path
) -> None:
    for changed in ({"modules_to_save": ["lm_head", "embed_tokens"]}, {}):
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"][: 2 - bool(changed)], **changed)
        adapted = get_peft_model(make_llama(VOCAB + 8), config)
        adapted.peft_config["default"].base_model_name_or_path = str(folder)
        adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
        with pytest.raises(ValueError, match=r"24 tokens.*has 16.*resize_token_embeddings\(24\).*adapter_config"):
            load_model(str(tmp_path / "adapter"))


def test_pickles_that_an_index_names_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "more.bin")
    shard(folder, **{"lm_head.weight": "more.bin"})
    with pytest.raises(ValueError, match=r"'more\.bin'"):
        load_model(str(folder))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_models_of_the_hub(
    weights: str, folder: Path, model: LlamaForCausalLM, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
    name = f"me/{weights}"  # transformers caches the files of a name
    files = {file: (folder / file).read_bytes() for file in ("config.json", "model.safetensors")}
    if weights == "pytorch_model.bin":
        buffer = io.BytesIO()
        torch.save(load_file(folder / "model.safetensors"), buffer)
        files = {"config.json": files["config.json"], weights: buffer.getvalue()}
    hub.repo(name, files)
    if weights == "pytorch_model.bin":
        with pytest.raises(ValueError, match=r"pickled weights.*DRAFTSMITH_UNPICKLE=1"):
            load_model(name)
        monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    assert same(load_model(name), model)


def test_shards_elsewhere_are_not_read(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    shard(folder, **{"lm_head.weight": f"../{other.name}/model.safetensors"})
    for read in (load_model, output_projection):
        with pytest.raises(ValueError, match=r"'\.\./other/model\.safetensors'"):
            read(str(folder))


def test_names_may_lack_their_prefix(tmp_path: Path) -> None:
    """The tensor names of opt-125m have no prefix, since the model was saved without its output layer."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        word_embed_proj_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    whole = OPTForCausalLM(config)
    whole.model.save_pretrained(tmp_path)
    assert "decoder.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(output_projection(str(tmp_path)), whole.lm_head.weight)


def test_invalid_configurations_are_refused(folder: Path) -> None:
    change(folder / "config.json", num_attention_heads=0, head_dim=None)
    with pytest.raises(ValueError, match=r"(configuration cannot be read|built from the configuration): ."):
        read_model_info(str(folder), load_tokenizer)
    with pytest.raises(ValueError, match="no language model could be loaded"):
        load_model(str(folder))


CODE = """
from pathlib import Path
Path({mark!r}).write_text("run")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
"""


@pytest.mark.parametrize("model_type", ["llama", "never-heard-of"])
def test_remote_code_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    mark = tmp_path / "mark"
    places = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": places, "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # confirm any prompt
    if model_type == "llama":
        assert isinstance(load_model(str(folder)), LlamaForCausalLM)
    else:
        with pytest.raises(ValueError, match="no language model could be loaded"):
            load_model(str(folder))
    assert not mark.exists()


def test_a_pickle_next_to_the_weights_is_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str, str]]:
            return (os.symlink, ("nothing", str(mark)))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    load_model(str(folder))
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    with pytest.raises(ValueError, match="no language model could be loaded"):
        load_model(str(folder))
    assert not mark.is_symlink()
