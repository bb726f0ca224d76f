"""Pictures of a workload's own within the page of its run."""

import base64
import zlib
from pathlib import Path

import pytest

from tests.kit.made_run import made_run
from tests.kit.page_reader import read_page
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.pictures import run_pictures as own
from wellfed.explain.report.pictures.run_pictures import own_pictures
from wellfed.explain.report.run_page import to_html
from wellfed.record.entries import RunRecord


def png() -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    head = (1).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\7")) + chunk(b"IEND", b"")


def shown(folder: Path, **artifacts: str) -> list[str]:
    return [one.title for one in own_pictures(RunRecord("r", artifacts=artifacts), folder)]


def test_a_picture_is_in_the_page_and_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "map.png").write_bytes(png())
    made_run(tmp_path, artifacts={"class <map>": "map.png", "classes": "classes.csv", "log": "train.log"})
    page = read_page(to_html(Evidence.read(tmp_path), tmp_path))
    assert ("src", "data:image/png;base64," + base64.b64encode(png()).decode()) in page.attributes
    assert ("alt", "class <map>") in page.attributes
    assert "classes: classes.csv" in page.text
    assert "train.log" not in page.text


@pytest.mark.parametrize(
    ("path", "content"),
    [("missing.png", None), ("text.png", b"no picture"), ("../up.png", png()), ("map.svg", png()), ("folder.png", "")],
)
def test_other_files_are_left_out(tmp_path: Path, path: str, content: bytes | str | None) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if isinstance(content, bytes):
        (folder / path).write_bytes(content)
    elif content is not None:
        (folder / path).mkdir()
    assert shown(folder, one=path) == []


def test_pictures_are_limited_in_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MOST_BYTES", len(png()))
    names = [f"p{number}" for number in range(own.MOST_PICTURES + 2)]
    for name in names:
        (tmp_path / f"{name}.png").write_bytes(png() + b"x" * (name == "p0"))
    found = shown(tmp_path, **{name: f"{name}.png" for name in names})
    assert found == names[1 : own.MOST_PICTURES + 1]
