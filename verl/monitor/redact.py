"""Settings without their secrets, for whatever is written or sent."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_SECRET = re.compile(
    r"(^|_)(password|passwd|passphrase|secrets?|credentials?|auth|bearer|(api|access|private)_?keys?)(_|$)"
)
# counts and ids of model tokens are numbers; a token that opens a door is text
_TOKEN = re.compile(r"(^|_)tokens?(_|$)")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(value: Any) -> Any:
    """A copy of nested dicts, lists and plain values in which what a key names as a secret is `<redacted>`.

    A secret's key has a word such as password, secret, credential, auth or api_key, in any spelling; a key with the
    word token hides text only. Logins inside URLs (https://name:password@host) go too, wherever they stand.
    """
    if isinstance(value, dict):
        return {key: _redact_entry(str(key), entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact(entry) for entry in value]
    return _URL_LOGIN.sub(REDACTED, value) if isinstance(value, str) else value


def redact_argument(argument: str) -> str:
    """A command-line argument such as `a.api_key=...` or `a={api_key: ...}`, cut off after a secret's key."""
    for key in re.finditer(r"([\w.+-]+)[\"']?\s*[:=]", argument):
        if _SECRET.search(_words(key[1])) or _TOKEN.search(_words(key[1])):
            return argument[: key.end()] + REDACTED
    return redact(argument)


def _words(key: str) -> str:
    return re.sub(r"[-.+]", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)).lower()


def _redact_entry(key: str, value: Any) -> Any:
    words = _words(key)
    if value is None or isinstance(value, bool):
        return value
    if _SECRET.search(words):
        return REDACTED
    return _hide_text(value) if _TOKEN.search(words) else redact(value)


def _hide_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hide_text(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_text(entry) for entry in value]
    return REDACTED if isinstance(value, str | bytes) else value
