"""A command in a copy of a warm Python is what it is in a Python of its own."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import WarmProcess, run, start_warm

SHOW = """
import json, os, signal, sys, tempfile, threading, __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__, "main": vars(__main__) is globals(),
    "spec": repr(__main__.__spec__), "cwd": os.getcwd(), "environ": dict(os.environ),
    "temporary": tempfile.gettempdir(), "threads": threading.active_count(), "umask": os.umask(0o22),
    "signals": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "open": len(os.listdir("/proc/self/fd")), "streams": [sys.stdout.encoding, sys.stdout.line_buffering],
}))
os.system("echo beneath >&2")
sys.exit(7)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no copy is made")


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "script.py").write_text(text)
    return str(tmp_path / "script.py")


def test_it_has_its_own_words_folder_variables_streams_and_exit_code(tmp_path: Path) -> None:
    for name in ("a", "b", "tmp"):
        (tmp_path / name).mkdir()
    variables = {"PYTHONPATH": f"{tmp_path / 'a'}:b", "TMPDIR": str(tmp_path / "tmp")}
    show = script(tmp_path, SHOW)
    new, warm = (run(show, "x=1", "y z", cwd=tmp_path, fresh=fresh, **variables) for fresh in (True, False))
    assert (warm.code, warm.err) == (new.code, new.err) == (7, "beneath\n")
    assert json.loads(warm.out) == json.loads(new.out)


def test_it_ends_as_python_ends(tmp_path: Path) -> None:
    fail = script(tmp_path, "import atexit; atexit.register(print, 'the end'); print('begun'); 1 / 0")
    new, warm = (run(fail, cwd=tmp_path, fresh=fresh) for fresh in (True, False))
    assert (warm.code, warm.out) == (new.code, new.out) == (1, "begun\nthe end\n")
    assert warm.err.splitlines()[0] == new.err.splitlines()[0] == "Traceback (most recent call last):"
    assert warm.err.splitlines()[-1] == new.err.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_signal_reaches_it_and_is_its_exit_code(tmp_path: Path) -> None:
    wait = script(tmp_path, "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(60)")
    process = start_warm(wait, cwd=tmp_path)
    assert isinstance(process, WarmProcess)
    assert process.poll() is None
    ends_at_s = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < ends_at_s:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "")
    assert process.poll() == process.returncode == -signal.SIGTERM
