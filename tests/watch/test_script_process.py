"""Scripts as they are: a watched script prints, fails and ends as with Python itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import environment
from tests.kit.few import few

UNSEEN = "wellfed watch: no training was seen: it did not import torch"
SCRIPTS = {
    "prints bytes": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "what it is": """
import sys
print(sys.argv[1:], sys.path[0], __name__, __file__, __spec__, __doc__, {"torch", "numpy", "hydra"} & set(sys.modules))
print(sys.modules["__main__"].__dict__ is globals())
""",
    "raises": "try:\n    1 / 0\nexcept ValueError:\n    pass\nraise KeyError('second')",
    "exits with a number": "import sys; print('bye'); sys.exit(7)",
    "exits without atexit": "import os; print('now', flush=True); os._exit(5)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "has threads": """
import atexit, threading, time
atexit.register(lambda: print("at the end"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
""",
    "spawns": """
import multiprocessing, pickle
class Thing:
    pass
def work(thing):
    return type(thing).__module__
if __name__ == "__main__":
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(work, [Thing()]))
""",
    "warns of nothing": "import os, warnings; warnings.simplefilter('error'); os.fork() or os._exit(0); os.wait()",
}


def ended(*command: str, cwd: Path) -> tuple[int, bytes, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize("name", few(SCRIPTS, 2))
def test_a_script_ends_as_with_python(name: str, tmp_path: Path) -> None:
    """A traceback has frames of the watch, too."""
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    arguments = ("script.py", "--log-dir", "-m", "1")
    code, out, err = ended(*arguments, cwd=tmp_path)
    watched_code, watched_out, watched_err = ended("-m", "wellfed", "watch", *arguments, cwd=tmp_path)
    assert (watched_code, watched_out) == (code, out)
    assert set(err.splitlines()) <= set(watched_err.splitlines())
    assert (UNSEEN in watched_err) == (name not in ("exits without atexit", "is terminated"))
    assert not (tmp_path / "logs").exists()


def test_a_signal_ends_it_as_with_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert ended("-m", "wellfed", "watch", "script.py", cwd=tmp_path)[0] == -signal.SIGINT


@pytest.mark.parametrize("words", few([["-m", "package", "--lr", "1"], ["package"], ["-m", "package.tool"]], 1))
def test_modules_and_folders(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    tells = "import sys; print(sys.argv[1:], sys.path[0], __name__, __spec__ and __spec__.name, __package__)"
    (tmp_path / "package" / "__main__.py").write_text(tells)
    (tmp_path / "package" / "tool.py").write_text(f"{tells}\nraise ValueError('of the tool')")
    code, out, _ = ended(*words, cwd=tmp_path)
    watched_code, watched_out, _ = ended("-m", "wellfed", "watch", *words, cwd=tmp_path)
    assert (watched_code, watched_out) == (code, out)


def test_what_can_not_be_run(tmp_path: Path) -> None:
    code, _, err = ended("-m", "wellfed", "watch", "absent.py", cwd=tmp_path)
    assert code == 2
    assert "absent.py: there is no such file" in err
    code, _, err = ended("-m", "wellfed", "watch", "--log-dir", "runs", cwd=tmp_path)
    assert code == 2
    assert "name a script, or a module after -m" in err
