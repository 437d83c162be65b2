"""Heads in the layouts published by FasterDecoding, and invalid files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.files import CONFIG_FILE, HEADS_FILE, PredictionHeads, load_heads, save_heads
from draftsmith.checkpoints.heads.layouts import holds_heads
from draftsmith.checkpoints.storage.names import PICKLED_FILE
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
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
    """Prediction heads in the published layout. Heads may share blocks; only version 1 has own projections."""

    def __init__(self, target: LlamaForCausalLM, version: int = 1, layers: int = 1, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.num_heads, self.lm_head = HEADS, [target.lm_head] if version == 2 else []
        self.medusa_head = nn.ModuleList()
        for _ in range(HEADS):
            blocks = [Block()] * layers if shared else [Block() for _ in range(layers)]
            tails = [nn.Linear(HIDDEN, VOCAB, bias=False)] if version == 1 else []
            self.medusa_head.append(nn.Sequential(*blocks, *tails))
            if version == 1:  # similar to the target's, so that some tokens are accepted
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


def whole_model_state(state: State, target: LlamaForCausalLM) -> State:
    return target.state_dict() | {f"medusa_head.{name}": tensor.clone() for name, tensor in state.items()}


def write_whole(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    target.config.save_pretrained(folder)
    save_file(whole_model_state(state, target), folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(state: State, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the heads to two of three shards, with head 1 in both."""
    target.config.save_pretrained(folder)
    tensors = whole_model_state(state, target)
    heads = sorted(name for name in tensors if name.startswith("medusa_head."))
    cut = heads.index("medusa_head.1.0.linear.weight")
    parts = [[name for name in tensors if name not in heads], heads[:cut], heads[cut:]]
    places = {}
    for number, names in enumerate(parts, 1):
        shard = f"model-0000{number}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        places |= dict.fromkeys(names, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


WRITERS: dict[str, Callable[[State, LlamaForCausalLM, Path], None]] = {
    writer.__name__: writer for writer in (write_pickled, write_safetensors, write_whole, write_shards)
}


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB, hidden_size=HIDDEN)


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize(("version", "layers", "shared"), [(1, 1, False), (1, 2, True), (2, 1, False), (2, 2, True)])
def test_published_heads_compute_the_same(
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
        expected = published(hidden_BTD)
        torch.testing.assert_close(loaded(hidden_BTD), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(loaded(hidden_BTD), published(hidden_BTD))
    with torch.no_grad():  # loaded blocks are no longer shared
        loaded.get_parameter("1.0.linear.weight").zero_()
    assert torch.equal(loaded(hidden_BTD)[..., 0, :], expected[..., 0, :])
    assert layers == 1 or bool(loaded.get_parameter("1.1.linear.weight").any())


def test_heads_are_counted_and_a_wrong_config_is_reported(tmp_path: Path, target: LlamaForCausalLM) -> None:
    published = Published(target, layers=2)
    write_safetensors(published.medusa_head.state_dict(), target, tmp_path)
    write_config(tmp_path, medusa_num_heads=2, num_medusa_heads=3, medusa_num_layers=1, vocab_size=VOCAB + 1)
    with pytest.warns(UserWarning, match="tensors") as warned:
        loaded = load_heads(tmp_path)
    assert [str(warning.message).partition(" has ")[2].partition(", which")[0] for warning in warned] == [
        "medusa_num_heads 2, but the tensors have 5",
        "num_medusa_heads 3, but the tensors have 5",
        "medusa_num_layers 1, but the tensors have 2",
        f"vocab_size {VOCAB + 1}, but the tensors have {VOCAB}",
    ]
    hidden_BD = torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden_BD), published(hidden_BD))


def test_shared_blocks_are_found_under_every_name(tmp_path: Path, target: LlamaForCausalLM) -> None:
    published = Published(target, layers=3, shared=True)
    save_model(published.medusa_head, str(tmp_path / HEADS_FILE))
    with safe_open(tmp_path / HEADS_FILE, framework="pt") as file:
        assert len(list(file.keys())) == HEADS * 3  # weight, bias, projection
    hidden_BD = torch.randn(4, HIDDEN)
    assert torch.equal(load_heads(tmp_path)(hidden_BD), published(hidden_BD))


INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def refused(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - all its parts are compared
        call()
    for part in parts:
        assert part in str(caught.value)


def heads(projection: str = "own") -> PredictionHeads:
    torch.manual_seed(0)
    module = PredictionHeads(3, 2, 8, 13, projection)
    return module.attach(torch.randn(13, 8)) if projection == "target" else module


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: PredictionHeads(0, 1, 8, 13), ("num_heads", "0", "1")),
        (lambda: PredictionHeads(1, 1, 8, 13, "lowrank"), ("projection", "lowrank", "low-rank")),
        (lambda: PredictionHeads(1, 1, 8, 13, "low-rank"), ("rank", "0", "1 to 8")),
        (lambda: heads().attach(torch.zeros(13, 8)), ("own",)),
        (lambda: heads("target").attach(torch.zeros(12, 8)), ("[12, 8]", "[13, 8]")),
        (lambda: heads().propose(torch.tensor([1])), ("d2t", "own")),
        (lambda: heads("target").propose(torch.tensor([3, 1])), ("ascending",)),
        (lambda: PredictionHeads(1, 1, 8, None, "target")(torch.zeros(2, 8)), ("attach",)),
    ],
)
def test_settings_and_uses_of_heads(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    refused(call, parts)


def test_heads_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_heads(heads(), tmp_path, "target")
    tensors = load_file(tmp_path / HEADS_FILE)
    tensors["1.2.weight"][3, 3] = float("nan")
    save_file(tensors, tmp_path / HEADS_FILE)
    refused(lambda: load_heads(tmp_path), (str(tmp_path), "1.2.weight"))


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        (torch.zeros(13, 7), ("1.2.weight", "[13, 7]", "[13, 8]")),
        (torch.zeros(13, 8, device="meta"), ("1.2.weight", "104 of 104")),
        (torch.eye(13, 8, dtype=torch.float16) * 1e6, ("1.2.weight", "8 of 104")),
        (None, ("1.2.weight",)),
    ],
)
def test_invalid_heads_are_not_saved(tmp_path: Path, tensor: Any, parts: tuple[str, ...]) -> None:
    module = heads()
    state = module.state_dict() | {"1.2.weight": tensor}
    if tensor is None:
        refused(lambda: save_heads(module, tmp_path / "more", "target", state | {"3.2.weight": tensor}), ("2.weight",))
        del state["1.2.weight"]
    refused(lambda: save_heads(module, tmp_path / "given", "target", state), parts)
    assert list(tmp_path.iterdir()) == []


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: [tensors.pop(each) for each in list(tensors) if name in each]


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


TENSORS: list[tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = [
    (without("1.0.linear.bias"), ("1.0.linear.bias",)),
    (put("0.2.up.weight", 13, 2), ("0.2.down.weight",)),
    (put("2.2.weight", 12, 8), ("2.2.weight", "[12, 8]", "[13, 8]")),
    (put("1.0.linear.bias", 8, dtype=torch.int8), ("1.0.linear.bias", "int8", "float32")),
    (put("d2t", 2, dtype=torch.int64), ("d2t", "own")),
]


@pytest.mark.parametrize(("change", "parts"), TENSORS)
def test_other_tensors_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], parts: tuple[str, ...]
) -> None:
    save_heads(heads(), tmp_path, "target")
    tensors = load_file(tmp_path / HEADS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / HEADS_FILE)
    refused(lambda: load_heads(tmp_path), (HEADS_FILE, *parts))


@pytest.mark.parametrize(
    ("content", "parts"), [(b"no pickle at all", ()), ([1, 2], ("list",)), ({"0.1.weight": 3}, ("0.1.weight", "int"))]
)
def test_other_pickled_files_are_refused(tmp_path: Path, content: Any, parts: tuple[str, ...]) -> None:
    if isinstance(content, bytes):
        (tmp_path / PICKLED_FILE).write_bytes(content)
    else:
        torch.save(content, tmp_path / PICKLED_FILE)
    refused(lambda: load_heads(tmp_path, unpickle=True), (PICKLED_FILE, *parts))
    refused(lambda: load_heads(tmp_path), (PICKLED_FILE, "unpickle=True", "--unpickle"))


def in_index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content)
        (folder / INDEX).write_text(json.dumps(content))

    return edit


def points(name: str, shard: Any) -> Damage:
    return in_index(lambda content: content["weight_map"].update({f"medusa_head.{name}": shard}))


WHOLE_MODELS: list[tuple[Damage, tuple[str, ...]]] = [
    (lambda folder: (folder / "heads.safetensors").unlink(), (INDEX, "heads.safetensors")),
    (points("0.0.linear.bias", "../elsewhere.safetensors"), (INDEX, "../elsewhere.safetensors")),
    (lambda folder: (folder / "config.json").write_text('{"states": "later"}'), ("later", "after-norm")),
    (lambda folder: (folder / INDEX).unlink(), (HEADS_FILE, INDEX)),
]


@pytest.mark.parametrize(("damage", "parts"), WHOLE_MODELS)
def test_damaged_whole_models_are_refused(tmp_path: Path, damage: Damage, parts: tuple[str, ...]) -> None:
    tensors = {f"medusa_head.{name}": tensor for name, tensor in heads().state_dict().items()}
    save_file(tensors, tmp_path / "heads.safetensors")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "base.safetensors")
    places = dict.fromkeys(tensors, "heads.safetensors") | {"lm_head.weight": "base.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert load_heads(tmp_path).num_heads == 3
    assert holds_heads(tmp_path)
    damage(tmp_path)
    refused(lambda: load_heads(tmp_path), parts)
