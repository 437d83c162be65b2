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
    metrics = {m.name.removeprefix(prefix): m for m in engine.get_metrics() if m.name.startswith(prefix)}
    if not metrics:
        return {}
    return {
        "drafts": metrics["drafts"].value,
        "drafted": metrics["draft_tokens"].value,
        "accepted": metrics["accepted_tokens_per_pos"].values,
    }


def main() -> None:
    request = json.load(sys.stdin)
    engine = LLM(request["target"], speculative_config=request["speculative"], **SETTINGS)
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    tokens = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]
    if request["save"]:
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        tensors = {name: tensor.detach().clone() for name, tensor in runner.drafter.model.named_parameters()}
        save_file(tensors, request["save"])
    print(json.dumps({"said": tokens} | counted(engine)))


if __name__ == "__main__":
    main()
