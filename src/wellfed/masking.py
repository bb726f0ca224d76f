"""Masks secrets: values under secret names, passwords in URLs, and keys of well-known forms.

`learn` registers a value, which `hidden` then masks in all later texts of this process.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from io import TextIOWrapper
from typing import Any
from urllib.parse import quote, unquote

SECRET_SHOWN = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_WORD = re.compile(r"(password|passwd|passphrase|passcode|secret|credential)s?$")
_JOINED = re.compile(
    r"(api|access|secret|private|auth|account|signing|encryption|subscription|license|ssh|service)keys?$"
    r"|(api|access|auth|bearer|refresh|session|security|personal|id|hf|csrf)tokens?$|session(id|cookie)$"
    r"|accesskeyid$"
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAST = _names("pwd auth oauth authorization dsn cookie cookies bearer jwt")
_PASS_OWNERS = _names("db database user smtp mail proxy ftp ssh login admin root")
_TEXT_TOKENS = _names(
    """
    max min num n per pad bos eos cls sep mask unk special start end stop blank class first last next prefix image
    patch register query distill decoder encoder separator space text language time new
    """
)
"""First words of ``<word>_token`` names that belong to text, not to secrets."""
_DATA_KEYS = _names(
    """
    sort label image target input output text column primary foreign cache dict batch group join feature sample query
    value id metric monitor state name file index time audio item hot short best map lookup public data field tensor
    row node hash log loss
    """
)
"""First words of ``<word>_key`` names that belong to data, not to secrets."""
_COUNT_WORDS = _names("max min num n size count")
"""First words of names that are counts."""
_DESCRIPTIVE = _names("size count length len dim type id name path file url uri mode method ratio rate frac")
"""Last words of names that describe a secret without containing it."""
_DOUBTFUL = frozenset({"key", "session", "sig", "signature", "pass"})
_REFERENCE = re.compile(r"\$\{([^{}]|\$\{[^{}]*\})*\}")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([^},]+)")
_LOOKS_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{16,}")
_URL_PASSWORD = re.compile(r"(\b[A-Za-z][\w+.-]*://[^\s/?#'\"@:]*):([^\s/?#'\"]+)(?=@)")
_URL_USER = re.compile(r"(\bhttps?://)(?!git@|[$<{%])([^\s/?#'\"@:]+)(?=@)")
"""A user without a password, which is mostly a token. Variables such as ``$TOKEN`` stay."""
_URL_PARAMETER = re.compile(r"([?&;#]|&amp;)([\w.%-]+)=([^\s&;#'\"<>\\,})\]]+)")
_URL_HOOK = re.compile(r"(\bhooks\.slack\.com/(?:services|workflows|triggers)/)[\w/+-]+")
"""A webhook of Slack, whose path is its secret."""
_PARAMETERS = frozenset({"sig", "signature", "key", "xamzsignature", "xamzcredential", "xgoogsignature"})
_KNOWN_FORM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|pypi-Ag[\w-]{16,}|wandb_v1_[\w-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abpr]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_BEARER = re.compile(r"\b(Bearer)(\s+|%20)(?=[\w+/=.~-]*\d)[\w+/=.~-]{8,}", re.IGNORECASE)


@cache
def is_secret_name(name: str) -> bool:
    """Returns whether a value under this name is a secret, by the words of its snake, kebab or camel case."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words or words[0] in _COUNT_WORDS:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _JOINED.search("".join(words)):
        return True
    if last in _DESCRIPTIVE:
        return False
    if last in _LAST or any(map(_WORD.search, words)):
        return True
    if last == "token":
        return before not in _TEXT_TOKENS
    if last == "key":
        return bool(before) and before not in _DATA_KEYS
    return last == "pass" and before in _PASS_OWNERS


