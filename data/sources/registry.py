"""Registry of known corpora: location, licence and row format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..conversations import Dialogue
from .files import Row
from .forms import read_dialogue, usable_columns

_RAW = "https://raw.githubusercontent.com"
_FASTCHAT = f"{_RAW}/lm-sys/FastChat/main/fastchat/llm_judge/data"
# Prompts from the code of the multi-candidate paper (arXiv 2401.06706) and of Spec-Bench (arXiv 2401.07851).
_GERMAN_TO_ENGLISH = "Translate German to English: {de}"
_ENGLISH_TO_GERMAN = "Translate the input English sentence into German.\nInput: {en}\nOutput: "
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Corpus in the registry of known corpora.

    Attributes:
        hub: Id of the hub dataset, or None if `file` is a URL.
        columns: Columns to load.
        use: Purpose of the corpus, "train" or "evaluate".
        prompt: Format string that builds the question from columns, if no column contains it.
        groups: Categories of the prompts, if they are fixed.
        every_turn: Whether to evaluate every question of a conversation, not only the first one.
        adapter: Function that converts rows that have all `columns`. `read_dialogue` converts other rows.
    """

    name: str
    hub: str | None
    columns: tuple[str, ...]
    licence: str
    use: str = "train"
    gated: bool = False
    config: str | None = None
    split: str | None = "train"
    revision: str | None = None
    file: str | None = None
    prompt: str = ""
    note: str = ""
    groups: tuple[str, ...] = ()
    every_turn: bool = False
    adapter: "Callable[[Corpus, Row], Dialogue] | None" = None

    def usable_columns(self, present: Sequence[str]) -> Sequence[str]:
        """Return the columns to load from a table with the columns `present`."""
        return present if self.adapter is not None and self._matches_columns(present) else usable_columns(present)

    def read(self, row: Row) -> Dialogue:
        """Convert a row to a dialogue, with the adapter of the corpus if the columns match."""
        if self.adapter is None or not isinstance(row.value, Mapping) or not self._matches_columns(tuple(row.value)):
            return read_dialogue(row)
        return replace(self.adapter(self, row), form=" + ".join(self.columns))

    def _matches_columns(self, present: Sequence[str]) -> bool:
        return set(self.columns) <= set(present)


def find_corpus(name: str) -> Corpus | None:
    """Find a corpus by name or hub id, ignoring case and treating _ as -; None if it is not registered."""

    def normalize(name: str) -> str:
        return name.lower().replace("_", "-")

    by_hub = (corpus for corpus in CORPORA.values() if normalize(corpus.hub or "") == normalize(name) != "")
    return CORPORA.get(normalize(name)) or next(by_hub, None)


