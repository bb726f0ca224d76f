"""Tests marked ``simulated`` run where the marker says."""

import os
import re
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.machine import Cards
from tests.fake_cuda.marker import ROOT, compile_for


@pytest.mark.simulated(cards=2, mib=256)
def test_a_marked_test_has_its_cards() -> None:
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_properties(1).total_memory == 256 << 20
    assert (torch.ones(2, device="cuda:1") + 1).tolist() == [2, 2]


def test_others_have_none() -> None:
    assert "FAKE_CUDA_DEVICES" not in os.environ
    assert not torch.cuda.is_available()


@pytest.mark.simulated
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="what a marked test ends with is told here")
@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_is_told(number: int) -> None:
    assert number / 0


def test_only_the_pinned_torch_has_to_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("FAKE_CUDA_CACHE", str(tmp_path))
    with pytest.raises(
        pytest.skip.Exception, match=r"written for torch 2\.\S+; not compiled for 1.0: .*false can't build"
    ):
        compile_for("1.0")
    (pin,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    with pytest.raises(RuntimeError, match="false can't build the simulated cards' driver"):
        compile_for(pin.removeprefix("torch==") + "+cpu")


def test_the_page_names_every_variable() -> None:
    folder = Path(__file__).parent
    described = set(re.findall(r"^\| (FAKE_CUDA_\w+) \|", (folder / "README.md").read_text(), re.MULTILINE))
    read = re.compile(r"""environ(?:\.get\(|\[)"(FAKE_CUDA_\w+)"|_(?:mib|number)\("(\w+)""")
    found = [match for path in (folder / "site").rglob("*.py") for match in read.findall(path.read_text())]
    assert described == {whole or f"FAKE_CUDA_{end}" for whole, end in found}
    assert set(Cards().variables()) < described
