"""Data that is read in order is planned, read by workers, evaluated and gone on with as any other."""

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, train_own, weights_of
from tests.end_to_end.test_loading_on_cards import check_ordered
from tests.fake_cuda.machine import FakeCuda

YAML = """
name: {name}
effective_batch_size: 16
model: {{_target_: brought_streams.Net}}
data: {{_target_: brought_streams.{name}}}
optimizer: {{_target_: torch.optim.AdamW, lr: 0.01}}
"""
ALL = list(range(100))


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's own configuration folder and module."""
    shutil.copy(Path(__file__).with_name("brought_streams.py"), tmp_path)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    for name in ("tars", "places", "loader"):
        (folder / f"{name}.yaml").write_text(YAML.format(name=name))
    return tmp_path


def train(user: Path, workload: str, *arguments: str, **more: Any) -> Done:
    return train_own(user, workload, *arguments, ceiling_steps=0, **more)


def steps(folder: Path) -> list[list[int]]:
    return [list(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]


@pytest.mark.slow
def test_samples_make_steps_of_the_asked_size_and_an_epoch_ends_with_the_stream(user: Path) -> None:
    done = train(user, "tars", "trainer.max_epochs=1", "loader.num_workers=0")
    assert done.code == 0, done.err
    seen = steps(user)
    assert [len(batch) for batch in seen] == [16, 16, 16, 16, 16, 16, 4]
    assert list(chain(*seen)) == ALL
    found = record_of(only_folder(user, "tars"))
    assert (found["status"], found["steps"], found["epochs"]) == ("ok", 7, 1.0)
    assert set(found["metrics"]) >= {"val/loss", "test/loss"}


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["tars", "places"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been_left(user: Path, workload: str, num_workers: int) -> None:
    workers = f"loader.num_workers={num_workers}"
    for name, limits in {"whole": [12], "parted": [4, 9, 12]}.items():
        first, *later = limits
        where = user / name
        done = train(user, workload, workers, "trainer.max_epochs=null", f"trainer.max_steps={first}", cwd=where)
        assert done.code == 0, done.err
        folder = only_folder(where, workload)
        for limit in later:
            done = train(user, workload, f"resume={folder}", f"trainer.max_steps={limit}", cwd=where)
            assert done.code == 0, done.err
    whole, parted = (steps(user / name) for name in ("whole", "parted"))
    assert whole == parted
    per_epoch = 8 if num_workers else 7  # the last batch of each worker may be smaller
    assert sorted(index for batch in whole[:per_epoch] for index in batch) == ALL
    one, other = (weights_of(only_folder(user / name, workload)) for name in ("whole", "parted"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "num_workers"), [("auto", 2), ("baseline", 0)])
def test_a_data_loader_over_a_stream(user: Path, option: str, num_workers: int) -> None:
    done = train(user, "loader", f"loader={option}", "trainer.max_epochs=2")
    assert done.code == 0, done.err
    plan = record_of(only_folder(user, "loader"))["plan"]
    assert (plan["loader.backend"]["value"], plan["loader.num_workers"]["value"]) == ("own", num_workers)
    seen = list(chain(*steps(user)))
    assert sorted(seen[: len(ALL)]) == sorted(seen[len(ALL) :]) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("num_cards", [1, 2])
def test_on_cards_its_batches_are_copied_ahead_and_ordered(user: Path, fake_cuda: FakeCuda, num_cards: int) -> None:
    cards = fake_cuda.environment(cards=num_cards, report=user / "report", mib=8192, slowdown=3.0, strict=True)
    search = {"PYTHONPATH": f"{user}:{cards['PYTHONPATH']}"}
    words = ["loader.num_workers=1", "loader.device_prefetch=2", "trainer.max_epochs=2", "gpu.precision=32-true"]
    words += ["trainer=ddp", "trainer.devices=2"] if num_cards == 2 else []
    done = train(user, "places", *words, **{**cards, **search})
    assert done.code == 0, done.text
    found = record_of(only_folder(user, "places"))
    assert (found["status"], found["plan"]["loader.device_prefetch"]["value"]) == ("ok", 2)
    check_ordered(user / "report", num_cards)
    seen = steps(user)[-14:] if num_cards == 1 else steps(user)  # behind the steps that measure memory
    assert sorted(set(chain(*seen))) == ALL
    if num_cards == 1:
        assert sorted(chain(*seen)) == sorted(ALL * 2)
