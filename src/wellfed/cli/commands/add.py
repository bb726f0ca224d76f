"""Writes a new workload that trains, a copy of `wellfed.cli.blank` (``python -m wellfed add workload NAME``)."""

from __future__ import annotations

import argparse
import keyword
import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from wellfed import project
from wellfed.command_line import command
from wellfed.config.files.option_file import in_ascii, is_read_as_value, write_files
from wellfed.errors import EXIT_OK, ConfigError

_BLANK = project.ENGINE / "cli" / "blank"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40


def main(argv: Sequence[str]) -> int:
    """Writes the new files and prints the next steps. Returns 2, with nothing written, if that is impossible."""
    parser = argparse.ArgumentParser(
        prog=command("add"),
        description="Writes the files of something new, with a small one inside that works.",
    )
    parser.add_argument("what", choices=["workload"], help="model, data and yaml, to be replaced by your own")
    parser.add_argument("name", help="of the folder, the yaml and the option: small letters, digits and '_'")
    asked = parser.parse_args(argv)
    written = write_workload(asked.name)
    print("\n".join(["Written:", *(f"  {path.relative_to(project.root())}" for path in written)]))
    print(f"Try it: {command('train')} workload={asked.name} trainer.max_steps=50")
    print("Then put your own model and data in its place; README.md beside them says how.")
    return EXIT_OK


def write_workload(name: str, root: Path | None = None) -> list[Path]:
    """Writes `wellfed.cli.blank` as ``src/<package>/<name>/`` and ``configs/workload/<name>.yaml``; all files or none.

    Raises:
        ConfigError: the name is invalid or taken, or a file can't be written.
    """
    _check_name(name)
    root = root or project.root()
    package = home_of_workloads(root)
    folder = root.joinpath("src", *package.split("."), name)
    option = root / "configs" / "workload" / f"{name}.yaml"
    asked = f"add workload {name}"
    if not option.parent.is_dir():
        problem = f"{option.parent} is no folder of configurations."
        raise ConfigError.of(asked, problem, "Make it, or change to a project.")
    for path in (folder, folder.with_suffix(".py"), option):
        if os.path.lexists(path):
            raise ConfigError.of(asked, f"{path} is there already.", "Take another name, or move it away.")
    files = {folder / file: file for file in ("model.py", "data.py", "__init__.py", "README.md")}
    files[option] = "workload.yaml"  # last, since it makes the workload visible
    texts = {path: (_BLANK / file).read_text(encoding="utf-8") for path, file in files.items()}
    home = f"{package}.{name}"
    write_files({at: t.replace("wellfed.cli.blank", home).replace("blank", name) for at, t in texts.items()}, asked)
    return list(texts)


def home_of_workloads(root: Path) -> str:
    """Returns the package for new workloads: the package of the default workload, whose code a yaml may name.

    ``workloads`` if the default is ``workloads.cats.model.Net`` of cats; ``my_nets`` for ``my_nets.model.Net`` of
    my_nets. Raises a ConfigError if it does not determine a package.
    """
    configs = root / "configs"
    try:
        defaults = yaml.safe_load((configs / "train.yaml").read_text(encoding="utf-8"))["defaults"]
        (default,) = (entry["workload"] for entry in defaults if isinstance(entry, dict) and "workload" in entry)
        options = yaml.safe_load((configs / "workload" / f"{default}.yaml").read_text(encoding="utf-8"))
        home = str(options["model"]["_target_"]).split(".")[:-2]
        return ".".join(home[:-1] if len(home) > 1 and home[-1] == default else home)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        problem = f"the default workload of {configs / 'train.yaml'} does not tell where workloads are: {error!r}."
        raise ConfigError.of("add workload", problem, "Run from a full clone.") from error


def _check_name(name: str) -> None:
    if _will_do(name):
        return
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", in_ascii(name)).lower()
    cut = [text[:_LONGEST].rstrip("_") for text in (words, f"my_{words or 'workload'}")]
    problem = (
        f"becomes the name of a Python package and an option: small letters, digits and single '_', first a letter, "
        f"at most {_LONGEST}, no word of Python or yaml."
    )
    way_out = f"Write {command('add')} workload {next(filter(_will_do, cut))}."
    raise ConfigError.of(f"add workload {name!r}", problem, way_out)


def _will_do(name: str) -> bool:
    is_a_word = keyword.iskeyword(name) or is_read_as_value(name)
    return _NAME.fullmatch(name) is not None and len(name) <= _LONGEST and not is_a_word
