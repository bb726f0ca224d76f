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
    ("text", "message"),
    [
        ("", "line 1: [] are not the names of two or more columns"),
        ("kind\n1\n", "line 1: ['kind'] are not the names"),
        ("a;b;kind\n1;2;x\n", "line 1: ['a;b;kind'] are not the names"),
        ("\n".join(LINES[1:]), "line 1: ['1.0', '0', 'cat'] are not the names"),
        (GOOD.replace("1.2,", "tall,"), "line 4: column height: 'tall' is no finite number. Correct the line"),
        (GOOD.replace("1.2,", ","), "line 4: column height: '' is no finite number"),
        (GOOD.replace(",4,", ",nan,"), "line 4: column weight: 'nan' is no finite number"),
        (GOOD.replace("weight", '"weight\nin kg"').replace("1.2,", "tall,"), "line 5: column height: 'tall'"),
        (GOOD.replace(",4,cat", ",4, "), "line 4: column kind: no class"),
        (GOOD.replace(",4,", ",4,5,"), "line 4: 4 cells instead of 3. Correct the line"),
        ("\n".join(LINES[:4]), ": 3 rows and 1 different values in the last column, kind; 10 rows, 2 classes"),
        (GOOD.replace("dog", "cat"), ": 12 rows and 1 different values"),
        ("a,price\n" + "".join(f"1,{row}\n" for row in range(20)), ": 20 rows and 20 different values"),
        (b"a,kind\n1,\xff\n", "'utf-8' codec can't decode byte 0xff in position 9: invalid start byte. Name a .csv"),
        ("a,kind\n1,x\n" + "1" * 200_000 + ",x\n", "field larger than field limit (131072). Name a .csv file in UTF-8"),
    ],
)
def test_the_error_on_a_damaged_file_names_line_and_column(tmp_path: Path, text: str | bytes, message: str):
    path = csv_of(tmp_path, text)
    with pytest.raises(DataError) as raised:
        datasets(path)
    assert path in str(raised.value)
    assert message in str(raised.value)


def test_no_file_and_a_folder(tmp_path: Path):
    for path, problem in (
        (tmp_path / "no.csv", "No such file"),
        (tmp_path, "Is a directory"),
        ("~no_such_user/x", "No such file"),
    ):
        with pytest.raises(DataError, match=rf"workload\.data\.path={path}: {problem}.*path=null takes the embedded"):
            datasets(str(path))


@pytest.mark.parametrize("num_rows", [-1, 0, 9])
def test_too_few_rows_are_refused(num_rows: int):
    with pytest.raises(ConfigError, match=f"num_rows={num_rows}: are fewer than the 10"):
        datasets(num_rows=num_rows)
    assert len(datasets(num_rows=10).test) == 1
