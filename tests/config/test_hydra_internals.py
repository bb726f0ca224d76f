"""What is used of Hydra's internals, on the lowest and the highest version that pyproject.toml allows."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import hydra
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, io, sys
import hydra
from wellfed.config.build import build
from wellfed.config.compose import compose
from wellfed.config.entry import main
from wellfed.config.hydra_internals import BASIC_SWEEPER, locate
from wellfed.errors import ConfigError

def shown(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main("train", lambda composed: seen.append(composed) or 0, list(argv))
    return code, out.getvalue() + err.getvalue()

BASIC = ["hydra/sweeper=basic", "hydra/launcher=basic"]
seen = []
assert locate(BASIC_SWEEPER).__name__ == "BasicSweeper"
assert compose(["gpu=8gb", "seed=3"]).config.gpu.memory_gib == 7.2
typed = ["gpu=42gb", "loader.num_worker=3", "seed=x", "lodaer=a", "a=["]
try:
    compose(typed)
except ConfigError as error:
    assert len(error.faults) == 5, error
else:
    raise AssertionError("composed")
try:
    compose(["experiment=mine", "workload.model.dimm=3"], extra_dirs=[sys.argv[1]])
except ConfigError as error:
    assert "experiment/mine.yaml: gpu.memory_gb" in str(error), error
with compose(["seed=3"]).without_folder():
    assert hydra.core.hydra_config.HydraConfig.get().job.name == "train"
    assert build({"_target_": "fractions.Fraction", "_convert_": "none"}, "workload.model", 1, 3) * 3 == 1
    try:
        build({"_target_": "fractions.Fractoin"}, "workload.model")
    except ConfigError as error:
        assert "fractions has no Fractoin. Did you mean" in str(error), error
code, text = shown("--help")
assert code == 0 and "baseline, conservative" in text and "auto*" in text, text
code, text = shown("--cfg", "hydra")
assert code == 0 and "runtime:" in text, text
code, text = shown("--info", "plugins")
assert code == 0 and "WellfedSweeper" in text, text
code, text = shown("-m", "seed=1,2", *BASIC, f"hydra.sweep.dir={sys.argv[1]}/jobs")
assert code == 0 and [composed.config.seed for composed in seen] == [1, 2], text
code, text = shown("-m", "gpu=8gb,43gb", "seed=x", *BASIC)
assert code == 2 and "43gb" in text and "seed=x" in text, text
print(hydra.__version__)
"""


def allowed() -> str:
    """The requirement in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = [text for text in project["dependencies"] if text.startswith("hydra-core")]
    return str(requirement)


def version_that_passed(folder: Path, first_on_path: Path) -> str:
    """Runs the program with ``first_on_path`` before all that is installed; the version of Hydra that it saw."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ngpu:\n  memory_gb: 3\ntrainer: {devices: x}\n"
    )
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", PROGRAM, str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{first_on_path}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["lowest", "highest"])
def test_the_versions_that_pyproject_allows(which: str, tmp_path: Path) -> None:
    (lowest,) = re.findall(r">=([\d.]+)", allowed())
    wanted = f"hydra-core=={lowest}" if which == "lowest" else allowed()
    place = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip could not fetch {wanted}: {done.stderr.strip().splitlines()[-1]}")
    found = version_that_passed(tmp_path, place)
    if which == "lowest":
        assert found == lowest
    else:
        assert [int(part) for part in found.split(".")] >= [int(part) for part in hydra.__version__.split(".")]


def test_they_are_used_in_one_file() -> None:
    users = [
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"^\s*(from|import) hydra\._internal", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert users == ["wellfed/config/hydra_internals.py"]
