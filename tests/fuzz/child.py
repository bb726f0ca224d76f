"""Reads damaged files in a forked process with limits: 10 s and 1 GiB for an input, and no program may start."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.readers import READERS, Reader
from workloads.hyperspectral.array_files import READ_MAT

MOST_SECONDS = 10
"""Seconds of CPU time for an input; of the clock six times as many, since the machine may be busy."""
MOST_BYTES = 2**30
EXAMPLES = 100
"""Inputs of a reader in `fuzz_until`."""
CORPUS = Path(__file__).with_name("corpus")
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect")
"""Audit events of code that starts something."""

Content = bytes | Callable[[Path], object]
"""Bytes of the file, or a function that makes something in its place."""
Read = Callable[[Content], None]


@dataclass
class Outcome:
    """Result of many inputs of one reader."""

    reader: str
    inputs: int = 0
    refused: int = 0
    """Inputs that an error of the project refused; the others were read."""
    slowest_s: float = 0.0
    most_mib: float = 0.0
    """Peak growth of the process."""
    fault: str = ""
    """What went wrong with the last input; empty if nothing did."""
    culprit: bytes | None = field(default=None, repr=False)
    """That input; None if nothing went wrong, or before the first."""

    def keep(self) -> Path:
        """Writes the input into the corpus, where `make test` reads it from then on."""
        folder = CORPUS / self.reader
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{len(list(folder.iterdir())):03d}"
        path.write_bytes(self.culprit or b"")
        return path


class FaultError(Exception):
    """Raised for an input that a reader did not survive."""


def fuzz(reader: Reader, *, examples: int, fresh: int | None = None, shrinks: bool = True) -> Outcome:
    """Reads the corpus of a reader, then this many damaged files.

    Args:
        fresh: seed of the examples; None = the same ones each time.
        shrinks: make an input that went wrong as short as possible.
    """

    def examine(read: Read, whole: bytes) -> None:
        for path in sorted((CORPUS / reader.name).glob("*")):
            read(path.read_bytes())

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=fresh is None,
            report_multiple_bugs=False,
            phases=(Phase.generate, *([Phase.shrink] if shrinks else [])),
            suppress_health_check=list(HealthCheck),
        )
        @given(reader.inputs(whole))
        def each(content: bytes) -> None:
            read(content)

        (each if fresh is None else seed(fresh)(each))()

    return _in_child(reader, examine)


def fuzz_with(reader: Reader, make: Callable[[Path], object]) -> Outcome:
    """Reads what ``make`` makes in place of the file. An OSError is a refusal, too."""
    return _in_child(replace(reader, refusals=(*reader.refusals, OSError)), lambda read, _: read(make))


def fuzz_until(number: int, seed: int, until_s: float) -> Outcome:
    """Reads fresh inputs of the reader of this number; none after this time of ``time.monotonic``."""
    reader = READERS[number]
    return Outcome(reader.name) if time.monotonic() > until_s else fuzz(reader, examples=EXAMPLES, fresh=seed)


def _in_child(reader: Reader, examine: Callable[[Read, bytes], None]) -> Outcome:
    top = Path(tempfile.mkdtemp(prefix="fuzz-"))
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are not copied
        child = os.fork()
    if not child:
        try:
            _run(reader, top, examine)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    try:
        outcome = _result(reader, top, status)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return outcome


def _result(reader: Reader, top: Path, status: int) -> Outcome:
    found = top / "outcome.json"
    outcome = Outcome(**json.loads(found.read_text())) if found.exists() else Outcome(reader.name)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended = (
            f"longer than {MOST_SECONDS} s"
            if number in (signal.SIGALRM, signal.SIGPROF)
            else signal.Signals(number).name
        )
        outcome.fault = f"the reader's process ended: {ended}"
    elif not found.exists():
        outcome.fault = "the reader's process ended without a result"
    if outcome.fault and (top / "current").exists():
        outcome.culprit = (top / "current").read_bytes()
    return outcome


def _run(reader: Reader, top: Path, examine: Callable[[Read, bytes], None]) -> None:
    outcome = Outcome(reader.name)
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()
        data = top / "data"
        data.mkdir()
        (top / "cwd").mkdir()
        os.chdir(top / "cwd")
        tempfile.tempdir = str(data)
        os.environ["WELLFED_PROJECT"] = str(Path(__file__).parents[2])
        warnings.simplefilter("ignore")
        reader.write(data)
        whole = (data / reader.file).read_bytes()
        reader.read(data)  # what is sound is read, and all imports are done
        guard = _Guard(data)
        before = _size("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (before + MOST_BYTES, before + MOST_BYTES))
        peak_before = _size("VmHWM")

        def read(content: Content) -> None:
            if isinstance(content, bytes):
                (top / "current").write_bytes(content)
            outcome.inputs += 1
            began_s = time.monotonic()
            _read_one(reader, data, content, outcome, guard)
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began_s)
            outcome.most_mib = (_size("VmHWM") - peak_before) / 2**20

        examine(read, whole)
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        cause = error.__cause__ or error
        where = traceback.extract_tb(cause.__traceback__)
        own = next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(where)), "")
        outcome.fault = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]} ({own})"
    entries: dict[str, Any] = asdict(outcome)
    del entries["culprit"]
    (top / "outcome.json").write_text(json.dumps(entries))


def _read_one(reader: Reader, data: Path, content: Content, outcome: Outcome, guard: _Guard) -> None:
    path = data / reader.file
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.unlink()
        content(path)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * MOST_SECONDS)
    try:
        with guard.watched():
            reader.read(data)
    except reader.refusals:
        outcome.refused += 1
    except Exception as error:
        raise FaultError from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if guard.seen:
        raise FaultError from PermissionError(f"code was run: {guard.seen}")


class _Guard:
    """Notes the code that a file starts, and files that are written beside the data."""

    def __init__(self, data: Path) -> None:
        self.seen: list[str] = []
        self._data, self._is_on = os.path.realpath(data), False
        sys.addaudithook(self._hook)

    def watched(self) -> _Guard:
        return self

    def __enter__(self) -> None:
        self.seen.clear()
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "subprocess.Popen" and READ_MAT in arguments[1]:
            return  # our own
        if event in _FORBIDDEN:
            self.seen.append(event)
        elif event == "open" and isinstance(arguments[0], (str, bytes)) and _writes(arguments[1], arguments[2]):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self._data, "/dev/", "/proc/")):
                self.seen.append(f"writes {path}")


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _size(name: str) -> int:
    """Returns a size of this process from /proc, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0
