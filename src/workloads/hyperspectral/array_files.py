"""Reads the arrays of a .npy or .mat file, and explains why a file can't be used."""

from __future__ import annotations

import subprocess
import sys
import tokenize
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError, check_file, first_line
from wellfed.units import show_line

SUFFIXES = (".mat", ".npy")
_HDF5_MARK = b"\x89HDF\r\n\x1a\n"

Array = NDArray[Any]

_OF_DAMAGE = (OSError, ValueError, TypeError, IndexError, KeyError, NameError, NotImplementedError, zlib.error)
"""Errors from reading a damaged .mat file, besides scipy's own; scipy may read damaged bytes as types and names."""
READ_MAT = "import sys; from scipy.io import loadmat; loadmat(sys.argv[1])"
"""Reads a .mat file in a process of its own: damaged bytes may end it by SIGSEGV."""
_RAISED = 1
"""Exit code of Python after an exception, which this process then raises, too."""
_ANEW = "Save it anew, in MATLAB with save(..., '-v7')."


def read_arrays(path: Path) -> tuple[dict[str, Array], list[str]]:
    """Returns arrays of real numbers by name, and descriptions of the file's other content.

    A .npy file is mapped into memory and named after the file; a .mat file is read.

    Raises:
        DataError: the file is missing, damaged, no array file, holds Python objects, or is of MATLAB 7.3.
    """
    check_file(path)
    try:
        if path.suffix.lower() == ".npy":
            return _npy(path), []
        return _mat(path)
    except OSError as error:
        said = f"{error.strerror}." if error.strerror else _damaged(error)
        raise DataError(f"{path}: {said} Check workload.data.path.") from error


def _npy(path: Path) -> dict[str, Array]:
    try:
        return {path.stem: _number_array(path, np.load(path, mmap_mode="r", allow_pickle=False))}
    except (ValueError, EOFError, TypeError, OverflowError, tokenize.TokenError) as error:
        if "object" in str(error).lower():
            raise DataError(f"{path}: holds Python objects, which are not read. {_as_numbers(path)}") from error
        raise DataError(f"{path}: {_damaged(error)} Write it anew with numpy.save.") from error


def _number_array(path: Path, found: Any) -> Array:
    if not isinstance(found, np.ndarray) or not _is_number(found):
        kind = getattr(found, "dtype", type(found).__name__)
        raise DataError(f"{path}: holds {kind}, no real numbers. {_as_numbers(path)}")
    return found


def _mat(path: Path) -> tuple[dict[str, Array], list[str]]:
    # takes 0.1 s, and only .mat files need it
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if is_hdf5(path):
        raise DataError(
            f"{path}: is of MATLAB 7.3 (HDF5), which is not read here. In MATLAB: save('{path.name}', '-v7'). "
            "In Python, with h5py: numpy.save('X.npy', h5py.File('X.mat')[name][()].T), and the same for X_gt; then "
            "remove the .mat files."
        )
    first = subprocess.run([sys.executable, "-c", READ_MAT, str(path)], capture_output=True, check=False)
    if first.returncode not in (0, _RAISED):
        by = f"signal {-first.returncode}" if first.returncode < 0 else f"exit code {first.returncode}"
        raise DataError(f"{path}: reading it ends the process ({by}): it is damaged, or too large for memory. {_ANEW}")
    try:
        content = loadmat(path)
    except FileNotFoundError:
        raise
    except (*_OF_DAMAGE, MatReadError, MemoryError) as error:  # MemoryError: a damaged size
        raise DataError(f"{path}: {_damaged(error)} {_ANEW}") from error
    arrays, others = dict[str, Array](), list[str]()
    for name, value in content.items():
        if isinstance(value, np.ndarray) and _is_number(value):
            arrays[name] = value
        elif not name.startswith("__"):
            others.append(f"{show_line(name)} ({_kind(value)})")
    return arrays, others


def _kind(value: Any) -> str:
    """Describes content of a .mat file other than arrays of real numbers."""
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    return {"O": "objects", "V": "struct"}.get(value.dtype.kind, str(value.dtype))


def _as_numbers(path: Path) -> str:
    return f"Save it as an array of numbers: numpy.save('{path.name}', values)."


def _is_number(array: Array) -> bool:
    return array.dtype.kind in "buif"


def is_hdf5(path: Path) -> bool:
    """Returns whether a file is HDF5, with or without MATLAB's 512 leading bytes."""
    with path.open("rb") as file:
        head = file.read(520)
    return head.startswith(_HDF5_MARK) or head[512:] == _HDF5_MARK or head[:10] == b"MATLAB 7.3"


def _damaged(error: Exception) -> str:
    return f"is damaged or no {'/'.join(SUFFIXES)} file ({show_line(first_line(error))[:120]})."
