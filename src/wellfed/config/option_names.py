"""What can be the name of an option that a user makes: a file ``<name>.yaml`` and a word on the command line."""

from __future__ import annotations

import re
import unicodedata

_WORDS = {"on", "off", "yes", "no", "true", "false", "null", "y", "n", "nan", "inf"}


def is_read_as_value(name: str) -> bool:
    """Whether yaml or Hydra takes the word for something else than a name."""
    return name.lower() in _WORDS


def in_ascii(text: str) -> str:
    """Its letters and digits in ASCII, joined by '_'; an accent goes, its letter stays."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\W_]+", "_", letters).strip("_")
