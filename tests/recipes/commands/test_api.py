"""Public functions of the package, called for a tiny pair."""

import subprocess
import sys
from pathlib import Path

import draftsmith
import pytest


def test_importing_the_package_loads_no_other_module() -> None:
    code = "import draftsmith, sys; print([name for name in sys.modules if name.startswith(('draftsmith.', 'torch'))])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_the_five_functions(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, drafter, prompts = (str(tiny_pair / name) for name in ("target", "drafter", "corpus/heldout.jsonl"))
    pair = draftsmith.load_pair(target, drafter=drafter)
    greedy = draftsmith.generate(pair, "the tree keeps", max_new_tokens=24)
    fast = draftsmith.generate(
        pair, [{"role": "user", "content": "the tree keeps"}], "speculative", max_new_tokens=24, gamma=3
    )
    assert greedy.token_ids == fast.token_ids
    assert greedy.acceptance_length == 1 < fast.acceptance_length
    assert fast.tokens_per_second > 0
    sampled = [draftsmith.generate(pair, "the tree", temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(ValueError, match="requires `heads`"):
        draftsmith.generate(pair, "the tree", "medusa")

    known = draftsmith.methods()
    assert known["speculative"] == {
        "needs": ("drafter",), "lossless": True, "options": known["speculative"]["options"] | {"gamma": 4}
    }  # fmt: skip
    results = draftsmith.evaluate(target, prompts, ["speculative"], drafter=drafter, limit=2, max_new_tokens=8)
    assert [row["method"] for row in results["methods"]] == ["autoregressive", "speculative"]
    assert draftsmith.export(drafter, "transformers", tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out" / "SERVING.md").is_file()
    with pytest.raises(AttributeError, match="generrate"):
        draftsmith.generrate  # noqa: B018
