"""Two ranks share a stream without doubles or losses, in as many steps each, and go on where they were left."""

import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import streams
from tests.kit.streams import SIZE, loader_of
from wellfed.data.streams.stream_ranks import StepsOfRanks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


class Uneven(streams.Sharded):
    """The first part is the longest."""

    def shard(self, index: int, count: int) -> Any:
        return streams.Sharded(self.numbers[: SIZE - 6] if index == 0 else self.numbers[SIZE - 6 :])


def _read(rank: int, folder: Path, kind: Any, stop: int | None) -> None:
    """Leaves what each step of two epochs was, and with ``stop`` goes on in another loader after so many."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    found: list[Any] = []

    def made() -> StepsOfRanks:
        return StepsOfRanks(loader_of(kind(), batch_size=8, rank=rank, world_size=2))

    steps, epochs = made(), 0
    while epochs < 2:
        for one in steps:
            batch = [] if one.is_padding else one.batch.tolist()
            found.append([one.epoch, one.index, batch, one.total, one.is_last])
            if len(found) == stop:
                break
        if len(found) == stop:
            state, steps, stop = steps.state_dict(), made(), None
            steps.load_state_dict(state)
            epochs += found[-1][-1]
        else:
            epochs += 1
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def _shared(folder: Path, kind: Any, *, stop: int | None = None) -> list[Any]:
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_read, args=(rank, folder, kind, stop)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    return list(zip(*(json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)), strict=True))


@pytest.mark.parametrize(("kind", "num_steps"), [(streams.Sharded, 3), (streams.ByWorker, 3), (Uneven, 2)])
def test_both_ranks_step_until_one_has_no_other_batch(tmp_path: Path, kind: Any, num_steps: int) -> None:
    found = _shared(tmp_path / "whole", kind)
    for epoch in (0, 1):
        steps = [pair for pair in found if pair[0][0] == epoch]
        samples = [sample for pair in steps for rank in pair for sample in rank[2]]
        assert len(samples) == len(set(samples))
        assert len(samples) == SIZE or kind is Uneven
        assert [one[1] for one, _ in steps] == [other[1] for _, other in steps] == list(range(num_steps))
        assert all(one[3] == other[3] == len(one[2]) + len(other[2]) for one, other in steps)
        assert [one[4] for one, _ in steps] == [other[4] for _, other in steps] == [False] * (len(steps) - 1) + [True]


def test_they_go_on_where_they_were_left(tmp_path: Path) -> None:
    whole = _shared(tmp_path / "whole", Uneven)
    for stop in range(1, len(whole)):
        assert _shared(tmp_path / f"stopped{stop}", Uneven, stop=stop) == whole, stop
