"""Secrets struck out of what is written or said: passwords, keys and tokens, by their names, forms and places."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

REDACTED = "<redacted>"
SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})"
)
"""Tokens that can be told by how they begin: of Hugging Face, OpenAI, GitHub, Amazon."""
_NAMES = (
    r"secrets?|passwords?|passwd|passphrase|credentials?|authorization|api[_\-]?keys?"
    r"|(?:access|private|secret)[_\-]?keys?|(?:access|auth|api|hf|hub|bearer)[_\-]?tokens?"
)
_KEY = re.compile(rf"(?:^|[_\-.])(?:{_NAMES})(?:$|[_\-.])|^(?:token|auth)$", re.IGNORECASE)
_NAMED = re.compile(
    rf"((?:(?<![A-Za-z0-9])(?:{_NAMES})"
    r"(?:[_\-.][\w.\-]{0,80})?|(?<=[{,\"'])\s*(?:token|auth)|(?<![\w.\-])(?:token|auth)(?==))\\?[\"']?\s*[:=]\s*)"
    r"(?!<redacted>)(?:\\?\"[^\"]{0,500}\"|\\?'[^']{0,500}'|(?:(?:bearer|basic|token)\s+)?[^\s,;&\"'}\])\\]+)",
    re.IGNORECASE,
)
"""`api_key: …`, `password=…`, `"Authorization": "Basic …"` in a text: the name with its sign, and the value."""
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=\-]{6,}", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)(?:[^/?#\s]+|[^/?#\s@:\[]+:(?!\d*[/?#])[^\s\"'<>]{1,500})@")
"""Up to the last @ before the path; a password with a slash in it, which is no port, also up to the last @ at all."""
_IN_QUERY = re.compile(
    r"([?&;#](?:(?:[^=&#\s]{0,40}[\-_.])?(?:auth|key|pass|pwd|sig|jwt)"
    r"|[^=&#\s]{0,40}(?:token|secret|password|passwd|passphrase|credentials?|authorization|(?:api|access)[_\-]?key(?:id)?"
    r"|signature))=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Whether what stands under this key, such as `hub.token`, is nobody's business."""
    return any(_KEY.search(part) for part in (key, *key.split(".")))


def redacted(text: str) -> str:
    """A text without tokens of known forms, what follows the name of a secret and a colon or an equals sign, and what
    a URL has before its host or under such names in its query."""
    text = _USER_INFO.sub(REDACTED + "@", SECRET_VALUE.sub(REDACTED, text))
    for pattern in (_IN_QUERY, _NAMED, _BEARER):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def without_secrets(value: Any, secret: bool = False) -> Any:
    """`redacted`, in all texts of nested mappings and lists; texts under a key that names a secret are struck out."""
    if isinstance(value, dict):
        return {key: without_secrets(item, secret or is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, secret) for item in value]
    return (REDACTED if secret and value else redacted(value)) if isinstance(value, str) else value


def redacted_words(words: Iterable[str]) -> list[str]:
    """Words of a command line: also the whole of `key=value`, and what follows `--key`, where the key is a secret's."""
    cleaned, hide_next = list[str](), False
    for word in words:
        key, equals, value = word.partition("=")
        secret = is_secret(key.lstrip("-").replace("-", "_"))
        if hide_next and not word.startswith("-"):
            word = REDACTED
        elif equals and secret and value:
            word = f"{key}={REDACTED}"
        cleaned.append(redacted(word))
        hide_next = word.startswith("-") and not equals and secret
    return cleaned
