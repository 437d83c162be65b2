"""The forms of exports by name, known without what writes them, which takes seconds to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """A form that another program reads."""

    name: str
    kind: str
    """Of the artifacts that it is for."""
    summary: str
    """What it is, in one line."""
    readers: str
    """Which programs read it, with their versions."""
    options: tuple[str, ...] = ()
    """Names of the `ExportOptions` that it heeds."""
    native: bool = False
    """Whether this package's own loaders read it as they read the artifact."""


_INSIDE = "draftsmith, inside generate of transformers ≥ 5.17"
FORMS = {
    form.name: form
    for form in (
        Form(
            "transformers",
            "drafter",
            "Assistant for assisted generation, with its settings in generation_config.json",
            "transformers ≥ 5",
            ("target", "speculative_tokens", "merge"),
            native=True,
        ),
        Form(
            "vllm-sglang",
            "drafter",
            "Draft model, checked against its target",
            "vLLM 0.27 to 0.33 (draft_model), SGLang since April 2026 (STANDALONE)",
            ("target", "speculative_tokens"),
            native=True,
        ),
        Form(
            "gguf",
            "drafter",
            "GGUF file, by llama.cpp's own converter",
            "llama.cpp of the version of the converter, and later (run with commit 0c1e57098)",
            ("target", "speculative_tokens", "llama_cpp"),
        ),
        Form(
            "medusa",
            "heads",
            "Medusa heads, version 1: each with its own projection, under the names of the first release",
            "TGI ≥ 2.0, TensorRT-LLM ≥ 0.11, vLLM 0.25 to 0.32",
            ("target",),
            native=True,
        ),
        Form(
            "medusa-vllm",
            "heads",
            "Medusa heads under the names of vLLM's own module",
            "vLLM 0.10 to 0.32",
            ("target",),
        ),
        Form(
            "medusa-2",
            "heads",
            "Medusa heads, version 2: without projections, they use the target's",
            "TGI ≥ 2.0 (one block a head)",
            ("target",),
            native=True,
        ),
        Form(
            "eagle3",
            "heads",
            "EAGLE-3 heads, whose config says to each engine which layers they read",
            "vLLM 0.33 (eagle3), SGLang 0.5.23 (EAGLE3)",
            ("target", "speculative_tokens"),
            native=True,
        ),
        Form(
            "eagle3-gguf",
            "heads",
            "EAGLE-3 heads as a GGUF file, by llama.cpp's own converter",
            "llama.cpp with --spec-type draft-eagle3 (run with b11434)",
            ("target", "speculative_tokens", "llama_cpp"),
        ),
        Form(
            "vllm-bigrams",
            "table",
            "The likeliest token after each token, and a proposer that drafts from it",
            "vLLM ≥ 0.22 (method custom_class)",
            ("target", "speculative_tokens"),
        ),
        Form(
            "custom-generate",
            "heads",
            "Heads with the method medusa, for `generate(custom_generate=…)`",
            _INSIDE,
            ("target",),
        ),
        Form(
            "custom-generate-bigrams",
            "table",
            "A table with the method bigram, for `generate(custom_generate=…)`",
            _INSIDE,
            ("target", "speculative_tokens"),
        ),
    )
}


def option_name(name: str) -> str:
    """An option as it is typed."""
    return "--merge/--no-merge" if name == "merge" else f"--{name.replace('_', '-')}"
