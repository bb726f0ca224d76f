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
    inputs, words, line = list[list[float]](), list[str](), 1
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            header = next(reader, [])
            if len(header) < 2 or header[0].replace(".", "").isdigit():
                raise ValueError(f"{header} are not the names of columns, the last one being the class")
            for row in filter(None, reader):
                line = reader.line_num
                if len(row) != len(header):
                    raise ValueError(f"{counted(len(row), 'cell')} instead of {len(header)}")
                inputs.append([float(cell) for cell in row[:-1]])
                if not all(map(math.isfinite, inputs[-1])):
                    raise ValueError("a number is not finite")
                words.append(row[-1].strip())
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file}, line {line}: {first_line(error)}. Correct the line, or take it out.") from error
    classes = {word: number for number, word in enumerate(sorted(set(words)))}
    if len(words) < MIN_ROWS or not 2 <= len(classes) <= len(words) // 2:
        found = f"{counted(len(words), 'row')} and {len(classes)} different values in the last column"
        raise DataError(f"{file}: {found}. Name a file with the class as last column and at least {MIN_ROWS} rows.")
    return torch.tensor(inputs, dtype=torch.float64), torch.tensor([classes[word] for word in words])
