import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.few import slow
from wellfed.config.compose import compose
from wellfed.config.files.knobs_page import PROJECT_GROUPS, page
from wellfed.config.knobs import all_knobs
from wellfed.config.schema import EvaluateConfig, RunConfig

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
COMMAND = "python -m wellfed.config.files.knobs_page > docs/configuration.md"


def rows(text: str) -> dict[str, list[str]]:
    """First cell of each row of a table -> the other cells."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def options(text: str, group: str) -> dict[str, str]:
    (table,) = re.findall(rf"^\| {group}= \|.*\n\|[-|]+\n((?:\|.*\n?)+)", text, flags=re.MULTILINE)
    return {name: cells[0] for name, cells in rows(table).items()}


def test_the_page_is_what_the_code_says():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page(), f"make it anew: {COMMAND}"


def test_the_command_that_the_page_names_writes_it():
    assert COMMAND in page()
    command = [sys.executable, *COMMAND.partition(" > ")[0].split()[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout == page()


def test_every_knob_has_a_row_with_its_text():
    found = rows(page())
    assert {*all_knobs(RunConfig), *all_knobs(EvaluateConfig)} <= set(found)
    for name in all_knobs(RunConfig):
        takes, default, meaning = (cell.strip() for cell in found[name])
        assert takes
        assert default
        assert len(meaning) > 5, name


def test_defaults_are_as_they_are_typed():
    found = {name: cells[1] for name, cells in rows(page()).items() if len(cells) > 1}
    assert found["gpu.tf32"] == "`true`"
    assert found["gpu.precision"] == "`auto`"
    assert found["loader.num_workers"] == "`null`"
    assert found["sweep.retry"] == "`[]`"
    assert found["workload.name"] == "none: must be set"


@pytest.mark.parametrize("group", sorted(path.name for path in CONFIGS.iterdir() if path.is_dir()))
def test_options_are_those_of_the_files(group: str):
    if group in (*PROJECT_GROUPS, "hydra"):
        assert f"| {group}= |" not in page()
    else:
        assert set(options(page(), group)) == {path.stem for path in (CONFIGS / group).glob("*.yaml")}


@pytest.mark.parametrize("groups", [["gpu", "loader", "memory", "telemetry"], slow(["debug"])], ids=" ".join)
def test_what_an_option_sets_is_what_the_run_gets(groups: list[str]):
    """One option of each group at a time: each sets its own knobs, but for debug."""
    text = page()
    of_group = [[(group, option, sets) for option, sets in options(text, group).items()] for group in groups]
    for chosen in itertools.zip_longest(*of_group):
        found = [each for each in chosen if each is not None]
        resolved = compose([f"{group}={option}" for group, option, _ in found]).resolved
        for group, option, sets in found:
            for name, value in re.findall(r"`([\w.]+)=([^`]*)`", sets):
                node = resolved if "." in name else resolved[group]
                for part in name.split("."):
                    node = node[part]
                assert str(node).lower().replace("none", "null") == value.replace("none", "null"), (option, name)


def test_a_changed_file_changes_the_page(tmp_path: Path):
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs)
    (configs / "loader" / "mine.yaml").write_text("num_workers: 3\nskip_ids: [1, 2]\n")
    (configs / "trainer" / "long.yaml").write_text("defaults:\n  - default\n  - _self_\nmax_epochs: 99\n")
    text = page(configs)
    assert options(text, "loader")["mine"].rstrip(" |") == "`num_workers=3`, `skip_ids=[1,2]`"
    assert options(text, "trainer")["long"].rstrip(" |") == "as `default`, `max_epochs=99`"
    assert options(text, "sweep")["quick"].endswith("`loader=baseline,conservative,balanced,aggressive`")


def test_nothing_outside_code_reads_as_a_tag():
    bare = re.sub(r"`[^`]*`", "", page())
    assert not re.search(r"(?<!\\)<", bare)
