"""Skinny GEMM kernels in C equal the library's products, are compiled once, and are optional."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.models.lean import ACTIVATED, LeanDecoder
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.models.products import native
from draftsmith.decode.models.products import product as products
from draftsmith.decode.models.products.native import compiled, library_products
from draftsmith.decode.models.products.product import (
    FEW_ROWS,
    FOURS,
    PAIRS,
    SMALLEST_PACKED,
    FewRows,
    Product,
    fits,
    integers_of,
    round_to_int8,
    rounded,
)
from draftsmith.decode.models.products.weights import GATES
from draftsmith.decode.tree import Tree

PROCESSORS = ["native", *(["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else [])]
"""Processors to compile for: vector registers of 16, 8 and 4 numbers, if this processor has all of them."""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
CENTRED = 6
"""Code in vectors.h for centring the input before a product."""
ASK = "import torch; from draftsmith.decode.models.products.product import fits; print(fits(torch.zeros(32, 4)))"


@pytest.fixture
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the functions for the requested processor during the test."""
    if request.param != "native":
        monkeypatch.setattr(native, "_OPTIONS", (*native._OPTIONS, f"-march={request.param}"))
        compiled.cache_clear()
    yield
    monkeypatch.undo()
    compiled.cache_clear()


any_processor = pytest.mark.parametrize("processor", PROCESSORS, indirect=True)


any_format = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)


def product_of(weight_OI: torch.Tensor, dtype: torch.dtype) -> tuple[FewRows, torch.Tensor]:
    """Return the matrix product for weights in a dtype, and the weights rounded to that dtype."""
    held_OI = rounded(weight_OI) if dtype == torch.int8 else weight_OI.to(dtype)
    return FewRows(held_OI, int8=dtype == torch.int8), held_OI


def as_multiplied(few: FewRows, x: torch.Tensor) -> torch.Tensor:
    """Return the inputs, rounded as the product rounds them before the multiplication, in float64."""
    if few.kind == FOURS:
        largest, most = x.abs().amax(-1, keepdim=True), torch.tensor(32639.0)
        return (x * most.div(largest)).round().double() * largest.div(most).double()
    return (x.bfloat16() if few.kind == PAIRS else x).double()


@needs_compiler
@any_processor
@any_format
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(16, 1), (41, 7), (32, 1301), (48, 1300), (4096, 100), (4096, 112)], ids=str)
def test_products_equal_the_librarys(processor: None, shape: tuple[int, int], threads: int, dtype: torch.dtype) -> None:
    """An error in a panel, row or thread would be as large as the result. Rows do not depend on each other."""
    torch.manual_seed(0)
    outputs, inputs = shape
    few, weight_OI = product_of(torch.randn(outputs, inputs), dtype)
    assert fits(weight_OI)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    all_XI = torch.randn(inputs, FEW_ROWS).T  # not contiguous on purpose
    try:
        all_XO = few(all_XI)
        for rows in range(1, FEW_ROWS + 1):
            x_XI, add_XO = all_XI[:rows], torch.randn(rows, outputs)
            assert torch.equal(few(x_XI), all_XO[:rows])
            expected_XO = as_multiplied(few, x_XI) @ weight_OI.double().T
            bound = 2.0**-20 * (1 + inputs**0.5) * 8
            assert (few(x_XI).double() - expected_XO).abs().max() < bound
            assert (few(x_XI, add_XO).double() - expected_XO - add_XO.double()).abs().max() < bound
    finally:
        torch.set_num_threads(before)


