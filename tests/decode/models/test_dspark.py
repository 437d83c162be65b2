"""DSpark drafters: the Markov bias and the confidence in decoding, exact drafts, and stored files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.dflash import save_dflash
from draftsmith.checkpoints.heads.dspark import DSparkHeads, load_block_drafter
from draftsmith.checkpoints.heads.layouts import read_heads
from draftsmith.decode.engine import Limits, decode_texts
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.dflash import DFlashDrafter, DSparkDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from transformers import LlamaForCausalLM

VOCAB, LENGTH = 96, 12
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("speculative", {"gamma": 4}),
    ("adaptive", {"policy": "confidence-head", "token_cost": 0.3}),
    ("dynamic-tree", {"max_depth": 4, "min_prob": 0.01}),
    ("multi-candidate", {"k_config": "3x2x1"}),
]


@pytest.fixture
def target(make_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_llama(VOCAB, num_hidden_layers=3)


@torch.no_grad()
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("trimmed", [False, True])
def test_drafts_have_the_logits_and_confidences_of_training(
    trimmed: bool, from_anchor: bool, target: LlamaForCausalLM, make_dspark: Callable[..., DSparkHeads]
) -> None:
    heads = make_dspark(target, torch.arange(1, VOCAB, 3) if trimmed else None, from_anchor=from_anchor)
    ids_1T = torch.randint(VOCAB, (1, LENGTH))
    hidden_states = target.model(ids_1T, output_hidden_states=True).hidden_states
    aux_1TG = torch.cat([hidden_states[layer] for layer in heads.layers], -1)
    after, documents_1T = 5, torch.zeros(1, LENGTH, dtype=torch.int64)
    features_1KD = heads.features(aux_1TG, ids_1T, torch.arange(LENGTH)[None], documents_1T, torch.tensor([after - 1]))
    before_1K = ids_1T[:, after : after + heads.num_heads]
    features_1KD = torch.cat((features_1KD, heads.markov_factors(before_1K)), -1)
    expected_1KR = features_1KD @ torch.cat((heads.projection(), heads.markov_weight), 1).T

    drafter = DSparkDrafter(heads)
    cache = drafter.new_cache(1, LENGTH + 5)
    drafter.add_context(cache, aux_1TG[:, :after])
    cache.set_lengths([after])
    outputs_1KY = drafter.after(drafter.draft_block(cache, ids_1T[:, after, None], 4), before_1K)
    assert torch.allclose(drafter.draft_logits(outputs_1KY)[0], expected_1KR, atol=1e-4)
    assert torch.allclose(drafter.confidence(outputs_1KY), heads.confidence(features_1KD).sigmoid(), atol=1e-5)


@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_greedy_text_is_the_targets(
    name: str, options: dict[str, Any], target: LlamaForCausalLM, make_dspark: Callable[..., DSparkHeads]
) -> None:
    """Rows of four lengths, together and apart."""
    heads = make_dspark(target)
    drafter, wrapped = DSparkDrafter(heads), wrap_model(target, aux_layers=heads.layers)
    torch.manual_seed(0)
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (20, 9, 1, 5)]
    expected = [
        target.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()[
            len(ids) :
        ]
        for ids in prompts
    ]
    method = build_method(name, Parts(drafter), Sampling(), **options)
    found = decode_texts(wrapped, *method, prompts, Limits(12), Sampling(), Rng.for_rows(0, len(prompts)))
    assert found == expected
    assert decode_texts(wrapped, *method, prompts[1:2], Limits(12), Sampling(), Rng([0])) == expected[1:2]


@pytest.mark.parametrize("from_anchor", [True, False])
def test_files_are_read_back(
    from_anchor: bool, target: LlamaForCausalLM, make_dspark: Callable[..., DSparkHeads], tmp_path: Path
) -> None:
    heads = make_dspark(target, torch.arange(1, VOCAB, 3), from_anchor=from_anchor)
    save_dflash(heads, tmp_path)
    again = load_block_drafter(tmp_path)
    assert isinstance(again, DSparkHeads)
    assert (again.layers, again.mask, again.block_size) == (heads.layers, heads.mask, heads.block_size)
    assert (again.num_heads, again.rank, again.first_slot) == (heads.num_heads, heads.rank, heads.first_slot)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in heads.state_dict().items())
    with pytest.raises(ValueError, match="contains a DFlash or DSpark drafter: pass it as `drafter`"):
        read_heads(tmp_path)


@pytest.mark.parametrize(
    ("entry", "changed", "message"),
    [
        ('"sample_from_anchor": true', '"sample_from": 0', "sample_from_anchor must be true or false, got None"),
        ('"markov_head_type": "vanilla"', '"markov_head_type": "gated"', "markov_head_type must be 'vanilla'.*gated"),
        ('"markov_rank": 6', '"markov_rank": 0', "markov_rank must be at least 1, got 0"),
    ],
)
def test_other_forms_are_refused(
    entry: str,
    changed: str,
    message: str,
    target: LlamaForCausalLM,
    make_dspark: Callable[..., DSparkHeads],
    tmp_path: Path,
) -> None:
    save_dflash(make_dspark(target), tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    assert entry in text
    path.write_text(text.replace(entry, changed))
    with pytest.raises(ValueError, match=message):
        load_block_drafter(tmp_path)


def test_confident_slots_lengthen_a_chain(
    target: LlamaForCausalLM, make_dspark: Callable[..., DSparkHeads], make_dflash: Callable[..., Any]
) -> None:
    """A row drafts while the probability of reaching a token times the time of the step exceeds the token's cost."""
    heads = make_dspark(target)
    wrapped = wrap_model(target, aux_layers=heads.layers)
    torch.nn.init.zeros_(heads.confidence_head.proj.weight)
    lengths = []
    for logit in (-9.0, 0.0, 9.0):
        torch.nn.init.constant_(heads.confidence_head.proj.bias, logit)
        options = {"policy": "confidence-head", "token_cost": 0.3, "draft_cost": 0.1}
        method = build_method("adaptive", Parts(DSparkDrafter(heads)), Sampling(), **options)
        counts: list[int] = []
        propose = method.proposer.propose

        def watched(context: Any, counts: list[int] = counts, propose: Any = propose) -> Any:
            proposal = propose(context)
            counts.append(proposal.tree.nodes - 1)
            return proposal

        method.proposer.propose = watched  # type: ignore[method-assign]
        decode_texts(wrapped, *method, [[1, 2, 3]], Limits(3), Sampling(), Rng([0]))
        lengths.append(counts[0])
    # 0.5 · 1.1 > 0.3 · 1, but 0.25 · 1.4 < 0.3 · 1.5
    assert lengths == [0, 1, 4]
    with pytest.raises(ValueError, match=r"confidence-head.*DSpark"):
        build_method("adaptive", Parts(DFlashDrafter(make_dflash(target))), Sampling(), policy="confidence-head")


@pytest.mark.parametrize(
    "change", [{"is_causal": True}, {"hidden_act": "gelu"}, {"layer_types": ["sliding_attention"]}], ids=str
)
def test_configs_with_another_forward_are_refused(
    change: dict[str, Any], target: LlamaForCausalLM, make_dspark: Callable[..., DSparkHeads], tmp_path: Path
) -> None:
    save_dflash(make_dspark(target), tmp_path)
    load_block_drafter(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match="which is not supported"):
        load_block_drafter(tmp_path)
