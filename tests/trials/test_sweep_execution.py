"""The folder of a trial that starts; the trials themselves are in tests/end_to_end/test_sweep.py."""

from __future__ import annotations

from pathlib import Path

from wellfed.trials.sweep_execution import open_trial_folder
from wellfed.trials.sweep_setup import scratch_folder


def test_earlier_attempts_are_kept_beside(tmp_path: Path) -> None:
    for number in range(3):
        open_trial_folder(tmp_path / "a")
        (tmp_path / "a" / "run.json").write_text(str(number))
    found = {path.name: (path / "run.json").read_text() for path in tmp_path.iterdir()}
    assert found == {"a.attempt1": "0", "a.attempt2": "1", "a": "2"}


def test_scratch_is_empty_and_goes_whatever_a_killed_sweep_has_left(tmp_path: Path) -> None:
    left = tmp_path / ".scratch"
    left.mkdir()
    (left / "rows.pt").write_text("half")
    with scratch_folder(left) as folder:
        assert list(folder.iterdir()) == []
        (folder / "rows.pt").write_text("whole")
    assert not left.exists()
