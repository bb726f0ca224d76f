"""Downloads MovieLens from GroupLens and checks it: ``python -m workloads.recsys.download ml-100k data``.

Licence: research use, no redistribution; https://grouplens.org/datasets/movielens/. Only this command downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from wellfed import DataError
from wellfed.units import show_count
from workloads.recsys.movielens import LAYOUTS

BASE_URL = "https://files.grouplens.org/datasets/movielens/"
RELEASES = {
    "ml-100k": ("MovieLens-100K", "0e33842e24a9c977be4e0107933c0723"),
    "ml-1m": ("MovieLens-1M", "c4d9eecfca2ab87c1945afe126590906"),
}
"""Release -> layout and MD5, as published with the archive (``ml-100k.zip.md5``)."""
TIMEOUT_S = 60


def download(release: str, folder: Path, url: str | None = None, md5: str | None = None) -> Path:
    """Downloads, checks and unpacks a release, and returns ``folder/<release>``; an existing folder is kept.

    Args:
        release: ``ml-100k`` or ``ml-1m``.
        url: other URL of the archive; ``md5`` is its checksum.

    Raises:
        DataError: the release is unknown, the server does not answer, or the archive is damaged or incomplete.
    """
    if release not in RELEASES:
        raise DataError(f"No release {release!r}. Known: {', '.join(RELEASES)}.")
    layout_name, published = RELEASES[release]
    target = folder.expanduser() / release
    files = LAYOUTS[layout_name].files
    if all((target / file).is_file() for file in files):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{release}-") as temporary:
        archive = Path(temporary) / "archive.zip"
        address = url or f"{BASE_URL}{release}.zip"
        _fetch(address, archive)
        _check(archive, address, md5 or published)
        unpacked = Path(temporary) / release
        _unpack(archive, unpacked, files, address)
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(unpacked / file, target / file)
    return target


def _fetch(url: str, archive: Path) -> None:
    way_out = "Check the network, or fetch the archive elsewhere, unpack it and set workload.data.path to its folder."
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
            promised = answer.headers.get("Content-Length")
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise DataError(f"{url} can't be fetched: {error}. {way_out}") from error
    got = archive.stat().st_size
    if promised is not None and int(promised) != got:
        raise DataError(f"{url} was cut: {show_count(got)} of {show_count(int(promised))} bytes came. {way_out}")


def _check(archive: Path, url: str, md5: str) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise DataError(
            f"{url}: MD5 is {found}, expected {md5} ({show_count(archive.stat().st_size)} bytes came). "
            "Nothing was unpacked; try again, or take another source."
        )


def _unpack(archive: Path, folder: Path, files: tuple[str, ...], url: str) -> None:
    folder.mkdir()
    try:
        with zipfile.ZipFile(archive) as opened:
            members = {Path(name).name: name for name in opened.namelist()}
            if missing := [file for file in files if file not in members]:
                raise DataError(f"{url} lacks {', '.join(missing)}. Take another source.")
            for file in files:
                (folder / file).write_bytes(opened.read(members[file]))
    except zipfile.BadZipFile as error:
        raise DataError(f"{url} is no readable zip archive: {error}. Take another source.") from error


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line, and prints the next command to type."""
    parser = argparse.ArgumentParser(
        prog="python -m workloads.recsys.download",
        description="Fetch MovieLens.",
    )
    parser.add_argument("release", choices=sorted(RELEASES))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("data"))
    chosen = parser.parse_args(arguments)
    try:
        target = download(chosen.release, chosen.folder)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    train_on_it = f"python src/train.py workload=recsys workload.data.path={target}"
    print(f"{target} is complete. Train on it: {train_on_it}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
