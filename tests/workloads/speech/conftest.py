from pathlib import Path

import pytest

from tests.workloads.speech.recordings import folder
from wellfed import Datasets
from workloads.speech.data import datasets


@pytest.fixture(scope="session")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("tones") / "wavs", speakers=10)


@pytest.fixture
def data(tones: Path) -> Datasets:
    return datasets(str(tones), passes=1, cache_dir=str(tones.parent / "cache"))
