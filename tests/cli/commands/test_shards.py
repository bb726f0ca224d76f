"""``python -m wellfed shards``: a folder of recordings packed into tar files."""

from pathlib import Path

import pytest

from wellfed.cli import main as cli


@pytest.fixture
def wavs(tmp_path: Path) -> Path:
    for name in ("yes", "no"):
        folder = tmp_path / "wavs" / name
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"{number}.wav").write_bytes(b"RIFF")
    for number in range(7):
        (tmp_path / "wavs" / f"notes{number}.txt").write_text("x")
    return tmp_path / "wavs"


def test_it_tells_what_was_packed(wavs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["shards", str(wavs), "--out", str(tmp_path / "out"), "--num", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"6 files of 2 classes (24 B) in 2 shards: {tmp_path / 'out'}"
    assert lines[-1] == f"To train on them: python src/train.py workload=... workload.data.path={tmp_path / 'out'}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0000.tar", "0001.tar", "classes.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--out", "out"], "nowhere does not exist"),
        (["wavs", "--out", "out", "--num", "0"], "--num 0"),
        (["wavs", "--out", "wavs"], "is not empty"),
        (["wavs/yes", "--out", "out"], "has no *.wav in folders of classes"),
    ],
)
def test_what_can_not_be_packed_is_told_and_nothing_is_left(
    wavs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["shards", *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wavs"]
