"""DFlash drafters: training, decoding with a cache and stored files equal a plain forward of the whole block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.dflash import DFlashHeads, default_layers, load_dflash, save_dflash
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.dflash import DFlashDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

VOCAB, LENGTH = 96, 20
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"gamma": 4}),
    ("speculative", {"gamma": 2}),
    ("adaptive", {"confidence_threshold": 0.05}),
    ("dynamic-tree", {"max_depth": 4, "min_prob": 0.01}),
    ("multi-candidate", {"k_config": "3x2x1"}),
    ("spectr", {}),
    ("suffix", {"fallback": "drafter"}),
]


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)


def states_of(model: LlamaForCausalLM, heads: DFlashHeads, ids_1T: torch.Tensor) -> torch.Tensor:
    hidden_states = model.model(ids_1T, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[layer] for layer in heads.layers], -1)


def plain_logits(heads: DFlashHeads, aux_1TG: torch.Tensor, anchor: int) -> torch.Tensor:
    """Return the logits of a block that begins with token `anchor` after the context, without a cache or a mask."""
    block_1S = torch.tensor([[anchor, *[heads.mask] * (heads.block_size - 1)]])
    hidden_1SD = torch.nn.functional.embedding(block_1S, heads.embedding)
    length = aux_1TG.shape[1]
    places_1S = torch.arange(length, length + heads.block_size)[None]
    context_1TD, positions_1T = heads.context(aux_1TG), torch.arange(length)[None]
    hidden_1SD = heads.through_layers(hidden_1SD, context_1TD, places_1S, positions_1T, None)
    return hidden_1SD[:, 1:] @ heads.projection().T


@torch.no_grad()
@pytest.mark.parametrize("trimmed", [False, True])
def test_cached_and_packed_blocks_equal_plain_ones(
    trimmed: bool, target: LlamaForCausalLM, make_dflash: Callable[..., DFlashHeads]
) -> None:
    heads = make_dflash(target, torch.arange(1, VOCAB, 3) if trimmed else None)
    ids_1T = torch.randint(VOCAB, (1, LENGTH))
    aux_1TG = states_of(target, heads, ids_1T)
    expected = {after: plain_logits(heads, aux_1TG[:, :after], int(ids_1T[0, after])) for after in (4, 12, 16)}

    drafter = DFlashDrafter(heads)
    cache = drafter.new_cache(2, LENGTH + 5)  # rows of two lengths
    for start, stop in ((0, 3), (3, 12)):
        cache.set_lengths([start, start])
        drafter.add_context(cache, aux_1TG[:, start:stop].repeat(2, 1, 1))
    cache.set_lengths([12, 4])
    found_2KR = drafter.draft_block(cache, ids_1T[0, [12, 4], None], 4)
    for row, after in enumerate((12, 4)):
        assert torch.allclose(found_2KR[row], expected[after][0], atol=1e-4)

    packed_1T = torch.cat((ids_1T[:, :7], ids_1T), 1)  # another document comes first
    aux_1TG = torch.cat((aux_1TG[:, :7], aux_1TG), 1)
    positions_1T = torch.cat((torch.arange(7), torch.arange(LENGTH)))[None]
    rows_X = torch.tensor([3, *(7 + after - 1 for after in expected)])
    features_XKD = heads.features(
        aux_1TG, packed_1T, positions_1T, (torch.arange(LENGTH + 7) >= 7).long()[None], rows_X
    )
    for features_KD, logits_1KR in zip(features_XKD[1:], expected.values(), strict=True):
        assert torch.allclose(features_KD @ heads.projection().T, logits_1KR[0], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_every_slot_sees_the_whole_block(
    rows: int, make_llama: Callable[..., LlamaForCausalLM], make_dflash: Callable[..., DFlashHeads]
) -> None:
    """Rows of equal length and heads of 16 channels, which the kernels for CPUs support."""
    target = make_llama(VOCAB, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, hidden_size=32)
    heads, ids_1T = make_dflash(target), torch.randint(VOCAB, (1, LENGTH))
    aux_1TG = states_of(target, heads, ids_1T)
    drafter = DFlashDrafter(heads)
    cache = drafter.new_cache(rows, LENGTH + 5)
    drafter.add_context(cache, aux_1TG.repeat(rows, 1, 1))
    cache.set_lengths([LENGTH] * rows)
    found_BKR = drafter.draft_block(cache, torch.full((rows, 1), 7), 4)
    assert torch.allclose(found_BKR, plain_logits(heads, aux_1TG, 7).expand(rows, -1, -1), atol=1e-4)


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_greedy_text_is_the_targets(
    name: str, options: dict[str, Any], target: LlamaForCausalLM, make_dflash: Callable[..., DFlashHeads]
) -> None:
    """Five prompts, one of them a single token and thus without context, are decoded jointly and one by one."""
    heads = make_dflash(target)
    drafter, wrapped = DFlashDrafter(heads), wrap_model(target, aux_layers=heads.layers)
    torch.manual_seed(0)
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (20, 9, 1, 2, 5)]
    expected = [
        target.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None)[0].tolist()[
            len(ids) :
        ]
        for ids in prompts
    ]
    for rows in (slice(0, 5), *(slice(row, row + 1) for row in range(5))):
        method = build_method(name, Parts(drafter), Sampling(), **options)
        count = len(prompts[rows])
        found = decode_texts(wrapped, *method, prompts[rows], Limits(16), Sampling(), Rng.for_rows(0, count))
        assert found == expected[rows]


def test_files_are_read_back(target: LlamaForCausalLM, make_dflash: Callable[..., DFlashHeads], tmp_path: Path) -> None:
    heads = make_dflash(target, torch.arange(1, VOCAB, 3))
    save_dflash(heads, tmp_path)
    again = load_dflash(tmp_path)
    assert (again.layers, again.mask, again.block_size) == (heads.layers, heads.mask, heads.block_size)
    assert again.proposed is not None
    assert again.proposed.tolist() == list(range(1, VOCAB, 3))
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in heads.state_dict().items())


def test_a_draft_is_at_most_a_block(target: LlamaForCausalLM, make_dflash: Callable[..., DFlashHeads]) -> None:
    heads = make_dflash(target, block_size=3)
    method = build_method("speculative", Parts(DFlashDrafter(heads)), Sampling(), gamma=3)
    with pytest.raises(ValueError, match="at most 2 tokens per step, got 3"):
        decode_texts(wrap_model(target, aux_layers=heads.layers), *method, [[1, 2]], Limits(4), Sampling(), Rng([0]))


def test_default_layers_are_those_of_published_drafters() -> None:
    assert default_layers(36) == [2, 10, 18, 26, 34]  # Qwen3-8B: outputs of 1, 9, 17, 25 and 33
    assert [default_layers(count) for count in (1, 2, 4, 6)] == [[0], [1], [2], [2, 3, 4]]
