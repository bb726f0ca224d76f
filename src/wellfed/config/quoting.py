"""Quotes paths as overrides that Hydra's grammar reads back, and splits overrides."""

from __future__ import annotations

import re

_PATH_KEYS = {"resume", "rerun", "checkpoint"}
_PATH_KEYS |= {"workload.data.path", "paths.log_dir", "paths.cache_dir", "hydra.run.dir"}
# Texts that Hydra reads unchanged. All others are quoted, e.g. 1e3 and 2024_01, which Hydra reads as numbers.
_PLAIN = re.compile(r"[A-Za-z/_.][A-Za-z0-9/_.@%-]*")
_QUOTED = re.compile(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", re.DOTALL)
_NOT_TEXT = re.compile(r"true|false|nan|inf|\.[0-9].*", re.IGNORECASE)


def quoted(text: str) -> str:
    """Returns an override, with its value quoted if it is a path that Hydra's grammar can't read."""
    key, value = key_value(text)
    if key not in _PATH_KEYS or value is None or is_null(value) or "${" in value or _is_quoted(value):
        return text
    return assigned(text[: text.index("=")], value.replace(r"\=", "="))  # typed as Hydra would read it


def assigned(key: str, path: str) -> str:
    """Returns the override that sets ``key`` to any path, whatever its characters."""
    if _PLAIN.fullmatch(path) and not _NOT_TEXT.fullmatch(path):
        return f"{key}={path}"
    # Hydra reads a backslash as an escape only before a quote, also before the closing one.
    escaped = re.sub(r"(\\*)('|\Z)", lambda run: run[1] * 2 + ("\\'" if run[2] else ""), path)
    return f"{key}='{escaped}'"


def key_value(text: str) -> tuple[str, str | None]:
    """Returns key (knob or group) and value of an override; the value is None without an equals sign."""
    key, separator, value = text.partition("=")
    return key.lstrip("+~").split("@")[0], value if separator else None


def unquoted(value: str | None) -> str | None:
    """Returns the text that Hydra reads in a value."""
    if value is None or not _is_quoted(value):
        return value
    quote, body = value[0], value[1:-1]
    return re.sub(rf"(\\+)({quote}|\Z)", lambda run: run[1][: len(run[1]) // 2] + run[2], body)


def _is_quoted(value: str) -> bool:
    return _QUOTED.fullmatch(value) is not None


def is_null(value: str | None) -> bool:
    """Returns whether a value is missing or null."""
    return value is None or value.lower() in ("", "null")
