from pathlib import Path

import pytest
import torch

from wellfed import ConfigError, DataError, Datasets, SampleRng, TrainData
from wellfed.cli.blank.data import Rows, datasets

GOOD = "height,weight,kind\n" + "".join(
    f"{1 + 0.1 * row},{row * row},{'cat' if row < 6 else ' dog '}\n" for row in range(12)
)


def csv_of(folder: Path, text: str | bytes) -> str:
    file = folder / "mine.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def splits(data: Datasets) -> list[Rows]:
    return [data.train, data.val, data.test]


def test_the_splits_are_all_rows_once_and_the_same_again():
    data, again = datasets(num_rows=200), datasets(num_rows=200)
    assert [len(split) for split in splits(data)] == [160, 20, 20]
    assert len(torch.cat([split.inputs for split in splits(data)]).unique(dim=0)) == 200
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(splits(data), splits(again), strict=True))


def test_a_batch_is_its_samples():
    train = datasets(num_rows=50).train
    assert isinstance(train, TrainData)
    batch = train.fetch(torch.tensor([3, 1]), SampleRng(0, 0))
    for place, index in enumerate((3, 1)):
        assert all(torch.equal(batch[name][place], value) for name, value in train[index].items())


@pytest.mark.parametrize(
    "text",
    [GOOD, GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, GOOD.rstrip(), GOOD.replace("\n", "\n\n")],
    ids=["plain", "windows", "byte order mark", "no last newline", "empty lines"],
)
def test_a_file_of_columns(tmp_path: Path, text: str):
    data = datasets(csv_of(tmp_path, text))
    assert data.model_args == {"num_inputs": 2, "num_classes": 2}
    assert [len(split) for split in splits(data)] == [10, 1, 1]
    assert sorted(torch.cat([split.labels for split in splits(data)]).tolist()) == [0] * 6 + [1] * 6
    assert data.notes == ("12 rows of 2 classes; 50.0 % are of the commonest",)


def test_inputs_are_scaled_by_those_of_training(tmp_path: Path):
    text = "id,same,kind\n" + "".join(f"{1e9 + row},0.1,{row % 2}\n" for row in range(100))
    inputs = datasets(csv_of(tmp_path, text)).train.inputs
    assert inputs.dtype == torch.float32
    assert inputs[:, 0].mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs[:, 0].std().item() == pytest.approx(1, abs=1e-5)
    assert torch.isfinite(inputs).all()


LINES = GOOD.splitlines()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kind\n1\n", ["line 1", "kind"]),
        ("\n".join(LINES[1:]), ["line 1", "1.0"]),
        (GOOD.replace("1.2,", "tall,"), ["line 4", "tall"]),
        (GOOD.replace(",4,", ",nan,"), ["line 4", "finite"]),
        (GOOD.replace(",4,", ",4,5,"), ["line 4", "4 cells instead of 3"]),
        ("\n".join(LINES[:4]), ["3 rows", "10"]),
        ("a,price\n" + "".join(f"1,{row}\n" for row in range(20)), ["20 different values"]),
        (b"a,kind\n1,\xff\n", ["utf-8"]),
    ],
)
def test_the_error_on_a_damaged_file_names_line_and_column(tmp_path: Path, text: str | bytes, named: list[str]):
    path = csv_of(tmp_path, text)
    with pytest.raises(DataError) as raised:
        datasets(path)
    assert path in str(raised.value)
    assert all(part in str(raised.value) for part in named)


def test_no_file_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "no.csv", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            datasets(str(path))


@pytest.mark.parametrize("num_rows", [-1, 0, 9])
def test_too_few_rows_are_refused(num_rows: int):
    with pytest.raises(ConfigError, match=f"num_rows={num_rows}: are fewer than the 10"):
        datasets(num_rows=num_rows)
    assert len(datasets(num_rows=10).test) == 1
