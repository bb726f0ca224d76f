"""The same job on a user's own MovieLens files."""

import random
from pathlib import Path

import pytest

from tests.end_to_end.commands import only_folder, record_of, run

ARGUMENTS = ("trainer.max_steps=10", "workload.effective_batch_size=256", "logger=none", "telemetry=none")


@pytest.fixture
def ml_100k(tmp_path: Path) -> Path:
    """60 users who like films of their own half, in the 100K layout."""
    folder, rng = tmp_path / "ml-100k", random.Random(0)
    folder.mkdir()
    lines = [
        f"{user}\t{item}\t{rng.randint(1, 5)}\t{1000 + rng.randint(0, 9999)}\n"
        for user in range(1, 61)
        for item in sorted(rng.sample(range(1 + 20 * (user % 2), 21 + 20 * (user % 2)), 12))
    ]
    (folder / "u.data").write_text("".join(lines))
    (folder / "u.user").write_text("".join(f"{user}|{20 + user % 40}|M|writer|12345\n" for user in range(1, 61)))
    genres = "|".join("0" for _ in range(19))
    films = "".join(f"{item}|Caf\xe9 {item} (1995)|01-Jan-1995||http://x|{genres}\n" for item in range(1, 41))
    (folder / "u.item").write_bytes(films.encode("latin-1"))
    return folder


@pytest.mark.slow  # its files: tests/workloads/recsys
def test_it_trains_on_movielens_files(ml_100k: Path, tmp_path: Path) -> None:
    done = run("train.py", f"workload.data.path={ml_100k}", *ARGUMENTS, cwd=tmp_path)
    assert done.code == 0, done.text
    record = record_of(only_folder(tmp_path))
    assert record["status"] == "ok"
    assert record["config"]["workload"]["data"]["path"] == str(ml_100k)
    assert 0 <= record["metrics"]["test/recall_at_10"] <= 1
