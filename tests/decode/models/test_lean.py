"""Products of the optimised forward, and its stored weights."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decode.models.lean import LeanDecoder
from draftsmith.decode.models.products import product as products
from draftsmith.decode.models.products.product import FEW_ROWS, Product
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(640, 500), (1205, 300), (60, 30)], ids=str)
def test_products_equal_the_matrix_product(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outputs, inputs = shape
    weight_OI = torch.randn(outputs, inputs, dtype=dtype)
    product = Product(weight_OI)
    monkeypatch.setattr(products, "fits", lambda weight_OI: False)  # as without a compiler
    library = Product(weight_OI)
    assert library.few_rows is None
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    for multiply, rows in itertools.product((product, library), (1, 2, 5, 17, FEW_ROWS, FEW_ROWS + 1)):
        x_XI, sum_XO = torch.randn(rows, inputs, dtype=dtype), torch.randn(rows, outputs, dtype=dtype)
        expected_XO = x_XI.double() @ weight_OI.double().T
        bound = unit * expected_XO.abs().max()
        assert (multiply(x_XI).double() - expected_XO).abs().max() < bound
        assert (multiply.add_to(sum_XO, x_XI).double() - expected_XO - sum_XO.double()).abs().max() < 2 * bound


def test_frozen_16_bit_weights_are_stored_once(make_llama: Any, tmp_path: Path) -> None:
    model = make_llama().half().requires_grad_(False)  # bfloat16 weights would be copied to float32
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    thin = LeanDecoder(model)
    for layer, fused_layer in zip(model.model.layers, thin._layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for fused, parts in (
            (fused_layer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (fused_layer.up, (mlp.gate_proj, mlp.up_proj)),
        ):
            addresses = {part.weight.untyped_storage().data_ptr() for part in parts}
            assert addresses == {fused.weight_OI.untyped_storage().data_ptr()}
    model.save_pretrained(tmp_path)
    for state in (model.state_dict(), LlamaForCausalLM.from_pretrained(tmp_path).state_dict()):
        assert all(torch.equal(state[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trained_weights_keep_their_memory(make_llama: Any, dtype: torch.dtype) -> None:
    model = make_llama().to(dtype)
    before = [weight.data_ptr() for weight in model.parameters()]
    LeanDecoder(model)
    assert [weight.data_ptr() for weight in model.parameters()] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_whole_prompts_equal_prompts_in_parts(make_llama: Any, dtype: torch.dtype) -> None:
    """Whole prompts need no mask, but later parts of a prompt need one."""
    thin = LeanDecoder(make_llama().to(dtype))
    tokens_BM = torch.randint(0, thin.vocab_size, (2, FEW_ROWS + 9))
    whole, parts = (thin.new_cache(2, tokens_BM.shape[1]) for _ in range(2))
    whole_BMD = thin.extend(whole, tokens_BM)
    first_BMD = thin.extend(parts, tokens_BM[:, :40])
    parts.set_lengths([40, 40])
    second_BMD = thin.extend(parts, tokens_BM[:, 40:])
    apart = (whole_BMD - torch.cat((first_BMD, second_BMD), 1)).abs().max()
    assert apart < (1e-5 if dtype == torch.float32 else 0.1) * whole_BMD.abs().max()


@pytest.mark.slow
def test_loading_holds_the_weights_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 8192}
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(tmp_path)  # 436 MB
    command = [sys.executable, "tests/bench/memory.py", str(tmp_path), "--dtypes", "float32", "bfloat16", "int8"]
    output = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[3])
    measured = json.loads(output.splitlines()[-1])
    for dtype in ("float32", "bfloat16", "int8"):  # with a second copy, the peak would be at least 2 times the weights
        assert measured[dtype]["peak_memory_bytes"] <= 1.5 * measured[dtype]["weights_bytes"], dtype
