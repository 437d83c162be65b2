"""Methods inside `model.generate`: the same output in the same form, models and parts, and the README's example."""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import train_bpe
from draftsmith.decode import method
from draftsmith.decode.custom_generate import method as drop_in
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    StopStringCriteria,
)

VOCAB = 64
PAD = 63
ONE = torch.tensor([[1, 2, 3]])
PADDED = torch.tensor([[PAD, PAD, 1, 2, 3], [9, 8, 7, 6, 5], [PAD, PAD, PAD, PAD, 11]])
MASK = (PADDED != PAD).long()
BATCH = {"inputs": PADDED, "attention_mask": MASK, "pad_token_id": PAD}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
README = Path(__file__).resolve().parents[3] / "decode" / "README.md"


def check_same(model: Any, custom: drop_in.CustomGenerate, **asked: Any) -> torch.Tensor:
    """What `generate` gives with and without the method is the same tensor, which is returned."""
    wanted = model.generate(**asked)
    output = model.generate(custom_generate=custom, **asked)
    assert output.dtype == wanted.dtype
    assert output.tolist() == wanted.tolist()
    return output


@pytest.mark.parametrize("inputs", [{"inputs": ONE}, BATCH], ids=["one", "padded"])
@pytest.mark.parametrize("name", ["autoregressive", "speculative", "multi-candidate", "prompt-lookup", "slim-s", "bpd"])
def test_greedy_output_is_that_of_plain_generate(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    make_heads: Callable[..., Any],
    name: str,
    inputs: dict[str, Any],
) -> None:
    table = BigramTable.from_documents([np.random.default_rng(0).integers(0, VOCAB, 2000)], VOCAB)
    custom = method(name, drafter=drafter, heads=make_heads(3, 32, VOCAB), table=table)
    output = check_same(target, custom, **inputs, max_new_tokens=20)
    assert output.shape[1] == inputs["inputs"].shape[1] + 20