@needs_compiler
@any_processor
@any_format
def test_norms_and_activations_equal_the_librarys(processor: None, dtype: torch.dtype) -> None:
    """The gates have magnitudes from 1e-3 to 1e3; the last case has extreme values."""
    torch.manual_seed(0)
    outputs, inputs, offset = 48, 96, 0.03
    few, weight_OI = product_of(torch.randn(outputs, inputs), dtype)
    norm_I, weight_IO = torch.rand(inputs), weight_OI.double().T

    def compute(
        x_XI: torch.Tensor, add_XO: torch.Tensor | None, norm_I: Any, offset: float, before: int
    ) -> torch.Tensor:
        out_XO = torch.empty(len(x_XI), outputs)
        x, add, out, norm = (None if tensor is None else tensor.data_ptr() for tensor in (x_XI, add_XO, out_XO, norm_I))
        apart = 0 if add_XO is None or len(add_XO) < len(x_XI) else outputs  # a single row is added to all rows
        sizes = (inputs, outputs, len(x_XI), few.kind, 2)
        compiled().few_rows(few.pointer, x, add, apart, out, *sizes, norm, offset, before)
        return out_XO.double()

    def is_close(found_XO: torch.Tensor, x_XI: torch.Tensor, bound: float) -> bool:
        """Check that the result is x Wᵀ within `bound` plus the effect of rounded inputs. Rounding changes an input by
        at most 2⁻⁸ of its value (bfloat16), or 2⁻¹⁶ of the row's maximum (integers)."""
        off_XI = {PAIRS: 2.0**-8 * x_XI.abs(), FOURS: 2.0**-16 * x_XI.abs().amax(-1, keepdim=True).expand_as(x_XI)}
        most_XO = bound + off_XI.get(few.kind, torch.zeros_like(x_XI)) @ weight_IO.abs()
        return bool(((found_XO - x_XI @ weight_IO).abs() < most_XO).all())

    for rows in range(1, FEW_ROWS + 1):
        x_XI, add_XO = torch.randn(rows, inputs) * 3, torch.randn(rows, outputs)
        scaled_XI = x_XI.double() / (x_XI.double().square().sum(-1, keepdim=True) + offset**2).sqrt()
        assert is_close(compute(x_XI, None, None, offset, 0), scaled_XI, 1e-5)
        found_XO = compute(x_XI, add_XO, norm_I, offset, 0) - add_XO.double()
        assert is_close(found_XO, scaled_XI * norm_I.double(), 1e-5)
        found_XO = compute(x_XI, add_XO[:1], norm_I, offset, 0) - add_XO[:1].double()
        assert is_close(found_XO, scaled_XI * norm_I.double(), 1e-5)
        apart_XI = (x_XI + 2).double() - (x_XI + 2).double().mean(-1, keepdim=True)
        scaled_XI = apart_XI / (apart_XI.square().sum(-1, keepdim=True) + offset**2).sqrt()
        assert is_close(compute(x_XI + 2, None, norm_I, offset, CENTRED), scaled_XI * norm_I.double(), 1e-5)
        gate_up_XI = torch.randn(rows, 2 * inputs)
        gate_up_XI[:, :inputs] *= torch.logspace(-3, 3, inputs)
        gate_XI, up_XI = gate_up_XI.double().chunk(2, -1)
        for activation, function in ACTIVATED.items():
            gated = activation in GATES.values()
            activated_XI = function(gate_XI) * (up_XI if gated else 1)
            given_XI = gate_up_XI if gated else gate_up_XI[:, :inputs].contiguous()
            found_XO = compute(given_XI, add_XO, None, -1.0, activation) - add_XO.double()
            assert is_close(found_XO, activated_XI, 1e-6 * float((activated_XI @ weight_IO).abs().max()) + 1e-4)
    edges_1I = torch.cat(
        (torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 3.0]]).repeat(1, 12), torch.ones(1, inputs)), -1
    )
    (few, _), outputs = product_of(torch.eye(inputs), dtype), inputs
    row_XO = compute(edges_1I, None, None, -1.0, GATES["silu"]).float()
    expected_XO = torch.nn.functional.silu(edges_1I[:, :inputs])
    rtol, atol = {PAIRS: (2.0**-8, 1e-30), FOURS: (1e-6, 2.0**-16 * 1e30)}.get(few.kind, (1e-6, 1e-30))
    assert torch.allclose(row_XO, expected_XO, rtol=rtol, atol=atol)


