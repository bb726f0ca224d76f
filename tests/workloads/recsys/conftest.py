"""Small MovieLens folders in both layouts."""

from pathlib import Path

import pytest

RATINGS = [(1, 10, 5, 100), (1, 20, 3, 101), (1, 30, 4, 102), (2, 30, 1, 50), (2, 10, 2, 60), (2, 20, 5, 70)]


@pytest.fixture
def ml_1m(tmp_path: Path) -> Path:
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.dat").write_text("".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in RATINGS))
    (folder / "users.dat").write_text("1::F::25::12::55455\n2::M::56::0::02138\n")
    (folder / "movies.dat").write_bytes(
        b"10::Heat (1995)::Action|Crime\n"
        b"20::Mis\xe9rables, Les (1998)::Drama\n"
        b"30::American President, The (1995)::Comedy\n"
    )
    return folder


@pytest.fixture
def ml_100k(tmp_path: Path) -> Path:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    (folder / "u.data").write_text("".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in RATINGS))
    (folder / "u.user").write_text("1|27|F|programmer|55455\n2|60|M|other|02138\n")

    def film(identity: int, title: bytes, *genres: int) -> bytes:
        flags = b"|".join(b"1" if number in genres else b"0" for number in range(19))
        return b"%d|%s|01-Jan-1995||http://x|%s\n" % (identity, title, flags)

    (folder / "u.item").write_bytes(
        film(10, b"Heat (1995)", 1, 6)
        + film(20, b"Mis\xe9rables, Les (1998)", 8)
        + film(30, b"American President, The (1995)", 5)
    )
    return folder
