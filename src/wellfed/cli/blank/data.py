"""Reads rows of numbers, each of one class, from a .csv file, or makes points around centres."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from wellfed import ConfigError, DataError, Datasets, Fault, FeatureSource, SampleRng, check_file
from wellfed.units import counted, show_percent

MIN_ROWS = 10
"""With fewer, validation and test would have none."""


class Rows:
    """Inputs ``[rows, columns]`` and classes ``[rows]``, in memory."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        """A whole batch at once, which spares the collating; what is random in it is drawn from ``rng``."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


class Accuracy:
    """The share of rows whose class has the highest score; the mean loss of a split is taken beside it."""

    best_metric = "accuracy"
    best_mode: Literal["max", "min"] = "max"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Called before each pass."""
        self.right, self.seen = torch.zeros(()), 0

    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Called for each batch: sums, so that it does not matter how the rows are cut into batches."""
        right = (model(batch["inputs"]).argmax(1) == batch["labels"]).sum()
        self.right = self.right.to(right.device) + right
        self.seen += len(batch["labels"])

    def compute(self) -> dict[str, float]:
        """Called once, at the end of a pass."""
        return {"accuracy": float(self.right) / self.seen}

    def state(self) -> tuple[Tensor, int]:
        """What has been seen, for the other ranks: with `merge`, several GPUs share the batches."""
        return self.right, self.seen

    def merge(self, states: Sequence[tuple[Tensor, int]]) -> None:
        """Called before `compute` with what each rank has seen."""
        self.right = torch.stack([right for right, _ in states]).sum()
        self.seen = sum(seen for _, seen in states)

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Plots and tables for the run folder: none."""
        return {}


def datasets(path: str | None = None, num_rows: int = 10_000) -> Datasets:
    """What the configuration names: a tenth of the rows for validation, a tenth for the test, the same in each run.

    Args:
        path: a .csv file, see `read_csv`; None = the embedded data.
        num_rows: of the embedded data.

    Raises:
        DataError: the file is missing or damaged.
        ConfigError: too few rows are asked for.
    """
    inputs, labels = embedded(num_rows) if path is None else read_csv(Path(os.path.expanduser(path)))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, val, train = order.tensor_split([len(order) // 10, len(order) // 5])
    spread = inputs[train].std(0)
    inputs = ((inputs - inputs[train].mean(0)) / torch.where(spread > 0, spread, 1)).float()
    num_classes = int(labels.max()) + 1
    commonest = float(labels.bincount().max()) / len(labels)
    size = f"{counted(len(labels), 'row')} of {num_classes} classes; {show_percent(commonest)} are of the commonest"
    return Datasets(
        train=Rows(inputs[train], labels[train]),
        val=Rows(inputs[val], labels[val]),
        test=Rows(inputs[test], labels[test]),
        evaluation=Accuracy(),
        model_args={"num_inputs": inputs.shape[1], "num_classes": num_classes},
        notes=(size,),
    )


def embedded(num_rows: int) -> tuple[Tensor, Tensor]:
    """Points around four centres; the clouds overlap, so that nobody can be right about all of them.

    Raises:
        ConfigError: that are too few.
    """
    if num_rows < MIN_ROWS:
        problem = f"are fewer than the {MIN_ROWS} that three splits need."
        raise ConfigError([Fault(f"workload.data.num_rows={num_rows}", problem, "Write num_rows=10000 or so.")])
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 8, generator=generator)
    labels = torch.randint(4, (num_rows,), generator=generator)
    return centres[labels] + torch.randn(num_rows, 8, generator=generator), labels


def read_csv(file: Path) -> tuple[Tensor, Tensor]:
    """Names of columns in the first line, then a row a line: numbers, and last the class, which may be any word.

    Raises:
        DataError: with file, line, column and way out.
    """
    lines = _lines(file)
    first, header = next(lines, (1, []))
    if len(header) < 2 or any(_is_number(name) for name in header[:-1]):
        problem = "names of two or more columns, separated by commas, are expected, the class being the last"
        raise DataError(f"{file}, line {first}: {problem}. Write them above the numbers.")
    inputs, words = [], []
    for number, cells in lines:
        if len(cells) != len(header):
            problem = f"{counted(len(cells), 'column')} instead of {len(header)}"
            raise DataError(f"{file}, line {number}: {problem}. Fill it up, or take the line out.")
        for name, cell in zip(header, cells[:-1], strict=False):
            if not _is_number(cell):
                way_out = "Correct it, or take the line or the column out."
                raise DataError(f"{file}, line {number}, column {name}: {cell!r} is no finite number. {way_out}")
        if not (word := cells[-1].strip()):
            problem = "empty, where a class is expected. Fill it in, or take the line out."
            raise DataError(f"{file}, line {number}, column {header[-1]}: {problem}")
        inputs.append([float(cell) for cell in cells[:-1]])
        words.append(word)
    classes = sorted(set(words))
    if len(words) < MIN_ROWS or not 2 <= len(classes) <= len(words) // 2:
        found = f"{counted(len(words), 'row')} and {len(classes)} different values in the last column, {header[-1]}"
        rule = f"{MIN_ROWS} rows, 2 classes, and 2 rows a class are the least"
        raise DataError(f"{file}: {found}; {rule}. Add rows, or make the class the last column.")
    number_of = {word: number for number, word in enumerate(classes)}
    return torch.tensor(inputs, dtype=torch.float64), torch.tensor([number_of[word] for word in words])


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines that hold anything, with their numbers."""
    number = 0
    check_file(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            for cells in reader:
                number = reader.line_num
                if cells:
                    yield number, cells
    except OSError as error:
        way_out = "Name a .csv file; workload.data.path=null takes the embedded data."
        raise DataError(f"workload.data.path={file}: {error.strerror}. {way_out}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        way_out = "Save it as .csv in UTF-8."
        raise DataError(f"{file}, after line {number}: no text in UTF-8 with commas ({error}). {way_out}") from error


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False
