import re

import pytest

from wellfed.errors import ConfigError
from wellfed.run.folder.run_folder import create, open_given


def test_a_new_folder_by_time_and_four_hex_digits(tmp_path):
    made = create(tmp_path / "logs", "recsys")
    assert made.path.parent == tmp_path / "logs" / "recsys" / "runs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}", made.path.name)
    assert made.path.is_dir()
    assert made.is_new


@pytest.fixture
def unwritable(tmp_path):
    """A file where a folder should be: not even root can write into it."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def test_logs_that_cannot_be_written_are_a_fault(unwritable):
    with pytest.raises(ConfigError, match="Set paths.log_dir to a folder") as caught:
        create(unwritable, "w")
    assert f"paths.log_dir={unwritable}: can't be written" in str(caught.value)


def test_a_folder_that_holds_a_run_is_only_for_its_resume(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(f"hydra.run.dir={tmp_path}: holds a run already.")) as caught:
        open_given(tmp_path, resume=False).begun()
    assert f"resume={tmp_path}" in str(caught.value)
    made = open_given(tmp_path, resume=True)
    assert not made.is_new


def test_undo_removes_a_new_folder_and_leaves_a_resumed_one_alone(tmp_path):
    new = open_given(tmp_path / "new", resume=False).begun()
    (new.path / "run.json").write_text("")
    new.undo()
    assert not new.path.exists()
    (tmp_path / "run.json").write_text("{}")
    resumed = open_given(tmp_path, resume=True).begun()
    (tmp_path / "train.log").write_text("a line")
    resumed.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "train.log"}


def test_a_folder_that_cannot_be_made(unwritable):
    with pytest.raises(ConfigError, match="can't be created"):
        open_given(unwritable / "run", resume=False)


def test_undo_leaves_a_users_own_folder_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    (tmp_path / "train.log").write_text("of another program")
    made = open_given(tmp_path, resume=False).begun()
    (tmp_path / "mine" / "more.txt").write_text("written meanwhile")
    (tmp_path / "run.json").write_text("{}")
    made.undo()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "more.txt", "notes.txt", "train.log"]
