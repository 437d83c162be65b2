"""Static checks of Medusa heads, and of the multi-token prediction (MTP) layers of a checkpoint, for each engine.

The rules follow vLLM 0.32's `transformers_utils/configs/medusa.py` and `models/medusa.py`, vLLM 0.33's
`models/deepseek_mtp.py`, and SGLang 0.5.23's `models/qwen3_5_mtp.py`.
"""

import re
from pathlib import Path
from typing import Any

from ..artifact.model_ref import weight_files
from ..heads.layouts import read_heads
from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json, shards_of
from ..verify.inspect import header_shapes
from .sides import Diagnosis, Finding, ModelInfo, check_sizes, degrade, refuse

MEDUSA_READERS = {
    "vllm": "vLLM 0.25 to 0.32, method medusa (0.33 has no Medusa)",
    "draftsmith": "draftsmith, as `heads` of an evaluation",
}
MTP_READERS = {"vllm": "vLLM 0.33, method mtp", "sglang": "SGLang 0.5.23, NEXTN"}
"""Engines that decode with Medusa heads or MTP layers, and the versions whose rules are checked."""
_NUM_HEADS, _VLLM_HEADS = ("medusa_num_heads", "num_medusa_heads"), 5  # config keys, and the default of vLLM


def examine_medusa(target: ModelInfo, source: str, folder: Path) -> Diagnosis:
    """Run all checks of the Medusa heads in a folder. Raises ValueError if their tensors are invalid."""
    heads, path = read_heads(folder), folder / CONFIG_FILE
    config = read_json(path) if path.is_file() else {}
    sizes = {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size or target.vocab_size}
    findings = [*check_sizes(target, sizes, MEDUSA_READERS)]
    if heads.num_heads != _VLLM_HEADS and not any(name in config for name in _NUM_HEADS):
        problem, effects = f"the config has no {_NUM_HEADS[0]}", degrade(f"it creates {_VLLM_HEADS} heads", "vllm")
        findings.append(Finding("number of heads", problem, "", f"{heads.num_heads} in the files", effects))
    if heads.disagreements:
        effects = degrade("it follows the config: tensors are missing or not loaded", "vllm")
        findings.append(Finding("config", "the config contradicts the tensors", "", heads.disagreements[0], effects))
    if not config.get("medusa_fc_bias"):
        effects = degrade("it ignores the biases of the heads: set medusa_fc_bias: true", "vllm")
        findings.append(Finding("biases", "the config has no medusa_fc_bias", "", "biases in the files", effects))
    return Diagnosis(target.source, source, tuple(findings), MEDUSA_READERS)


def mtp_layers(folder: Path) -> int:
    """Return the number of MTP layers that the config in a folder names."""
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    text: dict[str, Any] = config.get("text_config") or config
    return int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0)


def examine_mtp(target: ModelInfo, source: str, folder: Path) -> Diagnosis:
    """Run all checks of the MTP layers of the checkpoint in a folder, using its index or its safetensors headers."""
    index, count, findings = folder / WHOLE_FILES[1], mtp_layers(folder), list[Finding]()
    config, first = read_json(folder / CONFIG_FILE), target.config.num_hidden_layers
    names = [*(shards_of(index) if index.is_file() else header_shapes(weight_files(folder)))]
    own = re.compile(r"(^|\.)mtp\.|layers\.(" + "|".join(str(first + number) for number in range(count)) + r")\.")
    tensors = [name for name in names if own.search(name)]
    if names and not tensors:
        effects = degrade("the layers remain uninitialised, so that nothing is accepted", *MTP_READERS)
        effects |= refuse("models of DeepSeek's form are refused: use a checkpoint with these tensors", "vllm")
        problem = "the files contain no MTP tensors, as after a quantization that dropped them"
        findings.append(Finding("MTP tensors", problem, "", f"{count} MTP layers in the config", effects))
    elif tensors and config.get("quantization_config") and not re.search("scale|packed", " ".join(tensors)):
        effects = degrade("it may build quantized MTP layers and drop these tensors: nothing is accepted", *MTP_READERS)
        problem, method = "the target is quantized, but its MTP layers are not", config["quantization_config"]
        findings.append(Finding("MTP quantization", problem, str(method.get("quant_method")), "", effects))
    return Diagnosis(target.source, source, tuple(findings), MTP_READERS)
