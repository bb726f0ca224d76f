"""The folder of a trial that starts; the trials themselves are in tests/end_to_end/."""

from __future__ import annotations

from pathlib import Path

from wellfed.study.trials.trial_execution import open_trial_folder


def test_earlier_attempts_are_kept_beside(tmp_path: Path) -> None:
    for number in range(3):
        open_trial_folder(tmp_path / "a")
        (tmp_path / "a" / "run.json").write_text(str(number))
    found = {path.name: (path / "run.json").read_text() for path in tmp_path.iterdir()}
    assert found == {"a.attempt1": "0", "a.attempt2": "1", "a": "2"}
