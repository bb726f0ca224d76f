"""Data read in order from tar files, as people bring them: copied beside a user's configuration by the tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wellfed.contract import Datasets, LossOutput

WIDTH, SHARDS, ROWS = 4, 4, 25


def written(folder: Path = Path("shards")) -> list[Path]:
    """Tar files of samples; each has its number."""
    folder.mkdir(exist_ok=True)
    drawn = torch.Generator().manual_seed(0)
    paths = [folder / f"{number}.tar" for number in range(SHARDS)]
    for shard, path in enumerate(paths):
        rows = torch.randn(ROWS, WIDTH, generator=drawn)
        if path.exists():
            continue
        with tarfile.open(path, "w") as tar:
            for row in range(ROWS):
                data = io.BytesIO()
                x = rows[row].clone()
                torch.save({"index": torch.tensor(shard * ROWS + row), "x": x, "y": x.sum(0, keepdim=True)}, data)
                member = tarfile.TarInfo(f"{row:04}.pt")
                member.size = len(data.getvalue())
                data.seek(0)
                tar.addfile(member, data)
    return paths


class Tars(IterableDataset[Any]):
    """Shared as torch's documentation does it: each worker takes some of the files."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        told = get_worker_info()
        for path in self.paths if told is None else self.paths[told.id :: told.num_workers]:
            yield from members(path)


def members(path: Path, first: int = 0) -> Iterator[dict[str, Tensor]]:
    """The samples of a file."""
    with tarfile.open(path) as tar:
        for member in tar.getmembers()[first:]:
            data = tar.extractfile(member)
            assert data is not None
            yield torch.load(io.BytesIO(data.read()), weights_only=True)


class Places(IterableDataset[Any]):
    """Says where it stands; ranks and workers share its files, which come in another order each epoch."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.epoch, self.file, self.row = paths, 0, 0, 0

    def __len__(self) -> int:
        return len(self.paths) * ROWS

    def set_epoch(self, epoch: int) -> None:
        """What the order goes by."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        turn = self.epoch % len(self.paths)
        paths, told = [*self.paths[turn:], *self.paths[:turn]], get_worker_info()
        if torch.distributed.is_initialized():
            paths = paths[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
        if told is not None:
            paths = paths[told.id :: told.num_workers]
        while self.file < len(paths):
            for sample in members(paths[self.file], self.row):
                self.row += 1
                yield sample
            self.file, self.row = self.file + 1, 0
        self.file = 0

    def state_dict(self) -> dict[str, int]:
        """File and row."""
        return {"file": self.file, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.file, self.row = state["file"], state["row"]


def tars() -> Datasets:
    """Without a length; validation and test are streams, too."""
    paths = written()
    return Datasets(Tars(paths), val=Tars(paths[:1]), test=Tars(paths[1:2]))


def places() -> Datasets:
    """With a length and states."""
    paths = written()
    return Datasets(Places(paths), val=Tars(paths[:1]))


def loader() -> DataLoader[Any]:
    """A DataLoader over them."""
    return DataLoader(Tars(written()), batch_size=16, num_workers=2)


class Net(nn.Module):
    """Writes down the samples of each step of training, in ``steps``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """As `wellfed.contract` has it."""
        if torch.is_grad_enabled():
            with Path("steps").open("a") as file:
                file.write(" ".join(map(str, batch["index"].tolist())) + "\n")
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())
