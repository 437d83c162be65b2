"""Triton kernels for the operations of a decoder layer around its matrix products, for few tokens on a GPU.

Attention splits the cache slots among the GPU's multiprocessors, as in flash decoding, and supports any mask. It reads
no slot after a row's last new token, so one CUDA graph works for all lengths. Accumulation is in float32.

Shape letters: B batch, M new tokens, X = B · M, H query heads, K key heads, G = H / K, R = G · M rows of a key head, E
head width, S cache slots, P parts of the slots, F width of the MLP.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, index"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs does not include Triton
    triton = None

_BLOCK = 64
"""Number of cache slots per block."""
_MOST_PARTS = 64


def _kernel(function: Callable[..., None]) -> Any:
    return function if triton is None else triton.jit(function)


def rotate_and_keep(
    qkv_XO: Tensor,
    cos_XE: Tensor,
    sin_XE: Tensor,
    keys_BKSE: Tensor,
    values_BKSE: Tensor,
    slots_BM: Tensor,
    norms_O: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Apply rotary embeddings, return the queries [X, H, E], and write keys and values to the cache.

    If `norms_O` is set, an RMSNorm with these weights is first applied to each query and key head.
    """
    (_, kv_heads, _, width), count = keys_BKSE.shape, slots_BM.shape[1]
    rows, all_heads = len(qkv_XO), qkv_XO.shape[1] // width
    assert keys_BKSE.stride() == values_BKSE.stride()
    assert keys_BKSE.stride(3) == 1
    assert width % 2 == 0
    query_XHE = qkv_XO.new_empty(rows, all_heads - 2 * kv_heads, width)
    _rotate_kernel[(rows, all_heads)](
        qkv_XO, cos_XE, sin_XE, slots_BM, query_XHE, keys_BKSE, values_BKSE, count, kv_heads, *keys_BKSE.stride()[:3],
        qkv_XO if norms_O is None else norms_O, eps, NORMED=norms_O is not None, HALF=width // 2,
        WIDE=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    return query_XHE


@_kernel
def _rotate_kernel(
    qkv, cos, sin, slots, query, keys, values, count, kv_heads, to_row, to_head, to_slot, norms, eps,
    NORMED: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own_heads = heads - 2 * kv_heads
    offsets = tl.arange(0, WIDE)
    inside = offsets < HALF
    source = qkv + (token * heads + head) * (2 * HALF) + offsets
    first, second = tl.load(source, mask=inside), tl.load(source + HALF, mask=inside)
    if head < own_heads + kv_heads:
        angle = token * (2 * HALF) + offsets
        turned = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(turned[0] * turned[0] + turned[1] * turned[1], 0) / (2 * HALF) + eps)
            weight = norms + head * (2 * HALF) + offsets
            turned = (
                turned[0] * scale * tl.load(weight, mask=inside).to(tl.float32),
                turned[1] * scale * tl.load(weight + HALF, mask=inside).to(tl.float32),
            )
        cosines = tl.load(cos + angle, mask=inside), tl.load(cos + angle + HALF, mask=inside)
        sines = tl.load(sin + angle, mask=inside), tl.load(sin + angle + HALF, mask=inside)
        first = (turned[0] * cosines[0] - turned[1] * sines[0]).to(first.dtype)
        second = (turned[1] * cosines[1] + turned[0] * sines[1]).to(second.dtype)
    cache_start = (token // count).to(tl.int64) * to_row + tl.load(slots + token) * to_slot
    if head < own_heads:
        target = query + (token * own_heads + head) * (2 * HALF) + offsets
    elif head < own_heads + kv_heads:
        target = keys + cache_start + (head - own_heads) * to_head + offsets
    else:
        target = values + cache_start + (head - own_heads - kv_heads) * to_head + offsets
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


def attend(query_XHE: Tensor, keys_BKSE: Tensor, values_BKSE: Tensor, mask_BMS: Tensor, slots_BM: Tensor) -> Tensor:
    """Compute attention with a mask, [X, H · E]. Each row attends to the slots up to its last entry in `slots_BM`."""
    (batch, kv_heads, slots, width), count = keys_BKSE.shape, mask_BMS.shape[1]
    tokens, heads = query_XHE.shape[:2]
    assert keys_BKSE.stride() == values_BKSE.stride()
    assert mask_BMS.stride(2) == slots_BM.stride(1) == 1
    group, device = heads // kv_heads, query_XHE.device
    # Float32 products do not use tensor cores, and large blocks do not fit into the registers.
    most = 16 if query_XHE.dtype == torch.float32 else 64
    block_rows = min(most, max(16, triton.next_power_of_2(group * count)))
    row_blocks = triton.cdiv(group * count, block_rows)
    wanted_parts = triton.cdiv(2 * _processors(device), batch * kv_heads * row_blocks)
    parts = min(triton.next_power_of_2(wanted_parts), triton.next_power_of_2(triton.cdiv(slots, _BLOCK)), _MOST_PARTS)
    attended_XE = query_XHE.new_empty(tokens, heads * width)
    sums_PRE = torch.empty(parts, tokens * heads, width, device=device) if parts > 1 else attended_XE
    peaks_PR2 = torch.empty(parts, tokens * heads, 2, device=device) if parts > 1 else attended_XE
    sizes: dict[str, Any] = {"WIDTH": width, "WIDE": max(16, triton.next_power_of_2(width)), "PARTS": parts}
    _attend_kernel[(parts, batch * kv_heads, row_blocks)](
        query_XHE, keys_BKSE, values_BKSE, mask_BMS, slots_BM, sums_PRE, peaks_PR2, width**-0.5, count, kv_heads, group,
        *keys_BKSE.stride()[:3], *mask_BMS.stride()[:2], **sizes, ROWS=block_rows, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        _gather_kernel[(tokens * heads,)](sums_PRE, peaks_PR2, attended_XE, **sizes, num_warps=2)
    return attended_XE


@_kernel
def _attend_kernel(
    query, keys, values, mask, slots, sums, peaks, scale, count, kv_heads, group, to_row, to_head, to_slot, mask_row,
    mask_token, WIDTH: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, pair, heads = tl.program_id(0), tl.program_id(1), group * kv_heads
    row, head = pair // kv_heads, pair % kv_heads
    query_index = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    exists = query_index < group * count
    token, offsets = row * count + query_index % count, tl.arange(0, WIDE)
    lines = token * heads + head * group + query_index // count
    inside = offsets < WIDTH
    queries = tl.load(query + lines[:, None] * WIDTH + offsets, mask=exists[:, None] & inside, other=0.0)
    start = row.to(tl.int64) * to_row + head * to_head
    masks = mask + row * mask_row + (query_index % count)[:, None] * mask_token
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted_sum = tl.zeros((ROWS, WIDE), tl.float32)
    stop = tl.load(slots + row * count + count - 1).to(tl.int32) + 1
    blocks = tl.cdiv(tl.cdiv(stop, BLOCK), PARTS)
    for block in range(part * blocks, (part + 1) * blocks):
        slot = block * BLOCK + tl.arange(0, BLOCK)
        in_range = slot < stop
        addresses = start + slot[:, None].to(tl.int64) * to_slot + offsets
        key = tl.load(keys + addresses, mask=in_range[:, None] & inside, other=0.0)
        mask_values = tl.load(masks + slot, mask=exists[:, None] & in_range, other=-float("inf")).to(tl.float32)
        score = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale + mask_values
        higher = tl.maximum(peak, tl.max(score, 1))
        level = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp(score - level[:, None])
        shrunk = tl.exp(peak - level)
        value = tl.load(values + addresses, mask=in_range[:, None] & inside, other=0.0)
        weighted_sum = weighted_sum * shrunk[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrunk + tl.sum(weight, 1)
        peak = higher
    if PARTS == 1:
        output = (weighted_sum / total[:, None]).to(sums.dtype.element_ty)
        tl.store(sums + lines[:, None] * WIDTH + offsets, output, mask=exists[:, None] & inside)
    else:
        lines += part * tl.num_programs(1) * group * count
        tl.store(sums + lines[:, None] * WIDTH + offsets, weighted_sum, mask=exists[:, None] & inside)
        tl.store(peaks + 2 * lines, peak, mask=exists)
        tl.store(peaks + 2 * lines + 1, total, mask=exists)


@_kernel
def _gather_kernel(sums, peaks, attended, WIDTH: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    line, lines = tl.program_id(0), tl.num_programs(0)
    part, offsets = tl.arange(0, PARTS), tl.arange(0, WIDE)
    inside = offsets < WIDTH
    addresses = part * lines + line
    peak, total = tl.load(peaks + 2 * addresses), tl.load(peaks + 2 * addresses + 1)
    weight = tl.exp(peak - tl.max(peak, 0))
    weighted_sums = tl.load(sums + addresses[:, None] * WIDTH + offsets, mask=inside, other=0.0)
    output = tl.sum(weighted_sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(attended + line * WIDTH + offsets, output.to(attended.dtype.element_ty), mask=inside)


def normed(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm with the same result as `F.rms_norm`."""
    width = x_XD.shape[1]
    normed_XD = torch.empty_like(x_XD)
    sizes: dict[str, Any] = {"WIDE": triton.next_power_of_2(width), "num_warps": 4 if width <= 1024 else 16}
    _norm_kernel[(len(x_XD),)](x_XD, weight_D, normed_XD, width, eps, **sizes)
    return normed_XD


@_kernel
def _norm_kernel(x, weight, normed, width, eps, WIDE: tl.constexpr):
    offsets = tl.arange(0, WIDE)
    inside, addresses = offsets < width, tl.program_id(0) * width + offsets
    values = tl.load(x + addresses, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    output = values * scale * tl.load(weight + offsets, mask=inside).to(tl.float32)
    tl.store(normed + addresses, output.to(normed.dtype.element_ty), mask=inside)


def gated(gate_up_XF: Tensor) -> Tensor:
    """Return silu(gate) · up, where gate and up are the two halves of the input [X, 2F]."""
    rows, width = len(gate_up_XF), gate_up_XF.shape[1] // 2
    product_XF = gate_up_XF.new_empty(rows, width)
    _gated_kernel[(rows, triton.cdiv(width, 1024))](gate_up_XF, product_XF, width, BLOCK=1024, num_warps=4)
    return product_XF


@_kernel
def _gated_kernel(gate_up, product, width, BLOCK: tl.constexpr):
    row, offsets = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    gate = tl.load(gate_up + 2 * row * width + offsets, mask=inside).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + offsets, mask=inside).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(product + row * width + offsets, output.to(product.dtype.element_ty), mask=inside)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