def _text(row: Row, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{row.location}: `{column}` must be a string, found {type(value).__name__}")
    return value


def _question(row: Row, prompt: str, *references: str) -> Dialogue:
    identity = row.name if row.value.get("id") is None else row.value["id"]
    return Dialogue(str(identity), (("user", prompt),), "", references=tuple(filter(None, references)))


def _summary(corpus: Corpus, row: Row) -> Dialogue:
    article, highlights = (_text(row, name, row.value[name]) for name in ("article", "highlights"))
    return _question(row, corpus.prompt.format(article=article), highlights)


def _translation(corpus: Corpus, row: Row) -> Dialogue:
    pair = row.value["translation"]
    if not isinstance(pair, Mapping):
        raise ValueError(f"{row.location}: `translation` must be an object {{de, en}}, found {type(pair).__name__}")
    texts = {name: _text(row, f"translation.{name}", pair.get(name)) for name in ("de", "en")}
    asked_for = "en" if "{de}" in corpus.prompt else "de"
    return _question(row, corpus.prompt.format(**texts), texts[asked_for])


def _read_piqa(corpus: Corpus, row: Row) -> Dialogue:
    """Convert a row of PIQA. There is no reference if the label is -1 (test split) or missing."""
    label = row.value.get("label")
    right = row.value.get(f"sol{int(label) + 1}") if label in (0, 1) else None
    return _question(row, _text(row, "goal", row.value["goal"]), *([right] if isinstance(right, str) else []))


def _alpaca_eval(corpus: Corpus, row: Row) -> Dialogue:
    category = row.value["dataset"]
    return replace(read_dialogue(row), category=category if isinstance(category, str) else "")


def _spec_bench(corpus: Corpus, row: Row) -> Dialogue:
    """Convert a row of Spec-Bench, and combine the eight categories of MT-bench into one."""
    dialogue = read_dialogue(row)
    return replace(dialogue, category="mt_bench") if dialogue.category in MT_BENCH_CATEGORIES else dialogue


_UNSTATED = "none stated"
_ENTRIES = (
    # training corpora
    Corpus("sharegpt-v3", "anon8231489123/ShareGPT_Vicuna_unfiltered", ("id", "conversations"), "apache-2.0",
           file="ShareGPT_V3_unfiltered_cleaned_split.json",
           note="licence of the repository; the origin of the text is unclear"),
    Corpus("sharegpt-v4.3", "Aeala/ShareGPT_Vicuna_unfiltered", ("id", "conversations"), "unverified",
           file="ShareGPT_V4.3_unfiltered_cleaned_split.json",
           note="licence unverified; the origin of the text is unclear"),
    Corpus("lmsys-chat-1m", "lmsys/lmsys-chat-1m", ("conversation_id", "conversation"),
           "LMSYS-Chat-1M Dataset License Agreement", gated=True, note="the terms forbid redistribution"),
    Corpus("wildchat-1m", "allenai/WildChat-1M", ("conversation_hash", "conversation"), "odc-by",
           note="earlier revisions were gated under the AI2 ImpACT licence"),
    Corpus("ultrachat-200k", "HuggingFaceH4/ultrachat_200k", ("prompt_id", "messages"), "mit", split="train_sft"),
    Corpus("open-perfectblend", "mlabonne/open-perfectblend", ("conversations", "source"), "apache-2.0",
           note="a mixture of chat, instructions, mathematics and code (arXiv 2409.20370)"),
    Corpus("alpaca", "tatsu-lab/alpaca", ("instruction", "input", "output"), "cc-by-nc-4.0"),
    Corpus("chatalpaca", "robinsmits/ChatAlpaca-20K", ("id", "messages"), "apache-2.0", every_turn=True,
           note="a copy of github.com/icip-cas/ChatAlpaca, whose files can be passed as `path`"),
    Corpus("chatgpt-prompts", "MohamedRashad/ChatGPT-prompts", ("human_prompt", "chatgpt_response"), "unverified",
           note="licence unverified"),
    Corpus("chatbot-instruction-prompts", "alespalla/chatbot_instruction_prompts", ("prompt", "response"),
           "unverified", note="licence unverified; a mixture of Alpaca and other corpora"),
    # evaluation sets
    Corpus("cnn-dailymail", "abisee/cnn_dailymail", ("article", "highlights"), "apache-2.0", use="evaluate",
           config="3.0.0", split="test", prompt="Summarize: {article}", adapter=_summary),
    Corpus("wmt14-de-en", "wmt/wmt14", ("translation",), _UNSTATED, use="evaluate", config="de-en", split="test",
           prompt=_GERMAN_TO_ENGLISH, adapter=_translation),
    Corpus("wmt14-en-de", "wmt/wmt14", ("translation",), _UNSTATED, use="evaluate", config="de-en", split="test",
           prompt=_ENGLISH_TO_GERMAN, note="the hub has one config for both directions", adapter=_translation),
    Corpus("t5-cnn-dailymail", "abisee/cnn_dailymail", ("article", "highlights"), "apache-2.0", use="evaluate",
           config="3.0.0", split="test", prompt="summarize: {article}", note="prompt format of T5's training",
           adapter=_summary),
    Corpus("t5-wmt14-en-de", "wmt/wmt14", ("translation",), _UNSTATED, use="evaluate", config="de-en", split="test",
           prompt="translate English to German: {en}", note="prompt format of T5's training", adapter=_translation),
    Corpus("piqa", "ybisk/piqa", ("goal", "sol1", "sol2"), _UNSTATED, use="evaluate", split="validation",
           revision="refs/convert/parquet", adapter=_read_piqa,
           note="the main revision is a loading script, which `datasets` no longer supports"),
    Corpus("web-questions", "stanfordnlp/web_questions", ("question", "answers"), _UNSTATED, use="evaluate",
           split="test"),
    Corpus("alpaca-eval", "tatsu-lab/alpaca_eval", ("instruction", "dataset"), "cc-by-nc-4.0", use="evaluate",
           file="https://huggingface.co/datasets/tatsu-lab/alpaca_eval/resolve/main/alpaca_eval.json",
           note="loaded from its file, because the repository has a loading script", adapter=_alpaca_eval,
           groups=("helpful_base", "koala", "oasst", "selfinstruct", "vicuna")),
    Corpus("vicuna-80", None, ("category", "turns"), "apache-2.0", use="evaluate",
           file=f"{_FASTCHAT}/vicuna_bench/question.jsonl",
           groups=("generic", "knowledge", "roleplay", "common-sense", "fermi", "counterfactual", "coding", "math",
                   "writing")),
    Corpus("mt-bench", "HuggingFaceH4/mt_bench_prompts", ("category", "prompt", "reference"), "apache-2.0",
           use="evaluate", groups=MT_BENCH_CATEGORIES, every_turn=True,
           note=f"a copy of {_FASTCHAT}/mt_bench/question.jsonl, which can be passed as `path`"),
    Corpus("spec-bench", None, ("category", "turns"), "apache-2.0", use="evaluate",
           file=f"{_RAW}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl", adapter=_spec_bench, every_turn=True,
           groups=("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")),
)  # fmt: skip
CORPORA: dict[str, Corpus] = {corpus.name: corpus for corpus in _ENTRIES}
