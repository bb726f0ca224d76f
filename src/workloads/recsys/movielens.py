"""Reads MovieLens-1M and -100K folders.

Layouts: https://files.grouplens.org/datasets/movielens/ml-1m-README.txt and .../ml-100k-README.txt
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wellfed import DataError
from wellfed.units import counted
from workloads.recsys.bad_lines import BadLines, decode, fetch_command, read_file
from workloads.recsys.interactions import Interactions, Ints
from workloads.recsys.text import item_text, user_text

OCCUPATIONS_1M = (
    "other", "educator", "artist", "clerical", "student", "customer service", "doctor", "executive", "farmer",
    "homemaker", "student", "lawyer", "programmer", "retired", "sales", "scientist", "self-employed", "engineer",
    "craftsman", "unemployed", "writer"
)  # fmt: skip
"""Codes 0..20 of users.dat, in -100K's words."""
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"
)  # fmt: skip
"""The 19 flags at the end of a u.item line."""
AGES = (1, 18, 25, 35, 45, 50, 56)
"""Age groups of -1M, named by their lowest age; ages of -100K are put into the same groups."""

_TITLE_YEAR = re.compile(r"^(.*\S)\s*\((\d{4})\)$")
_ARTICLE_LAST = re.compile(r"^(.*), (The|A|An|Les|La|Le|L'|Il|El|Das|Der|Die)(?= \(|$)")
MAX_DIGITS = 18
"""Maximum number of digits of a number that fits int64."""


@dataclass(frozen=True)
class Layout:
    """File names and line format of a release of MovieLens."""

    ratings: str
    users: str
    items: str
    separator: bytes
    user: Callable[[bytes], tuple[int, str]]
    """Parses a line to id and sentence; raises ValueError with the fault."""
    item: Callable[[bytes], tuple[int, str]]

    @property
    def files(self) -> tuple[str, str, str]:
        """All three names."""
        return self.ratings, self.users, self.items


def read_movielens(folder: Path, max_bad_lines: int) -> Interactions:
    """Reads a folder of either release.

    Raises:
        DataError: names file, line and way out.
    """
    folder = folder.expanduser()
    layout = _recognise(folder)
    bad = BadLines(max_bad_lines)
    user_ids, user_texts = _read_people_or_films(folder / layout.users, layout.user, bad)
    item_ids, item_texts = _read_people_or_films(folder / layout.items, layout.item, bad)
    ratings_N4 = read_ratings(folder / layout.ratings, layout.separator, user_ids, item_ids, bad)
    if len(ratings_N4) == 0:
        raise DataError(f"{folder / layout.ratings} holds no readable rating. Fetch it again.")
    return Interactions(
        users=np.searchsorted(user_ids, ratings_N4[:, 0]),
        items=np.searchsorted(item_ids, ratings_N4[:, 1]),
        ratings=ratings_N4[:, 2],
        times=ratings_N4[:, 3],
        user_texts=user_texts,
        item_texts=item_texts,
        notes=bad.notes(),
    )


def read_ratings(file: Path, separator: bytes, user_ids: Ints, item_ids: Ints, bad: BadLines) -> Ints:
    """Returns user id, item id, stars and time of all good lines, int64 [N, 4] in file order."""
    content = read_file(file)
    fields = b"\t" if separator != b"\t" else b""
    tabbed = content.replace(separator, fields) if fields else content
    values_N4 = None if fields and b"\t" in content else _parse_clean(tabbed)
    if values_N4 is None:
        values_N4, number_N = _parse_lines(file, content, separator, bad)
    else:
        number_N = np.arange(1, len(values_N4) + 1)
    reasons = (
        (~np.isin(values_N4[:, 0], user_ids), "unknown user id"),
        (~np.isin(values_N4[:, 1], item_ids), "unknown item id"),
        ((values_N4[:, 2] < 1) | (values_N4[:, 2] > 5), "rating outside 1..5"),
    )
    good_N = ~np.logical_or.reduce([wrong_N for wrong_N, _ in reasons])
    for row in np.flatnonzero(~good_N):
        reason = next(text for wrong_N, text in reasons if wrong_N[row])
        bad.add(file, int(number_N[row]), separator.join(b"%d" % value for value in values_N4[row]), reason)
    good_N4: Ints = values_N4[good_N]
    return good_N4