def is_secret(name: str, value: object) -> bool:
    """Returns whether a value must be masked because of its name; False for references such as ``${oc.env:NAME}``."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    text = str(value)
    if _REFERENCE.fullmatch(text) or text in (SECRET_SHOWN, "???"):
        return False
    words = _WORDS.findall(name.rpartition(".")[2])
    is_doubtful = bool(words) and words[-1].lower() in _DOUBTFUL and _LOOKS_RANDOM.fullmatch(text) is not None
    return is_doubtful or is_secret_name(name)


def masked(tree: Any, sources: Any = None) -> Any:
    """Returns the tree with secrets as ``***``; interpolations such as ``${oc.env:KEY}`` stay.

    Args:
        sources: the same tree before interpolations were resolved.
    """
    return _masked(tree, sources, set())


def secrets_of(tree: Any, sources: Any = None) -> set[str]:
    """Returns the values that `masked` replaces, as texts."""
    found: set[str] = set()
    _masked(tree, sources, found)
    return found


def _masked(tree: Any, sources: Any, found: set[str], name: str = "", *, is_inside: bool = False) -> Any:
    """Returns the tree with secrets masked, and adds them to ``found``.

    Args:
        name: key of the tree in its parent.
        is_inside: a parent has the name of a secret.
    """
    if isinstance(tree, Mapping):
        beside, is_inside = sources if isinstance(sources, Mapping) else {}, is_inside or is_secret_name(name)
        return {
            key: _masked(value, beside.get(key), found, str(key), is_inside=is_inside) for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        is_alike = isinstance(sources, list | tuple) and len(sources) == len(tree)
        pairs = zip(tree, sources if is_alike else [None] * len(tree), strict=True)
        return [_masked(item, source, found, name, is_inside=is_inside) for item, source in pairs]
    is_of_all = is_inside and name != "_target_" and is_secret("secret", tree)
    if is_of_all or is_secret(name, tree) or _comes_from_a_secret(tree, sources):
        found.add(str(tree))
        return SECRET_SHOWN
    if isinstance(tree, str):
        found.update(unquote(text) for _, text in _URL_PASSWORD.findall(tree))
        return hidden(tree)
    return tree


def _comes_from_a_secret(value: object, source: object) -> bool:
    """Returns whether the interpolation that gave the value reads an environment variable with a secret name."""
    if not isinstance(source, str) or source == value or not is_secret("secret", value):
        return False
    return any(map(is_secret_name, _FROM_ENVIRONMENT.findall(source)))


_learnt: set[str] = set()
_pattern: re.Pattern[str] | None = None
"""Matches every form of the learnt values."""


def learn(values: set[str] | frozenset[str]) -> None:
    """Masks these values in all later texts of this process, however they are escaped.

    Short values are skipped, since they may occur by chance: fewer than 6 characters, or 8 if all are letters.
    """
    global _pattern  # noqa: PLW0603  what a process has seen
    new = {value for value in values if len(value) >= (6 if re.search(r"[^a-z]", value) else 8)} - _learnt
    if not new:
        return
    _learnt.update(new)
    forms = {form for value in _learnt for form in _forms(value)}
    _pattern = re.compile("|".join(map(_bounded, sorted(forms, key=len, reverse=True))))


def _forms(value: str) -> Iterator[str]:
    """Returns the value as JSON, HTML, URLs, Python and yaml write it."""
    import html  # few commands see a secret

    for text in (value, *([value.replace("\n", " ")] if "\n" in value else [])):
        yield from (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1])
        yield from (html.escape(text), html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
        yield from (quote(text), quote(text, safe=""), text.replace("'", "''"), text.replace("'", "\\'"))


def _bounded(form: str) -> str:
    """Returns the pattern of a form. It matches whole words and numbers only."""
    start, end = r"(?<![A-Za-z0-9])" if form[0].isalnum() else "", r"(?![A-Za-z0-9])" if form[-1].isalnum() else ""
    number = r"(?<![.\d])" if form.isdecimal() else ""
    return f"{start}{number}{re.escape(form)}{end}"


def hidden(text: str) -> str:
    """Returns the text with learnt values, passwords in URLs and keys of well-known forms masked."""
    if _pattern is not None:
        text = _pattern.sub(SECRET_SHOWN, text)
    if "://" in text:
        text = _URL_USER.sub(rf"\1{SECRET_SHOWN}", _URL_PASSWORD.sub(rf"\1:{SECRET_SHOWN}", text))
        text = _URL_HOOK.sub(rf"\1{SECRET_SHOWN}", text)
    if "=" in text:
        text = _URL_PARAMETER.sub(_masked_parameter, text)
    return _BEARER.sub(rf"\1\2{SECRET_SHOWN}", _KNOWN_FORM.sub(SECRET_SHOWN, text))


def _masked_parameter(found: re.Match[str]) -> str:
    sign, name, value = found.groups()
    plain = re.sub(r"\W|_", "", unquote(name)).lower()
    is_one = plain in _PARAMETERS or (is_secret_name(unquote(name)) and is_secret(unquote(name), value))
    return f"{sign}{name}={SECRET_SHOWN}" if is_one else found.group()


def hidden_in(value: Any) -> Any:
    """Returns a nested value with all texts `hidden`."""
    return map_texts(value, hidden)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns nested values with each text changed; keys are kept."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(item, change) for key, item in value.items()}
    return type(value)(map_texts(item, change) for item in value) if type(value) in (list, tuple) else value


class MaskedFormatter(logging.Formatter):
    """A log formatter that masks secrets in lines and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats the record and masks secrets in it."""
        return hidden(super().format(record))


class MaskedStream(TextIOWrapper):
    """A text file that masks secrets in what is written."""

    def write(self, text: str) -> int:
        """Writes the masked text; returns the length of the original."""
        super().write(hidden(text))
        return len(text)


_INNER_NAME = re.compile(r"([A-Za-z_][\w-]*)['\"]?\s*:")
"""Name of an entry inside ``{..}``."""
_FLAG = re.compile(r"--([A-Za-z][\w-]*)")


def masked_override(text: str) -> str:
    """Returns the override with a secret as ``***``. A value ``{..}`` or ``[..]`` that holds one is masked whole."""
    key, equals, value = text.partition("=")
    name = key.lstrip("+~")
    if not equals:
        return hidden(text)
    if value[:1] not in ("{", "["):
        return f"{key}='{SECRET_SHOWN}'" if is_secret(name, _bare(value)) else f"{key}={hidden(value)}"
    names = _INNER_NAME.findall(value)
    return f"{key}='{SECRET_SHOWN}'" if any(map(is_secret_name, [name, *names])) else f"{key}={hidden(value)}"


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a process with secrets as ``***``, as in ``--api-key X`` and ``password=X``."""
    shown, name = list[str](), ""
    for text in arguments:
        hides = bool(name) and not text.startswith("--") and is_secret(name, text)
        names = [*_INNER_NAME.findall(text), *_FLAG.findall(text)] if any(map(str.isspace, text)) or "{" in text else []
        hides = hides or any(map(is_secret_name, names))  # a script of sh -c, or JSON
        shown.append(SECRET_SHOWN if hides else masked_override(text))
        name = text.lstrip("-") if text.startswith("-") and "=" not in text else ""
    return shown


def _bare(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
