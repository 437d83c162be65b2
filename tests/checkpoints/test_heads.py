"""Prediction heads: names, the start, the fast path, and the files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints import heads as module
from draftsmith.checkpoints.heads import CONFIG_FILE, HEADS_FILE, PredictionHeads, load_heads, save_heads
from safetensors.torch import load_file, save_file


def random_heads(
    num_heads: int = 3, num_layers: int = 2, hidden_size: int = 8, vocab_size: int = 13
) -> PredictionHeads:
    torch.manual_seed(0)
    heads = PredictionHeads(num_heads, num_layers, hidden_size, vocab_size)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


def by_hand(heads: PredictionHeads, hidden_XD: torch.Tensor) -> torch.Tensor:
    """The formula, from the state dict alone."""
    state, logits = heads.state_dict(), []
    for k in range(heads.num_heads):
        x = hidden_XD
        for layer in range(heads.num_layers):
            inner = x @ state[f"{k}.{layer}.linear.weight"].T + state[f"{k}.{layer}.linear.bias"]
            x = x + inner * torch.sigmoid(inner)
        logits.append(x @ state[f"{k}.{heads.num_layers}.weight"].T)
    return torch.stack(logits, -2)


def test_keys_are_those_of_medusa_1() -> None:
    state = random_heads(2, 2).state_dict()
    expected = {
        f"{k}.{layer}.linear.{kind}": ([8, 8] if kind == "weight" else [8])
        for k in range(2)
        for layer in range(2)
        for kind in ("weight", "bias")
    } | {f"{k}.2.weight": [13, 8] for k in range(2)}
    assert {name: list(tensor.shape) for name, tensor in state.items()} == expected


def test_heads_begin_as_the_targets_projection() -> None:
    weight_VD, hidden_BD = torch.randn(13, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    heads = PredictionHeads.from_lm_head(weight_VD, 3, 2)
    assert heads.projection(0).dtype == torch.float64
    logits_BKV = heads(hidden_BD)
    assert torch.equal(logits_BKV, (hidden_BD @ weight_VD.T)[:, None].expand(-1, 3, -1))
    assert torch.equal(heads.features(hidden_BD), hidden_BD[:, None].expand(-1, 3, -1))
    assert heads.projection(0).data_ptr() != heads.projection(1).data_ptr() != weight_VD.data_ptr()
    assert all(parameter.requires_grad for parameter in heads.parameters())


@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 8), (2, 3, 8), (1, 1, 7, 8), (0, 8)])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (3, 2), (5, 0)])
def test_fast_equals_slow_equals_the_formula(shape: tuple[int, ...], num_heads: int, num_layers: int) -> None:
    heads = random_heads(num_heads, num_layers)
    hidden_XD = torch.randn(shape)
    wanted = by_hand(heads, hidden_XD)
    slow = heads.train()(hidden_XD)
    with torch.inference_mode():
        fast = heads.eval()(hidden_XD)
    assert heads._stacked is not None
    one_by_one = torch.stack([heads.head_forward(k, hidden_XD) for k in range(num_heads)], -2)
    for found in (slow, fast, one_by_one):
        assert found.shape == (*shape[:-1], num_heads, 13)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    projected = [heads.features(hidden_XD)[..., k, :] @ heads.projection(k).T for k in range(num_heads)]
    torch.testing.assert_close(torch.stack(projected, -2), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["optimizer", "load", "cast", "data", "replace"])
def test_the_fast_path_follows_every_change(change: str) -> None:
    heads, other, hidden_BD = random_heads().eval(), PredictionHeads(3, 2, 8, 13), torch.randn(4, 8)
    with torch.inference_mode():
        before = heads(hidden_BD)
    if change == "optimizer":
        heads(hidden_BD).sum().backward()
        torch.optim.SGD(heads.parameters(), lr=0.1).step()
    elif change == "load":
        heads.load_state_dict(other.state_dict())
    elif change == "cast":
        heads, hidden_BD = heads.double(), hidden_BD.double()
        with torch.no_grad():
            heads.projection(0).mul_(2)
    elif change == "data":  # no version is counted here: evaluation mode is entered anew after training
        heads.train()
        heads.projection(1).data.mul_(2)
        heads.eval()
    else:
        heads.load_state_dict(other.state_dict(), assign=True)
    with torch.inference_mode():
        after = heads(hidden_BD)
    torch.testing.assert_close(after, by_hand(heads, hidden_BD), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after.float(), before)


def test_gradients_flow_in_evaluation_mode() -> None:
    heads = random_heads().eval()
    heads(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())


def test_large_heads_are_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STACK_LIMIT", 100)
    heads, hidden_BD = random_heads().eval(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(heads(hidden_BD), by_hand(heads, hidden_BD), rtol=1e-4, atol=1e-4)
    assert heads._stacked is None


def test_copies_are_not_pickled() -> None:
    heads = random_heads().eval()
    with torch.no_grad():
        heads(torch.randn(2, 8))
    assert pickle.loads(pickle.dumps(heads))._stacked is None


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_heads is 0, expected at least 1"):
        PredictionHeads(0, 1, 8, 13)
    with pytest.raises(ValueError, match="there is no head 3: there are 3"):
        random_heads().projection(3)


def test_saved_files_are_those_that_engines_read(tmp_path: Path) -> None:
    save_heads(random_heads(), tmp_path, "an/example-target")
    assert json.loads((tmp_path / CONFIG_FILE).read_text()) == {
        "model_type": "medusa",
        "base_model_name_or_path": "an/example-target",
        "medusa_num_heads": 3,
        "num_medusa_heads": 3,
        "medusa_num_layers": 2,
        "hidden_size": 8,
        "vocab_size": 13,
        "medusa_fc_bias": True,
        "version": "1",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, HEADS_FILE]


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_loading_gives_back_what_was_saved(tmp_path: Path, num_layers: int) -> None:
    heads = random_heads(num_layers=num_layers)
    save_heads(heads, tmp_path, "target")
    loaded = load_heads(tmp_path)
    assert not loaded.training
    assert (loaded.num_heads, loaded.num_layers, loaded.hidden_size, loaded.vocab_size) == (3, num_layers, 8, 13)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert load_heads(tmp_path, device="cpu", dtype=torch.bfloat16).projection(0).dtype == torch.bfloat16


def test_heads_are_counted_from_the_tensors_not_the_config(tmp_path: Path) -> None:
    save_heads(random_heads(), tmp_path, "target")
    config = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"medusa_num_heads": 2}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="says medusa_num_heads 2, the tensors have 3"):
        assert load_heads(tmp_path).num_heads == 3


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("1.0.linear.bias"), r"lacks 1\.0\.linear\.bias"),
        (_without("1.2.weight"), r"1\.[01]\.linear.* belongs to no head"),
        (lambda t: t.update({"0.1.weight": torch.zeros(13, 8)}), "head 0 has two projections"),
        (lambda t: t.update({"2.2.weight": torch.zeros(12, 8)}), r"2\.2\.weight is \[12, 8\], expected \[13, 8\]"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(13, 8)}),
            "lm_head.weight is not a tensor of prediction heads",
        ),
        (lambda t: [t.pop(f"{k}.2.weight") for k in range(3)], "has no projections"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    save_heads(random_heads(), tmp_path, "target")
    tensors = load_file(tmp_path / HEADS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / HEADS_FILE)
    with pytest.raises(ValueError, match=message):
        load_heads(tmp_path)


def test_files_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no heads at"):
        load_heads(tmp_path)
    (tmp_path / HEADS_FILE).write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_heads(tmp_path)
