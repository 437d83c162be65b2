"""Prediction heads: names, initial weights, stacked evaluation, and files."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.heads import module
from draftsmith.checkpoints.heads.files import CONFIG_FILE, PredictionHeads, load_heads, save_heads

FORMS = (("own", 0), ("low-rank", 3), ("target", 0))


def random_heads(
    num_heads: int = 3, num_layers: int = 2, projection: str = "own", rank: int = 0, states: str = "after-norm"
) -> PredictionHeads:
    """Return heads for hidden size 8 and 13 tokens; attach a projection if they share the target's projection."""
    torch.manual_seed(0)
    heads = PredictionHeads(num_heads, num_layers, 8, 13, projection, rank, states)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads.attach(torch.randn(13, 8)) if projection == "target" else heads


def by_hand(heads: PredictionHeads, hidden_XD: torch.Tensor) -> torch.Tensor:
    """Compute the logits from the state dict by the formula of prediction heads."""
    state, logits = heads.state_dict(), []
    for k in range(heads.num_heads):
        x = hidden_XD
        for layer in range(heads.num_layers):
            inner = x @ state[f"{k}.{layer}.linear.weight"].T + state[f"{k}.{layer}.linear.bias"]
            x = x + inner * torch.sigmoid(inner)
        tail = f"{k}.{heads.num_layers}"
        if heads.projection_kind == "own":
            logits.append(x @ state[f"{tail}.weight"].T)
        elif heads.projection_kind == "low-rank":
            logits.append(x @ state[f"{tail}.down.weight"].T @ state[f"{tail}.up.weight"].T)
        else:
            logits.append(x @ heads.projection(k).T)
    return torch.stack(logits, -2)