@needs_compiler
@any_processor
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize(
    ("lengths", "count", "width"),
    [
        *product([[0], [37], [5, 140, 18]], [1, 5], [32, 64, 80, 128]),
        *product([[37], [5, 140, 18]], [40], [64, 80]),
        ([70_000], 5, 64),  # only scores of few queries fit on the stack
    ],
    ids=str,
)
@torch.no_grad()
def test_attention_of_few_queries_equals_the_librarys(
    processor: None, lengths: list[int], count: int, width: int, chain: bool
) -> None:
    """The queries are a chain, or a tree whose nodes attend to some earlier nodes, after cached rows of these lengths.
    The cache has two layers."""
    torch.manual_seed(0)
    heads, groups, start, room, cap = 6, 2, 2, max(lengths) + 70, 0.0 if width == 64 else 3.0
    batch, end = len(lengths), max(lengths) + start + count
    cache = KVCache(2, batch, groups, room, width, width, torch.float32, torch.device("cpu"))
    for memory in (*cache.keys, *cache.values):
        memory.copy_(torch.randn(memory.shape) * 2)
    cache.set_lengths(lengths)
    before = [memory.clone() for memory in (*cache.keys, *cache.values)]
    qkv_XO = torch.randn(batch * count, (heads + 2 * groups) * width)
    angles_BM1E = torch.rand(batch, count, 1, width // 2) * 6
    turns_BM1E = torch.polar(torch.ones_like(angles_BM1E), angles_BM1E)
    slots_BS = torch.arange(end)[None] < torch.tensor(lengths)[:, None]
    mask_BMS = slots_BS[:, None].repeat(1, count, 1)
    for row, length in enumerate(lengths):
        visible = (torch.rand(count, start + count) > (-1 if chain else 0.4)).tril(start)
        visible[torch.arange(count), start + torch.arange(count)] = True
        mask_BMS[row, :, length : length + start + count] = visible
    mask_B1MS = torch.zeros(batch, 1, count, end).masked_fill_(~mask_BMS[:, None], -torch.inf)
    found_XD = torch.empty(batch * count, heads * width)
    mask = None if chain else mask_B1MS
    parts = (qkv_XO, turns_BM1E, mask, cache.keys[1], cache.values[1], cache.lengths_B, found_XD)
    apart = cache.keys[1].stride()[:2]
    sizes = (batch, count, heads, groups, width, start, end, 2, cap)
    compiled().attend(*(None if part is None else part.data_ptr() for part in parts), batch, batch, *apart, *sizes)
    qkv_BMHE = qkv_XO.view(batch, count, -1, width).double()
    turned = torch.view_as_complex(qkv_BMHE[:, :, : heads + groups].unflatten(-1, (-1, 2)).contiguous()) * turns_BM1E
    query, key = torch.view_as_real(turned).flatten(-2).split([heads, groups], 2)
    for row, length in enumerate(lengths):
        first, last = length + start, length + start + count
        memories = [cache.keys[1][row].double(), cache.values[1][row].double()]
        for memory, new in zip(memories, (key[row], qkv_BMHE[row, :, heads + groups :]), strict=True):
            assert (memory[:, first:last] - new.transpose(0, 1)).abs().max() < 1e-5
        keys, values = (memory[:, :last].repeat_interleave(heads // groups, 0) for memory in memories)
        scores = query[row].transpose(0, 1) @ keys.mT / width**0.5
        scores = (cap * torch.tanh(scores / cap) if cap else scores) + mask_B1MS[row, :, :, :last]
        expected = (scores.softmax(-1) @ values).transpose(0, 1).reshape(count, -1)
        assert (found_XD.view(batch, count, -1)[row] - expected).abs().max() < 1e-5
        for memory, old in zip((*cache.keys, *cache.values), before, strict=True):
            others = [slot for slot in range(room) if not first <= slot < last]
            assert torch.equal(memory[row][:, others], old[row][:, others]), "no other slot changes"
    assert torch.equal(cache.keys[0], before[0])


@needs_compiler
@any_format
@pytest.mark.parametrize("aux_layers", [(), (0, 2)], ids=str)
@torch.inference_mode()
def test_layers_in_one_call_equal_single_layers(make_llama: Any, dtype: torch.dtype, aux_layers: Any) -> None:
    """A tree, a ragged batch and a long chain run through all layers in one call and layer by layer, with and without
    auxiliary hidden states."""
    model = make_llama(hidden_size=64, num_hidden_layers=4).requires_grad_(False)
    if dtype == torch.int8:
        round_to_int8(model)
    else:
        model.to(dtype)
    thin = LeanDecoder(model, aux_layers=aux_layers)
    assert thin._few is not None
    assert LeanDecoder(make_llama(hidden_size=32))._few is None, "heads of size 8 are not supported"
    assert LeanDecoder(make_llama(hidden_size=64, intermediate_size=40))._few is None, "40 inputs are not supported"
    tokens_BM, many_BM = (torch.randint(0, thin.vocab_size, (2, count)) for count in (9, 2 * FEW_ROWS + 3))
    tree = Tree.from_parents(torch.tensor([[-1, 0, 0, 1, 2]]).repeat(2, 1), 2)
    outputs = []
    for context in (nullcontext(), library_products()):
        with context:
            cache = thin.new_cache(2, 160)
            thin.extend(cache, tokens_BM[:, :4])
            cache.set_lengths([4, 2])
            scored_BMD, keys = thin.extend(cache, tokens_BM[:, 4:], tree), cache.keys[-1][0, :, :4].clone()
            outputs.append((scored_BMD, keys, thin.extend(cache, many_BM)))
            assert thin._few.takes(2, 5) == isinstance(context, nullcontext)
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.int8: 1e-3}[dtype]
    for output, expected in zip(*outputs, strict=True):
        assert (output - expected).abs().max() < bound * expected.abs().max()


def test_int8_rounds_to_the_nearest_of_255_values_per_row() -> None:
    weight_OI = torch.randn(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    weight_OI[7] = 0
    held_OI = rounded(weight_OI)
    step_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    assert ((held_OI - weight_OI).abs() <= 0.5001 * step_O1).all()
    assert (held_OI.abs().amax(1) - weight_OI.abs().amax(1)).abs().max() < 1e-4, "the largest weight does not change"
    integers_OI, scale_O = integers_of(held_OI)
    assert torch.equal(integers_OI, integers_of(weight_OI)[0]), "rounding again gives the same integers"
    assert torch.allclose(integers_OI * scale_O[:, None], held_OI, rtol=1e-6, atol=0)


@torch.inference_mode()
def test_an_int8_model_equals_the_rounded_model(make_llama: Any, tmp_path: Path) -> None:
    """The optimised forward is compared with the forward of transformers on the rounded weights."""
    model = make_llama(hidden_size=64, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="int8")
    for weight, original in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, rounded(original) if original.dim() > 1 else original)
        assert original.dim() == 1 or not torch.equal(weight, original)
    tokens_BM = torch.randint(0, loaded.vocab_size, (2, 9))
    wrapped = wrap_model(loaded)
    scored_BMV = wrapped.logits(wrapped.extend(wrapped.new_cache(2, 9), tokens_BM))
    expected_BMV = loaded(tokens_BM).logits
    assert (scored_BMV - expected_BMV).abs().max() < 1e-3 * expected_BMV.abs().max()


@needs_compiler
@any_format
def test_nan_and_infinite_inputs_are_propagated(dtype: torch.dtype) -> None:
    few, _ = product_of(torch.randn(16, 32), dtype)
    for value in (torch.nan, torch.inf, -torch.inf):
        x_XI = torch.randn(3, 32)
        x_XI[1, 5] = value
        finite_X = few(x_XI).isfinite().all(-1)
        assert finite_X.tolist() == [True, False, True]


def test_unsupported_weights_use_the_library() -> None:
    assert not fits(torch.zeros(16, 4, dtype=torch.float16))
    large = Product(torch.zeros(SMALLEST_PACKED // 16, 16))
    assert (large.few_rows is None) == (compiled() is None)


@needs_compiler
def test_kernels_are_compiled_once_if_possible(tmp_path: Path) -> None:
    def run_probe(**changes: str) -> tuple[str, list[Path]]:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | changes
        ran = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.strip(), sorted((tmp_path / "draftsmith").glob("*"))

    bare = tmp_path / "bin"
    bare.mkdir()
    assert run_probe(PATH=str(bare)) == ("False", []), "there is no compiler"
    (bare / "cc").write_text("#!/bin/sh\nexit 1\n")
    (bare / "cc").chmod(0o755)
    assert run_probe(PATH=str(bare)) == ("False", []), "the compiler fails"
    assert run_probe(DRAFTSMITH_NATIVE="0") == ("False", [])
    output, (library,) = run_probe()
    assert output == "True"
    compiled_at = library.stat().st_mtime_ns
    assert run_probe() == ("True", [library])
    assert library.stat().st_mtime_ns == compiled_at


@needs_compiler
@any_processor
@any_format
def test_packed_weights_are_unpacked_unchanged(processor: None, dtype: torch.dtype) -> None:
    """All rows, selected rows and parts of packed weights, including int8 weights, equal the original weights."""
    int8, places_X = dtype == torch.int8, torch.randperm(41)[:9]
    for inputs in (100, 112, 36):
        weight_OI = torch.randn(41, inputs, dtype=torch.bfloat16 if int8 else dtype)
        weight_OI[7] = 0
        few, wanted_OI = FewRows(weight_OI, int8), rounded(weight_OI.float()) if int8 else weight_OI
        assert torch.equal(few.rows(), wanted_OI)
        assert torch.equal(few.rows(places_X), wanted_OI[places_X])
        assert torch.equal(few.part(16, 32).rows(), wanted_OI[16:32])
        x_XI = torch.randn(3 * FEW_ROWS, inputs)
        assert torch.equal(few(x_XI)[70:75], few(x_XI[70:75]))
        assert torch.allclose(few.by_library(x_XI).float(), few(x_XI), rtol=0.02, atol=0.2)


@needs_compiler
@any_format
@pytest.mark.parametrize("tie", [False, True])
@torch.inference_mode()
def test_shared_weights_are_stored_once(
    make_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tie: bool, dtype: torch.dtype
) -> None:
    """The model's layers then use the packed weights and give the same logits, even if the model is wrapped again."""
    monkeypatch.setattr(products, "SMALLEST_PACKED", 1)
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tie}
    model = make_llama(num_hidden_layers=2, **config)
    if dtype == torch.int8:
        round_to_int8(model)
    else:
        model.to(dtype)
    before, ids_BT = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.arange(40)[None]
    wanted_BTV, unshared = model(ids_BT).logits, wrap_model(model)
    scored_BTV = unshared.logits(unshared.extend(unshared.new_cache(1, 40), ids_BT))
    for _ in range(2):
        thin = wrap_model(model, share=True)
        assert torch.equal(thin.logits(thin.extend(thin.new_cache(1, 40), ids_BT)), scored_BTV)
        assert not any(weight.dim() > 1 for weight in model.parameters())
        for found_BTV in (model(ids_BT).logits, model(ids_BT[:, :5]).logits):
            exact = wanted_BTV[:, : found_BTV.shape[1]]
            assert (found_BTV - exact).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-3) * exact.abs().max()
        with library_products():
            assert torch.allclose(model(ids_BT).logits, wanted_BTV, rtol=1e-5, atol=1e-5)
    assert {name: weight.dtype for name, weight in model.state_dict().items()} == {
        n: w.dtype for n, w in before.items()
    }
    assert all(torch.allclose(weight, before[name], rtol=1e-6) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_in_parts_equals_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 5, 40).to(dtype)
    expected = rounded(weight)
    monkeypatch.setattr(products, "_AT_ONCE", 250)
    assert torch.equal(rounded(weight), expected)