def _parse_clean(tabbed: bytes) -> Ints | None:
    """Parses a file of four plain numbers per line, at the speed of C; returns None for other files."""
    content = tabbed.replace(b"\r\n", b"\n")
    if not content.endswith(b"\n"):
        content += b"\n"
    byte_C = np.frombuffer(content, dtype=np.uint8)
    end_F = np.flatnonzero(byte_C < ord("0"))  # tab (9) and newline (10) are below all digits
    if len(end_F) % 4 or byte_C.max() > ord("9"):
        return None
    if not np.array_equal(byte_C[end_F].reshape(-1, 4), np.broadcast_to([9, 9, 9, 10], (len(end_F) // 4, 4))):
        return None
    digits_F = np.diff(end_F, prepend=-1) - 1
    if digits_F.min() < 1 or digits_F.max() > MAX_DIGITS:
        return None
    return np.fromstring(content, dtype=np.int64, sep=" ").reshape(-1, 4)


def _parse_lines(file: Path, content: bytes, separator: bytes, bad: BadLines) -> tuple[Ints, Ints]:
    """Returns good lines as int64 [N, 4] and their numbers [N]; skips blank lines."""
    rows, numbers = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        stripped = line.rstrip(b"\r")
        if not stripped.strip():
            continue
        parts = stripped.split(separator)
        if len(parts) != 4:
            bad.add(file, number, line, f"{counted(len(parts), 'field')} instead of 4")
        elif not all(part.isdigit() and len(part) <= MAX_DIGITS for part in parts):
            bad.add(file, number, line, "a field is no whole number")
        else:
            rows.append([int(part) for part in parts])
            numbers.append(number)
    return np.array(rows, dtype=np.int64).reshape(-1, 4), np.array(numbers, dtype=np.int64)


def _read_people_or_films(
    file: Path, parse: Callable[[bytes], tuple[int, str]], bad: BadLines
) -> tuple[Ints, list[str]]:
    """Returns ids in ascending order, and their sentences."""
    texts: dict[int, str] = {}
    for number, line in enumerate(read_file(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            identity, text = parse(line.rstrip(b"\r"))
            if identity in texts:
                raise ValueError(f"id {identity} occurs twice")
            texts[identity] = text
        except ValueError as error:
            bad.add(file, number, line, str(error))
    ids = sorted(texts)
    return np.array(ids, dtype=np.int64), [texts[identity] for identity in ids]


def _fields(line: bytes, separator: str, count: int) -> list[str]:
    fields = decode(line).split(separator)
    if len(fields) != count:
        raise ValueError(f"{counted(len(fields), 'field')} instead of {count}")
    return fields


def _number(text: str, meaning: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"{meaning} {text!r} is no whole number")
    return int(text)


def _gender(text: str) -> str:
    if text not in ("M", "F"):
        raise ValueError(f"gender {text!r} is neither M nor F")
    return text


def _age_group(years: int) -> int:
    return max((start for start in AGES if start <= years), default=AGES[0])


def _film(title: str, genres: list[str]) -> str:
    """Returns the sentence of ``Heat (1995)``; ``Misérables, Les`` becomes ``Les Misérables``."""
    match = _TITLE_YEAR.match(title.strip())
    name, year = (match[1], int(match[2])) if match else (title.strip(), None)
    return item_text(_ARTICLE_LAST.sub(r"\2 \1", name), year, genres)


def _user_1m(line: bytes) -> tuple[int, str]:
    identity, gender, age, occupation, _ = _fields(line, "::", 5)
    code = _number(occupation, "occupation")
    if code >= len(OCCUPATIONS_1M):
        raise ValueError(f"occupation {code} is above {len(OCCUPATIONS_1M) - 1}")
    years = _number(age, "age")
    return _number(identity, "id"), user_text(_age_group(years), _gender(gender), OCCUPATIONS_1M[code])


def _item_1m(line: bytes) -> tuple[int, str]:
    identity, title, genres = _fields(line, "::", 3)
    return _number(identity, "id"), _film(title, genres.split("|"))


def _user_100k(line: bytes) -> tuple[int, str]:
    identity, age, gender, occupation, _ = _fields(line, "|", 5)
    return _number(identity, "id"), user_text(_age_group(_number(age, "age")), _gender(gender), occupation)


def _item_100k(line: bytes) -> tuple[int, str]:
    identity, title, _, _, _, *flags = _fields(line, "|", 5 + len(GENRES_100K))
    if any(flag not in ("0", "1") for flag in flags):
        raise ValueError("a genre flag is neither 0 nor 1")
    return _number(identity, "id"), _film(title, [g for g, flag in zip(GENRES_100K, flags, strict=True) if flag == "1"])


LAYOUTS = {
    "MovieLens-1M": Layout("ratings.dat", "users.dat", "movies.dat", b"::", _user_1m, _item_1m),
    "MovieLens-100K": Layout("u.data", "u.user", "u.item", b"\t", _user_100k, _item_100k),
}


def _recognise(folder: Path) -> Layout:
    """Returns the layout of the folder's release."""
    name = f"workload.data.path={folder}"
    expected = " or ".join(f"{', '.join(layout.files)} ({release})" for release, layout in LAYOUTS.items())
    if not folder.is_dir():
        problem = "is a file; name the folder that holds it" if folder.exists() else "no such folder"
        raise DataError(f"{name}: {problem}. Expected is a folder with {expected}; path=null takes the embedded set.")
    for layout in LAYOUTS.values():
        if all((folder / file).is_file() for file in layout.files):
            return layout
    for release, layout in LAYOUTS.items():
        missing = [file for file in layout.files if not (folder / file).is_file()]
        if len(missing) < len(layout.files):
            raise DataError(
                f"{name}: {', '.join(missing)} missing for {release}. "
                f"Copy what is missing there, or fetch all: {fetch_command(Path(layout.ratings))}"
            )
    inside = [path.parent for layout in LAYOUTS.values() for path in folder.glob(f"*/{layout.ratings}")]
    if inside:
        raise DataError(f"{name}: no MovieLens files in it, but in {inside[0].name}/. Write {name}/{inside[0].name}.")
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise DataError(f"{name}: found {found}; expected {expected}. path=null takes the embedded set.")
