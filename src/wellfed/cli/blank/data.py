"""Reads rows of numbers, each with a class, from a .csv file, or draws points around centres."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from wellfed import ConfigError, DataError, Datasets, SampleRng, check_file, first_line
from wellfed.units import counted, show_percent

MIN_ROWS = 10
"""Minimum number of rows, so that validation and test have at least one each."""


class Rows:
    """Inputs ``[rows, columns]`` and classes ``[rows]``, in memory."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        """Returns a whole batch at once. Optional: faster than collating samples; draw random numbers from ``rng``."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


def datasets(path: str | None = None, num_rows: int = 10_000) -> Datasets:
    """Splits the rows: a tenth for validation, a tenth for the test, the others for training.

    Args:
        path: a .csv file, see `read_csv`; None = the embedded data.
        num_rows: rows of the embedded data.

    Raises:
        DataError: the file is missing or damaged.
        ConfigError: ``num_rows`` is too small.
    """
    inputs, labels = embedded(num_rows) if path is None else read_csv(Path(os.path.expanduser(path)))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split in each run
    test, val, train = order.tensor_split([len(order) // 10, len(order) // 5])
    spread = inputs[train].std(0)
    inputs = ((inputs - inputs[train].mean(0)) / torch.where(spread > 0, spread, 1)).float()
    num_classes = int(labels.max()) + 1
    commonest = show_percent(float(labels.bincount().max()) / len(labels))
    return Datasets(
        train=Rows(inputs[train], labels[train]),
        val=Rows(inputs[val], labels[val]),
        test=Rows(inputs[test], labels[test]),
        model_args={"num_inputs": inputs.shape[1], "num_classes": num_classes},
        notes=(f"{counted(len(labels), 'row')} of {num_classes} classes; {commonest} are of the commonest",),
    )


def embedded(num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns points around four centres. The clouds overlap, so no model classifies all of them correctly."""
    if num_rows < MIN_ROWS:
        problem = f"are fewer than the {MIN_ROWS} that three splits need."
        raise ConfigError.of(f"workload.data.num_rows={num_rows}", problem, "Write num_rows=10000 or so.")
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 8, generator=generator)
    labels = torch.randint(4, (num_rows,), generator=generator)
    return centres[labels] + torch.randn(num_rows, 8, generator=generator), labels


def read_csv(file: Path) -> tuple[Tensor, Tensor]:
    """Reads a .csv file: column names in the first row, then numbers, with the class (any text) in the last column."""
    check_file(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            (_, header), *rows = [(reader.line_num, row) for row in reader if row] or [(1, [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        way_out = "Name a .csv file in UTF-8; workload.data.path=null takes the embedded data."
        problem = error.strerror if isinstance(error, OSError) else first_line(error)
        raise DataError(f"workload.data.path={file}: {problem}. {way_out}") from error
    if len(header) < 2 or any(map(_is_number, header[:-1])):
        problem = f"{header} are not the names of two or more columns, the last one being the class"
        raise DataError(f"{file}, line 1: {problem}. Write them above the numbers, separated by commas.")
    for line, row in rows:
        if len(row) != len(header):
            found = f"{counted(len(row), 'cell')} instead of {len(header)}"
        elif wrong := [name for name, cell in zip(header, row[:-1], strict=False) if not _is_number(cell)]:
            found = f"column {wrong[0]}: {row[header.index(wrong[0])]!r} is no finite number"
        elif not row[-1].strip():
            found = f"column {header[-1]}: no class"
        else:
            continue
        raise DataError(f"{file}, line {line}: {found}. Correct the line, or take it out.")
    words = [row[-1].strip() for _, row in rows]
    classes = {word: number for number, word in enumerate(sorted(set(words)))}
    if len(words) < MIN_ROWS or not 2 <= len(classes) <= len(words) // 2:
        found = f"{counted(len(words), 'row')} and {len(classes)} different values in the last column, {header[-1]}"
        rule = f"{MIN_ROWS} rows, 2 classes, and 2 rows a class are the least"
        raise DataError(f"{file}: {found}; {rule}. Add rows, or make the class the last column.")
    inputs = torch.tensor([[float(cell) for cell in row[:-1]] for _, row in rows], dtype=torch.float64)
    return inputs, torch.tensor([classes[word] for word in words])


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False
