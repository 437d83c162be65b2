"""Redaction of passwords, keys and tokens in output and files."""

import re
from collections.abc import Iterable
from typing import Any

REDACTED = "<redacted>"
SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})"
)
"""Pattern of tokens with a known prefix (Hugging Face, OpenAI, GitHub, Amazon)."""
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
"""Pattern of the name, separator and value of a secret, such as `api_key: …` or `"Authorization": "Basic …"`."""
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=\-]{6,}", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)(?:[^/?#\s]+|[^/?#\s@:\[]+:(?!\d*[/?#])[^\s\"'<>]{1,500})@")
"""Pattern of user name and password in URLs, including passwords that contain a slash."""
_IN_QUERY = re.compile(
    r"([?&;#](?:(?:[^=&#\s]{0,40}[\-_.])?(?:auth|key|pass|pwd|sig|jwt)"
    r"|[^=&#\s]{0,40}(?:token|secret|password|passwd|passphrase|credentials?|authorization|(?:api|access)[_\-]?key(?:id)?"
    r"|signature))=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Check if a key, such as `hub.token`, is the name of a secret."""
    return any(_KEY.search(part) for part in (key, *key.split(".")))


def redacted(text: str) -> str:
    """Replace known token formats, values of secret keys and credentials in URLs with `<redacted>`."""
    text = _USER_INFO.sub(REDACTED + "@", SECRET_VALUE.sub(REDACTED, text))
    for pattern in (_IN_QUERY, _NAMED, _BEARER):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def without_secrets(value: Any, secret: bool = False) -> Any:
    """Redact strings in nested dictionaries and lists; replace strings under secret keys (all if `secret`) entirely."""
    if isinstance(value, dict):
        return {key: without_secrets(item, secret or is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, secret) for item in value]
    return (REDACTED if secret and value else redacted(value)) if isinstance(value, str) else value


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Redact command-line arguments, including the values of `key=value` and `--key value` for secret keys."""
    cleaned, hide_next = list[str](), False
    for word in arguments:
        key, equals, value = word.partition("=")
        secret = is_secret(key.lstrip("-").replace("-", "_"))
        if hide_next and not word.startswith("-"):
            word = REDACTED
        elif equals and secret and value:
            word = f"{key}={REDACTED}"
        cleaned.append(redacted(word))
        hide_next = word.startswith("-") and not equals and secret
    return cleaned
