"""The Triton kernels equal plain operations on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter, which does
not support products in bfloat16."""

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("needs a CUDA device", allow_module_level=True)

from draftsmith.decode.models.products import fused  # noqa: E402

SHAPES = [  # batch, new tokens, query heads, key heads, width, slots
    (1, 1, 4, 4, 64, 256),
    (1, 5, 4, 2, 128, 320),
    (3, 7, 6, 2, 24, 130),
    (2, 33, 6, 2, 32, 1100),
    (1, 2, 9, 3, 64, 64),
]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16])


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_with_any_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, count, heads, kv_heads, width, slots = shape
    torch.manual_seed(0)
    query_XHE = random_tensor(dtype, batch * count, heads, width)
    keys, values = random_tensor(dtype, 2, batch, kv_heads, slots + 9, width)[:, :, :, :slots]
    mask_BMS = torch.zeros(batch, count, slots, device=DEVICE, dtype=dtype)
    mask_BMS.masked_fill_(torch.rand(batch, count, slots, device=DEVICE) < 0.5, -torch.inf)
    mask_BMS[:, :, : slots // 3] = -torch.inf  # no query attends to the first third of the slots
    mask_BMS[:, :, slots // 2] = 0
    ends_B = torch.randint(slots // 2 + 1, slots + 1, (batch,), device=DEVICE)
    mask_BMS.masked_fill_(torch.arange(slots, device=DEVICE) >= ends_B[:, None, None], -torch.inf)
    slots_BM = ends_B[:, None] - count + torch.arange(count, device=DEVICE)
    output = fused.attend(query_XHE, keys, values, mask_BMS, slots_BM).view(batch, count, heads, width)
    query = query_XHE.view(batch, count, heads, width).transpose(1, 2).double()
    expected = F.scaled_dot_product_attention(
        query, keys.double(), values.double(), mask_BMS[:, None].double(), enable_gqa=True
    )
    assert (output.double() - expected.transpose(1, 2)).abs().max() < TOLERANCES[dtype]


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_rotated_and_cached(shape: tuple[int, ...], dtype: torch.dtype, normed: bool) -> None:
    batch, count, heads, kv_heads, width, slots = shape
    torch.manual_seed(0)
    qkv_XO = random_tensor(dtype, batch * count, (heads + 2 * kv_heads) * width)
    cos, sin = random_tensor(dtype, 2, batch * count, width)
    cache = random_tensor(dtype, 2, batch, kv_heads, slots, width)
    before = cache.clone()
    slots_BM = torch.stack([torch.randperm(slots, device=DEVICE)[:count] for _ in range(batch)])
    norms_O = random_tensor(dtype, (heads + 2 * kv_heads) * width) if normed else None
    output = fused.rotate_and_keep(qkv_XO, cos, sin, *cache, slots_BM, norms_O, 1e-5)
    split = qkv_XO.double().view(batch, count, -1, width)
    values = split[:, :, heads + kv_heads :]
    if norms_O is not None:
        split = F.rms_norm(split, (width,), None, 1e-5) * norms_O.double().view(-1, width)
    turned = split * cos.double().view(batch, count, 1, width)
    first, second = split.chunk(2, -1)
    turned += torch.cat((-second, first), -1) * sin.double().view(batch, count, 1, width)
    tolerance = 4 * TOLERANCES[dtype]  # the numbers reach 20
    assert (output.double().view(batch, count, heads, width) - turned[:, :, :heads]).abs().max() < tolerance
    rows_B1 = torch.arange(batch, device=DEVICE)[:, None]
    kept_keys, kept_values = (memory[rows_B1, :, slots_BM].double() for memory in cache)
    assert (kept_keys - turned[:, :, heads : heads + kv_heads]).abs().max() < tolerance
    assert torch.equal(kept_values, values)
    for memory, old in zip(cache, before, strict=True):
        memory[rows_B1, :, slots_BM] = old[rows_B1, :, slots_BM]
    assert torch.equal(cache, before)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("width", [576, 1300])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x_XD, weight_D = random_tensor(dtype, 5, width), random_tensor(dtype, width)
    output = fused.normed(x_XD, weight_D, 1e-5)
    assert (output - F.rms_norm(x_XD, (width,), weight_D, 1e-5)).abs().max() <= 4 * TOLERANCES[dtype]


@pytest.mark.gpu
@KINDS
def test_gated_activation(dtype: torch.dtype) -> None:
    gate_up = random_tensor(dtype, 5, 2 * 1300)
    gate, up = gate_up.chunk(2, -1)
    assert (fused.gated(gate_up) - F.silu(gate) * up).abs().max() <= 4 * TOLERANCES[dtype]