def test_heads_are_initialised_with_the_targets_projection() -> None:
    weight_VD, hidden_BD = torch.randn(13, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    heads = PredictionHeads.from_lm_head(weight_VD, 3, 2)
    assert heads.projection(0).dtype == torch.float64
    logits_BKV = heads(hidden_BD)
    assert torch.equal(logits_BKV, (hidden_BD @ weight_VD.T)[:, None].expand(-1, 3, -1))
    assert torch.equal(heads.features(hidden_BD), hidden_BD[:, None].expand(-1, 3, -1))
    assert heads.projection(0).data_ptr() != heads.projection(1).data_ptr() != weight_VD.data_ptr()
    assert all(parameter.requires_grad for parameter in heads.parameters())


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize(
    ("num_heads", "num_layers", "projection", "rank"),
    [
        *((1, 1, "own", 0), (3, 2, "own", 0), (5, 0, "own", 0)),
        *((1, 1, "low-rank", 1), (3, 2, "low-rank", 5), (4, 0, "low-rank", 8)),
        *((1, 1, "target", 0), (3, 2, "target", 0)),
    ],
)
def test_stacked_heads_equal_the_formula(
    shape: tuple[int, ...], num_heads: int, num_layers: int, projection: str, rank: int
) -> None:
    heads = random_heads(num_heads, num_layers, projection, rank)
    hidden_XD = torch.randn(shape)
    expected = by_hand(heads, hidden_XD)
    slow = heads.train()(hidden_XD)
    with torch.inference_mode():
        fast = heads.eval()(hidden_XD)
    assert heads._stacked is not None
    for logits in (slow, fast):
        assert logits.shape == (*shape[:-1], num_heads, 13)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert heads.features(hidden_XD).shape == (*shape[:-1], num_heads, rank or 8)
    projected = [heads.features(hidden_XD)[..., k, :] @ heads.projection(k).T for k in range(num_heads)]
    torch.testing.assert_close(torch.stack(projected, -2), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("projection", "rank"), FORMS)
@pytest.mark.parametrize("change", ["optimizer", "load", "cast", "data", "replace"])
def test_stacked_weights_follow_every_change(change: str, projection: str, rank: int) -> None:
    heads, other = random_heads(projection=projection, rank=rank).eval(), PredictionHeads(3, 2, 8, 13, projection, rank)
    hidden_BD = torch.randn(4, 8)
    with torch.inference_mode():
        before = heads(hidden_BD)
    if change == "optimizer":
        heads(hidden_BD).sum().backward()
        torch.optim.SGD(heads.parameters(), lr=0.1).step()
    elif change == "load":
        heads.load_state_dict(other.state_dict())
    elif change == "cast":
        heads, hidden_BD = heads.double(), hidden_BD.double()
        if projection == "target":
            heads.attach(heads.projection(0).double())
        with torch.no_grad():
            heads.get_parameter("0.0.linear.weight").mul_(2)
    elif change == "data":  # changes of `.data` do not change the tensor version; `eval()` must notice them
        heads.train()
        heads.get_parameter("1.0.linear.bias").data.mul_(2)
        heads.eval()
    else:
        heads.load_state_dict(other.state_dict(), assign=True)
    with torch.inference_mode():
        after = heads(hidden_BD)
    torch.testing.assert_close(after, by_hand(heads, hidden_BD), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after.float(), before)


@pytest.mark.parametrize(("projection", "rank"), FORMS)
def test_large_heads_are_not_stacked(monkeypatch: pytest.MonkeyPatch, projection: str, rank: int) -> None:
    monkeypatch.setattr(module, "STACK_LIMIT", 100)
    heads, hidden_BD = random_heads(projection=projection, rank=rank).eval(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(heads(hidden_BD), by_hand(heads, hidden_BD), rtol=1e-4, atol=1e-4)
    assert heads._stacked is None


def test_the_targets_projection_is_shared_and_not_saved() -> None:
    weight_VD = torch.nn.Parameter(torch.randn(13, 8))
    heads = PredictionHeads(3, 1, 8, None, "target")
    assert not heads.knows_vocab_size
    assert heads.attach(weight_VD) is heads
    assert heads.vocab_size == 13
    assert all(heads.projection(k) is weight_VD for k in range(3))
    assert set(heads.state_dict()) == {f"{k}.0.linear.{part}" for k in range(3) for part in ("weight", "bias")}
    assert all(parameter is not weight_VD for parameter in heads.parameters())
    heads.to("meta", torch.float64)
    assert (heads.projection(0).dtype, heads.projection(0).device.type) == (torch.float32, "cpu")


def test_logits_have_the_dtype_of_the_targets_projection() -> None:
    heads, hidden_BD = random_heads(projection="target").eval(), torch.randn(5, 8)
    expected = by_hand(heads, hidden_BD)
    heads.attach(heads.projection(0).bfloat16())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits_BKV = heads(hidden_BD.bfloat16())
        assert logits_BKV.dtype == torch.bfloat16
        torch.testing.assert_close(logits_BKV.float(), expected, rtol=5e-2, atol=0.3)


@pytest.mark.parametrize(("vocab_size", "hidden_size", "rank"), [(13, 8, 1), (13, 8, 8), (5, 8, 3), (300, 40, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_heads_are_initialised_with_the_best_approximation(
    vocab_size: int, hidden_size: int, rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SVD_ROWS", 7)
    torch.manual_seed(1)
    weight_VD = torch.randn(vocab_size, hidden_size).to(dtype)
    heads = PredictionHeads.from_lm_head(weight_VD, 3, 1, "low-rank", rank, dtype=torch.float32)
    left, values, right = torch.linalg.svd(weight_VD.double(), full_matrices=False)
    best_VD = left[:, :rank] * values[:rank] @ right[:rank]
    for k in range(3):
        down_RD = heads.get_parameter(f"{k}.1.down.weight")
        torch.testing.assert_close((heads.projection(k) @ down_RD).double(), best_VD, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(down_RD @ down_RD.T, torch.eye(rank), rtol=1e-5, atol=1e-5)
    hidden_BD = torch.randn(4, hidden_size)
    expected_BV = (hidden_BD.double() @ best_VD.T).float()
    torch.testing.assert_close(heads(hidden_BD)[:, 2], expected_BV, rtol=1e-4, atol=1e-4)
    missed = torch.linalg.norm(weight_VD.double() - best_VD)
    torch.testing.assert_close(missed, values[rank:].square().sum().sqrt(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "projection", "rank"),
    [
        *((0, "own", 0), (1, "own", 0), (2, "own", 0)),
        *((0, "low-rank", 3), (2, "low-rank", 8)),
        *((1, "target", 0), (2, "target", 0)),
    ],
)
@pytest.mark.parametrize("states", ["after-norm", "before-norm"])
def test_heads_survive_a_round_trip(tmp_path: Path, num_layers: int, projection: str, rank: int, states: str) -> None:
    heads = random_heads(3, num_layers, projection, rank, states)
    save_heads(heads, tmp_path, "target")
    loaded = load_heads(tmp_path)
    assert not loaded.training
    assert (loaded.num_heads, loaded.num_layers, loaded.hidden_size, loaded.vocab_size) == (3, num_layers, 8, 13)
    assert (loaded.projection_kind, loaded.rank, loaded.states) == (projection, rank, states)
    assert set(loaded.state_dict()) == set(heads.state_dict())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    half = load_heads(tmp_path, device="cpu", dtype=torch.bfloat16, lm_head=torch.zeros(13, 8))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_heads_without_a_projection_use_that_of_the_target(tmp_path: Path) -> None:
    heads, hidden_BD = random_heads(projection="target"), torch.randn(4, 8)
    expected, weight_VD = heads(hidden_BD), heads.projection(0)
    save_heads(heads, tmp_path, "target")
    assert torch.equal(load_heads(tmp_path, lm_head=weight_VD)(hidden_BD), expected)
    assert torch.equal(load_heads(tmp_path).attach(weight_VD)(hidden_BD), expected)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    del config["vocab_size"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    unknown = load_heads(tmp_path)
    assert not unknown.knows_vocab_size
    save_heads(unknown, tmp_path / "again", "target")
    assert "vocab_size" not in json.loads((tmp_path / "again" / CONFIG_FILE).read_text())
    assert unknown.attach(torch.zeros(14, 8)).vocab_size == 14


def test_scaled_heads_equal_heads_of_scaled_states(tmp_path: Path) -> None:
    heads = random_heads()
    scaled = PredictionHeads(3, 2, 8, 13, states="before-norm", scale=0.25)
    scaled.load_state_dict(heads.state_dict())
    hidden_XD = torch.randn(5, 8)
    save_heads(scaled.eval(), tmp_path, "base")
    with torch.inference_mode():
        expected = heads.eval()(hidden_XD * 0.25)
        for module in (scaled, load_heads(tmp_path)):
            torch.testing.assert_close(module(hidden_XD), expected)  # stacked evaluation
            assert module.scale == 0.25
    torch.testing.assert_close(scaled.train()(hidden_XD), expected)