def test_sampling_is_repeated_by_its_seed(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        asked = BATCH | {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2}
        outputs += [target.generate(**asked, custom_generate=speculative) for _ in range(2)]
    assert [output.shape for output in outputs] == [(6, 17)] * 6
    assert outputs[0].tolist() == outputs[2].tolist()
    assert outputs[1].tolist() == outputs[3].tolist()
    assert outputs[0].tolist() != outputs[1].tolist()
    assert outputs[0].tolist() != outputs[4].tolist()
    assert outputs[0][0].tolist() != outputs[0][1].tolist()  # two samples of one prompt
    assert outputs[0][:, :5].tolist() == PADDED.repeat_interleave(2, 0).tolist()


def test_decoding_greedily_draws_nothing(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    torch.manual_seed(3)
    target.generate(ONE, max_new_tokens=4, custom_generate=speculative)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert after == torch.rand(1)


def test_the_most_likely_of_one_token_is_the_greedy_one(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    greedy = target.generate(**BATCH, max_new_tokens=20)
    sampled = target.generate(**BATCH, max_new_tokens=20, do_sample=True, top_k=1, custom_generate=speculative)
    assert sampled.tolist() == greedy.tolist()


def test_prompt_tuning_is_refused_and_adapters_are_obeyed(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    peft = pytest.importorskip("peft")
    asked = {"input_ids": ONE, "max_new_tokens": 12}
    before = check_same(target, speculative, **asked)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(target, settings).eval()
    assert check_same(adapted, speculative, **asked).tolist() != before.tolist()
    with adapted.disable_adapter():
        assert check_same(adapted, speculative, **asked).tolist() == before.tolist()
    merged = adapted.merge_and_unload()
    assert check_same(merged, speculative, **asked).tolist() != before.tolist()
    tuned = peft.get_peft_model(merged, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    with pytest.raises(ValueError, match="prompt tuning"):
        tuned.generate(**asked, custom_generate=speculative)


def test_parts_must_fit(
    target: LlamaForCausalLM, make_llama: Callable[..., LlamaForCausalLM], make_heads: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="Did you mean 'speculative'"):
        method("speculativ")
    with pytest.raises(ValueError, match="Did you mean 'gamma'"):
        method("speculative", drafter=target, gama=4)
    with pytest.raises(ValueError, match="'speculative' needs a drafter"):
        method("speculative")
    with pytest.raises(ValueError, match="'slim-s' needs a table"):
        method("slim-s", heads=make_heads(3, 32, VOCAB))
    with pytest.raises(ValueError, match="folder or a hub id, got a Linear"):
        method("speculative", drafter=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"no model folder './nowhere'"):
        method("speculative", drafter="./nowhere")
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        method("medusa", heads="nowhere")
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        method("bigram", table=Path("nowhere"))

    def decode(custom: drop_in.CustomGenerate) -> None:
        target.generate(ONE, custom_generate=custom, max_new_tokens=3)

    with pytest.raises(ValueError, match=r"32 tokens, the target of 64"):
        decode(method("speculative", drafter=make_llama(32)))
    with pytest.raises(ValueError, match="vocab_size of the table is 32, of the target 64"):
        decode(method("bigram", table=BigramTable.from_documents([np.arange(9)], 32)))
    with pytest.raises(ValueError, match="hidden_size of the heads is 16, of the target 32"):
        decode(method("medusa", heads=PredictionHeads(4, 0, 16, VOCAB)))
    with pytest.raises(ValueError, match=r"heads are torch.float64 on cpu, the target is torch.float32 on cpu"):
        decode(method("medusa", heads=PredictionHeads(4, 0, 32, VOCAB).double()))


def test_parts_are_read_from_folders(target: LlamaForCausalLM, drafter: LlamaForCausalLM, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path / "drafter")
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach().double(), 4, 1)
    save_heads(heads, tmp_path / "heads", "target")
    BigramTable.from_documents([np.arange(VOCAB).repeat(2)], VOCAB).save(tmp_path / "table")
    folders = {"drafter": tmp_path / "drafter", "heads": str(tmp_path / "heads"), "table": tmp_path / "table"}
    for name in ("speculative", "medusa", "slim-ss", "bigram"):
        check_same(target, method(name, **folders), inputs=ONE, max_new_tokens=8)
    both = method("specinfer", drafter=folders["drafter"], more_drafters=[drafter], gamma=2)
    check_same(target, both, **BATCH, max_new_tokens=8)
    (tmp_path / "heads" / "artifact.json").write_text("{}")
    with pytest.raises(ValueError, match=r"artifact.json cannot be read"):
        method("medusa", heads=tmp_path / "heads")


def test_a_model_is_wrapped_once_until_its_weights_change(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = []
    wrap = drop_in.wrap_model
    monkeypatch.setattr(drop_in, "wrap_model", lambda model, **how: wrapped.append(model) or wrap(model, **how))
    for _ in range(2):
        check_same(target, method("speculative", drafter=drafter), inputs=ONE, max_new_tokens=6)
    assert wrapped == [target, drafter]

    def written(model: LlamaForCausalLM) -> None:
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)

    def written_through_data(model: LlamaForCausalLM) -> None:
        model.model.layers[0].mlp.up_proj.weight.data.mul_(-2)

    def replaced(model: LlamaForCausalLM) -> None:
        model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(torch.randn(32, 32))

    for change in (written, written_through_data, replaced, LlamaForCausalLM.double):
        with torch.no_grad():
            change(target)
        wrapped.clear()
        check_same(target, method("autoregressive"), inputs=ONE, max_new_tokens=20)
        assert wrapped == [target]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_wrapped_model_is_freed_with_its_last_name(make_llama: Callable[..., LlamaForCausalLM], kind: str) -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = make_llama(VOCAB) if kind == "llama" else GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    model.generation_config.eos_token_id = None
    custom = method("prompt-lookup")
    for _ in range(2):
        check_same(model, custom, inputs=ONE, max_new_tokens=6)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_output_can_be_a_dictionary(target: LlamaForCausalLM, speculative: drop_in.CustomGenerate) -> None:
    asked = BATCH | {"max_new_tokens": 6, "return_dict_in_generate": True}
    plain = target.generate(**asked)
    output = target.generate(**asked, custom_generate=speculative)
    assert type(output) is type(plain)
    assert output.sequences.tolist() == plain.sequences.tolist()


def test_it_works_under_inference_mode_and_after_it(
    target: LlamaForCausalLM, speculative: drop_in.CustomGenerate
) -> None:
    with torch.inference_mode():
        check_same(target, speculative, inputs=ONE, max_new_tokens=6)
    check_same(target, speculative, inputs=ONE, max_new_tokens=6)


@pytest.fixture
def quickstart(tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """A folder in which the quickstart seems to have run: tiny models, and a tokenizer beside the target."""
    folder = tmp_path / "runs" / "quickstart"
    text = ["The user asks and the assistant answers. What does the token do in the tree of the draft model?"]
    tokenizer = train_bpe(text, 280, SPECIALS)
    for seed, name in enumerate(("target", "drafter")):
        model = make_llama(280, seed=seed, num_hidden_layers=2 - seed, bos_token_id=0, eos_token_id=2)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return tmp_path


def test_the_examples_of_the_readme_run(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.read_text(encoding="utf-8").partition("## Use from transformers\n")[2].partition("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(quickstart)
    folder = Path("runs/quickstart")
    weight_VD = AutoModelForCausalLM.from_pretrained(folder / "target").lm_head.weight.detach()
    save_heads(PredictionHeads.from_lm_head(weight_VD, 3, 1), folder / "heads", "target")
    documents = np.random.default_rng(0).integers(0, len(weight_VD), (20, 50))
    BigramTable.from_documents(list(documents), len(weight_VD)).save(folder / "table")
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=64)
    assert names["output"].tolist() == plain.tolist()
    shown = names["tokenizer"].decode(plain[0, names["inputs"]["input_ids"].shape[1] :])
    assert capsys.readouterr().out == shown + "\n"
    exec(compile(second, "README.md", "exec"), names)
    again = names["model"].generate(**names["inputs"], custom_generate=names["custom"], max_new_tokens=64)
    assert again.tolist() == plain.tolist()


def test_stop_strings_end_rows_where_plain_generate_ends_them(quickstart: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "runs/quickstart/target")
    model = AutoModelForCausalLM.from_pretrained(quickstart / "runs/quickstart/target")
    custom = method("speculative", drafter=quickstart / "runs/quickstart/drafter")
    tokenizer.padding_side = "left"
    inputs = tokenizer(["What does", "the"], return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=24, pad_token_id=0)[0, inputs["input_ids"].shape[1] :]
    pieces = [tokenizer.decode(token) for token in plain]
    wanted = next(one + two for one, two in itertools.pairwise(pieces[4:]) if (one + two).isascii())  # of two tokens
    rule = StopStringCriteria(tokenizer, [wanted])
    output = check_same(model, custom, **inputs, max_new_tokens=24, stopping_criteria=[rule], pad_token_id=0)
    assert wanted in tokenizer.decode(output[0])
    with pytest.raises(ValueError, match="could not locate a tokenizer"):  # transformers' own, and why README warns
        model.generate(**inputs, max_new_tokens=4, stop_strings=[wanted], tokenizer=tokenizer, custom_generate=custom)


def test_importing_the_folder_imports_nothing_else() -> None:
    program = "import sys; sys.modules.update(torch=None, transformers=None, numpy=None); import draftsmith.decode"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'methd'"):
        _ = sys.modules["draftsmith.decode"].methd
