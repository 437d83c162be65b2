"""Heads in the layouts in which FasterDecoding publishes them, written from a module built as theirs is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import CONFIG_FILE, HEADS_FILE, load_heads
from draftsmith.checkpoints.storage.names import PICKLED_FILE
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

HIDDEN, VOCAB, HEADS = 32, 24, 5
State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.act = nn.SiLU()

    def forward(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD + self.act(self.linear(hidden_XD))


class Published(nn.Module):
    """A list of sequences: blocks, one of them used several times where `shared`; own projections in version 1."""

    def __init__(self, target: LlamaForCausalLM, version: int = 1, layers: int = 1, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.num_heads, self.lm_head = HEADS, [target.lm_head] if version == 2 else []
        self.medusa_head = nn.ModuleList()
        for _ in range(HEADS):
            blocks = [Block()] * layers if shared else [Block() for _ in range(layers)]
            tails = [nn.Linear(HIDDEN, VOCAB, bias=False)] if version == 1 else []
            self.medusa_head.append(nn.Sequential(*blocks, *tails))
            if version == 1:  # near the target's, so that some of what they propose is accepted
                tails[0].weight.data = target.lm_head.weight.data + 0.03 * torch.randn(VOCAB, HIDDEN)
        self.to(target.dtype).eval()

    def forward(self, hidden_XD: Tensor) -> Tensor:
        logits = [head(hidden_XD) for head in self.medusa_head]
        return torch.stack([self.lm_head[0](each) for each in logits] if self.lm_head else logits, -2)


def write_config(folder: Path, **values: Any) -> None:
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (folder / CONFIG_FILE).write_text(json.dumps(config | values))


def write_pickled(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    torch.save(state, folder / PICKLED_FILE)
    write_config(folder)


def write_safetensors(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / HEADS_FILE)
    write_config(folder)


def whole(state: State, target: LlamaForCausalLM) -> State:
    return target.state_dict() | {f"medusa_head.{name}": tensor.clone() for name, tensor in state.items()}


def write_whole(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    target.config.save_pretrained(folder)
    save_file(whole(state, target), folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(
    state: State, target: LlamaForCausalLM, folder: Path, kind: str = "model", end: str = "safetensors"
) -> None:
    """The heads go over two of three shards, head 1 over both; in the first there is none."""
    target.config.save_pretrained(folder)
    tensors = whole(state, target)
    heads = sorted(name for name in tensors if name.startswith("medusa_head."))
    cut = heads.index("medusa_head.1.0.linear.weight")
    parts = [[name for name in tensors if name not in heads], heads[:cut], heads[cut:]]
    places = {}
    for number, names in enumerate(parts, 1):
        shard = f"{kind}-0000{number}-of-00003.{end}"
        chosen = {name: tensors[name] for name in names}
        save_file(chosen, folder / shard) if end == "safetensors" else torch.save(chosen, folder / shard)
        places |= dict.fromkeys(names, shard)
    (folder / f"{kind}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_bin_shards(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    write_shards(state, target, folder, "pytorch_model", "bin")


WRITERS: dict[str, Callable[[State, LlamaForCausalLM, Path], None]] = {
    writer.__name__: writer
    for writer in (*(write_pickled, write_safetensors, write_whole, write_shards, write_bin_shards),)
}


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB, hidden_size=HIDDEN)


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize(("version", "layers", "shared"), [(1, 1, False), (1, 2, True), (2, 1, False), (2, 2, True)])
def test_published_heads_do_here_what_they_do_there(
    tmp_path: Path, target: LlamaForCausalLM, layout: str, version: int, layers: int, shared: bool
) -> None:
    published = Published(target, version, layers, shared)
    WRITERS[layout](published.medusa_head.state_dict(), target, tmp_path)
    if layers == 2 and (tmp_path / CONFIG_FILE).exists():
        write_config(tmp_path, medusa_num_layers=2)
    loaded = load_heads(tmp_path, unpickle=True, lm_head=target.lm_head.weight.detach())
    assert (loaded.num_heads, loaded.num_layers, loaded.vocab_size) == (HEADS, layers, VOCAB)
    assert loaded.projection_kind == ("own" if version == 1 else "target")
    assert loaded.states == "after-norm"
    hidden_BTD = torch.randn(2, 3, HIDDEN)
    with torch.no_grad():
        wanted = published(hidden_BTD)
        torch.testing.assert_close(loaded(hidden_BTD), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(loaded(hidden_BTD), published(hidden_BTD))
    with torch.no_grad():  # each block is one of its own now
        loaded.get_parameter("1.0.linear.weight").zero_()
    assert torch.equal(loaded(hidden_BTD)[..., 0, :], wanted[..., 0, :])
    assert layers == 1 or bool(loaded.get_parameter("1.1.linear.weight").any())


def test_heads_are_counted_and_a_wrong_config_is_reported(tmp_path: Path, target: LlamaForCausalLM) -> None:
    published = Published(target, layers=2)
    write_safetensors(published.medusa_head.state_dict(), target, tmp_path)
    write_config(tmp_path, medusa_num_heads=2, num_medusa_heads=3, medusa_num_layers=1, vocab_size=VOCAB + 1)
    with pytest.warns(UserWarning, match="tensors") as warned:
        loaded = load_heads(tmp_path)
    assert [str(warning.message).partition("says ")[2].partition(":")[0] for warning in warned] == [
        "medusa_num_heads 2, the tensors have 5",
        "num_medusa_heads 3, the tensors have 5",
        "medusa_num_layers 1, the tensors have 2",
        f"vocab_size {VOCAB + 1}, the tensors have {VOCAB}",
    ]
    hidden_BD = torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden_BD), published(hidden_BD))


def test_blocks_that_safetensors_has_written_once_are_found_under_every_name(
    tmp_path: Path, target: LlamaForCausalLM
) -> None:
    published = Published(target, layers=3, shared=True)
    save_model(published.medusa_head, str(tmp_path / HEADS_FILE))
    with safe_open(tmp_path / HEADS_FILE, framework="pt") as opened:
        assert len(list(opened.keys())) == HEADS * 3  # weight, bias, projection
    hidden_BD = torch.randn(4, HIDDEN)
    assert torch.equal(load_heads(tmp_path)(hidden_BD), published(hidden_BD))
