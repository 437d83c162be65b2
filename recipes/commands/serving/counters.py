"""What a server counts of its drafts, on its own page of metrics.

vLLM counts a draft for each step of a request that had one, and what it accepts beyond the token that ends a text;
llama.cpp, started with `--metrics`, counts under the same names. Both speak of all requests since they started, so that
their pages are read before and after.
"""

from __future__ import annotations

import re
from urllib.error import URLError
from urllib.request import urlopen

_LINE = re.compile(r"^(?:vllm|llamacpp):(\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+)$")
_POSITION = re.compile(r'position="(\d+)"')
_NAMES = {
    "drafts": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def read_counters(url: str, timeout: float = 10.0) -> dict[str, float]:
    """`drafts`, `drafted`, `accepted` and `accepted 0`, `accepted 1` … by position; empty where there is no such page,
    or a server that does not speculate."""
    try:
        with urlopen(url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=timeout) as page:
            text = page.read().decode(errors="replace")
    except (URLError, OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        position = _POSITION.search(labels or "")
        known = [key for key, theirs in _NAMES.items() if theirs == name]
        if name == _BY_POSITION and position is not None:
            known = [f"accepted {position.group(1)}"]
        for key in known:  # one line for each engine of the server
            found[key] = found.get(key, 0.0) + float(value)
    return found


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was counted between two readings."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
