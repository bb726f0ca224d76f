"""The folder for what trials share."""

from __future__ import annotations

from pathlib import Path

from wellfed.study.trials.trial_setup import scratch_folder


def test_scratch_is_empty_and_goes_whatever_a_killed_sweep_has_left(tmp_path: Path) -> None:
    left = tmp_path / ".scratch"
    left.mkdir()
    (left / "rows.pt").write_text("half")
    with scratch_folder(left) as folder:
        assert list(folder.iterdir()) == []
        (folder / "rows.pt").write_text("whole")
    assert not left.exists()
