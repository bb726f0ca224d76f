"""Compiles the driver of the simulated cards, once for a torch and a source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parents[2]
"""Holds the driver's C++ files."""


def cache_folder() -> Path:
    """FAKE_CUDA_CACHE, or a folder of the user's."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wellfed" / "fake_cuda"
    return Path(os.environ.get("FAKE_CUDA_CACHE") or own)


def compiled() -> Path:
    """The driver's library; takes about a minute the first time.

    Raises:
        RuntimeError: there is no C++ compiler, or it can't build the driver; with what it said.
    """
    sources = sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h"))
    root = _torch_folder()
    key = hashlib.sha256((root / "version.py").read_bytes() + sysconfig.get_config_var("SOABI").encode())
    for source in sources:
        key.update(source.read_bytes())
    library = cache_folder() / key.hexdigest()[:16] / "fake_cuda_driver.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it: one of them compiles, the others wait
            if not library.exists():
                _compile([source for source in sources if source.suffix == ".cpp"], root, library)
    return library


def _compile(sources: list[Path], root: Path, library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
    command += [*map(str, sources), "-o", str(unfinished), *(f"-I{folder}" for folder in includes)]
    command += [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    command += ["-DTORCH_EXTENSION_NAME=fake_cuda_driver"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]}: no such C++ compiler. Install g++, or name one by CXX.") from error
    if done.returncode:
        raise RuntimeError(f"{command[0]} can't build the simulated cards' driver:\n{done.stderr}")
    unfinished.replace(library)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


if __name__ == "__main__":
    print(compiled())
