"""Run vLLM with a target and a drafting method, in a separate environment with its packages.

The standard input is one JSON object: `target`, `speculative` (vLLM's speculative config, or null), `prompts` (token
ids), `tokens` (new tokens per prompt) and `save` (a file for the drafter's tensors as loaded by vLLM, or null). The
last line of the output is a JSON object.
"""

import json
import sys
from typing import Any

from safetensors.torch import save_file
from vllm import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "disable_log_stats": False,
}


def counted(engine: LLM) -> dict[str, Any]:
    """Return the numbers of drafts, draft tokens, and accepted tokens by position, if vLLM drafted."""
    prefix = "vllm:spec_decode_num_"
    found = {one.name.removeprefix(prefix): one for one in engine.get_metrics() if one.name.startswith(prefix)}
    if not found:
        return {}
    return {
        "drafts": found["drafts"].value,
        "drafted": found["draft_tokens"].value,
        "accepted": found["accepted_tokens_per_pos"].values,
    }


def main() -> None:
    asked = json.load(sys.stdin)
    engine = LLM(asked["target"], speculative_config=asked["speculative"], **SETTINGS)
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    said = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, sampling, use_tqdm=False)]
    if asked["save"]:
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        tensors = {name: tensor.detach().clone() for name, tensor in runner.drafter.model.named_parameters()}
        save_file(tensors, asked["save"])
    print(json.dumps({"said": said} | counted(engine)))


if __name__ == "__main__":
    main()
