import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from tests.kit.few import slow
from wellfed.cli.commands import completion
from wellfed.cli.commands.completion import candidates


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("python src/train.py loader=", ["loader=auto ", "loader=balanced "]),
        slow("python src/train.py gpu=8gb loader=ba", ["loader=balanced ", "loader=baseline "]),
        slow("python src/train.py loader.num_w", ["loader.num_workers="]),
        ("python src/train.py loader.backend=t", ["loader.backend=threads ", "loader.backend=torch "]),
        slow("python src/train.py loader.num_workers=n", ["loader.num_workers=null "]),
        slow("python src/train.py logger.csv=", ["logger.csv=false ", "logger.csv=true "]),
        slow("python src/train.py workload.model.", ["workload.model.encoder_layers="]),
        slow("python src/train.py tra", ["trainer=", "trainer."]),
        slow("python src/evaluate.py check", ["checkpoint="]),
        ("python src/tune.py tune.write=a", ["tune.write=always ", "tune.write=auto "]),
        ("python src/evaluate.py accelerator=", ["accelerator=cpu ", "accelerator=gpu "]),
        (".venv/bin/python -m wellfed do", ["doctor "]),
        ("python -m wellfed ", ["add ", "doctor ", "plan "]),
        ("python -m wellfed plan --js", ["--json "]),
        ("python -m wellfed cache ", ["clear ", "list "]),
        ("python -m wellfed cache list --cache", ["--cache-dir "]),
        ("python -m wellfed plan --json gpu=8", ["gpu=8gb "]),
        ("python src/train.py gpu.compile=red", ["gpu.compile=reduce-overhead "]),
        ("wellfed tr", ["train "]),
        (".venv/bin/wellfed completion ", ["bash ", "fish ", "zsh "]),
        ("wellfed train loader.backend=t", ["loader.backend=threads ", "loader.backend=torch "]),
        slow("wellfed sweep sweep=q", ["sweep=quick "]),
        slow("wellfed search search=o", ["search=optuna "]),
        slow("wellfed evaluate check", ["checkpoint="]),
        slow("wellfed tune tune.wr", ["tune.write="]),
    ],
)
def test_what_a_word_may_become(line: str, some: list[str]) -> None:
    found = candidates(line)
    assert set(some) <= set(found)
    word = "" if line.endswith(" ") else line.split()[-1]
    assert all(text.startswith(word) for text in found)


@pytest.mark.parametrize(
    "line", ["", "python", "python other.py lo", "python -m pytest ", "python src/train.py zzz", "less wellfed t"]
)
def test_nothing_where_nothing_is_known(line: str) -> None:
    assert candidates(line) == []


@pytest.mark.parametrize(("breaks", "expected"), [(" =:", "balanced \nbaseline \n"), ("", None)])
def test_of_a_word_that_the_shell_cuts_the_last_part_is_replaced(
    breaks: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "python src/train.py loader=ba and more"
    for name, value in (("LINE", line), ("POINT", str(len(line) - 9)), ("WORDBREAKS", breaks)):
        monkeypatch.setenv(f"COMP_{name}", value)
    assert completion.main(["--query"]) == 0
    assert capsys.readouterr().out == (expected or "loader=balanced \nloader=baseline \n")


def test_bash_completes_by_it(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    script = f"""
python() {{ {sys.executable} "$@"; }}
wellfed() {{ python -m wellfed "$@"; }}
eval "$(python -m wellfed completion)"
COMP_LINE="python src/train.py loader.backend=th" COMP_POINT=37
COMP_WORDS=(python src/train.py loader.backend = th) COMP_CWORD=4
_wellfed_completion
echo "[${{COMPREPLY[@]}}]"
COMP_LINE="python other.py x"
_wellfed_completion
echo "[${{COMPREPLY[@]}}]"
COMP_LINE="wellfed doc" COMP_POINT=11 COMP_WORDS=(wellfed doc)
_wellfed_completion
echo "[${{COMPREPLY[@]}}]"
complete -p python
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environ)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[threads ]",
        "[]",
        "[doctor ]",
        "complete -o default -o nospace -F _wellfed_completion python",
    ]


def test_zsh_and_fish_complete_by_it(tmp_path: Path) -> None:
    """Skipped without these shells. zsh shows completions on a terminal only, so its function is only parsed."""
    python = f"{sys.executable} -m wellfed"
    environ = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    shells = {
        "zsh": f"{python} completion zsh > c; zsh -n c",
        "fish": f"function wellfed; {python} $argv; end; wellfed completion fish | source; complete -C 'wellfed doc'",
    }
    found = {shell: shutil.which(shell) for shell in shells}
    if not any(found.values()):
        pytest.skip("neither zsh nor fish")
    for shell, program in found.items():
        if program is not None:
            done = subprocess.run(
                [program, "-c", shells[shell]], capture_output=True, text=True, env=environ, cwd=tmp_path
            )
            assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "" if shell == "zsh" else "doctor")
