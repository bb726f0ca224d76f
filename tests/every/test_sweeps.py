"""The sweep options against the page about them, and against the groups whose options they name."""

import re
from math import prod
from pathlib import Path

import pytest
import yaml

from wellfed.config.schema import SweepConfig

ROOT = Path(__file__).parents[2]
OPTIONS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs" / "sweep").glob("*.yaml")}
PAGE = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")


def axes(option: str) -> dict[str, list[str]]:
    return {axis: str(values).split(",") for axis, values in OPTIONS[option]["hydra"]["sweeper"]["params"].items()}


def test_the_page_lists_all_options_with_their_size():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \| (\d+) \|$", PAGE, flags=re.MULTILINE)
    sizes = {name: (int(points), int(steps)) for name, points, steps in rows}
    assert sizes == {
        name: (prod(map(len, axes(name).values())), option.get("sweep", {}).get("trial_steps", SweepConfig.trial_steps))
        for name, option in OPTIONS.items()
    }
    assert all(points >= 4 for points, _ in sizes.values())


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_an_option_has_the_sweeper_and_names_what_there_is(option: str):
    chosen = {
        key.removeprefix("override /hydra/"): value
        for entry in OPTIONS[option]["defaults"]
        for key, value in entry.items()
    }
    assert chosen == {"sweeper": "wellfed", "launcher": "wellfed"}
    for axis, values in axes(option).items():
        folder = ROOT / "configs" / axis
        if folder.is_dir():
            assert set(values) <= {path.stem for path in folder.glob("*.yaml")}
        assert len(set(values)) == len(values) > 1
