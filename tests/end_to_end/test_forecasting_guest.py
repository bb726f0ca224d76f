"""pytorch-forecasting's TemporalFusionTransformer with its own DataLoaders, from yaml alone."""

import math
import random
from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, train_own

pytestmark = pytest.mark.guests
YAML = """
name: tft
model:
  _target_: pytorch_forecasting.TemporalFusionTransformer.from_dataset
  dataset: ${workload.data.train.self}
  hidden_size: 4
  attention_head_size: 1
  hidden_continuous_size: 2
  learning_rate: 0.01
data:
  _target_: wellfed.contract.Datasets
  train:
    _target_: pytorch_forecasting.TimeSeriesDataSet.to_dataloader
    self:
      _target_: pytorch_forecasting.TimeSeriesDataSet
      data: {_target_: pandas.read_csv, filepath_or_buffer: %s}
      time_idx: week
      target: sales
      group_ids: [shop]
      max_encoder_length: 12
      max_prediction_length: 4
      static_categoricals: [shop]
      time_varying_known_reals: [week]
      time_varying_unknown_reals: [sales]
    train: true
    batch_size: 16
  val:
    _target_: pytorch_forecasting.TimeSeriesDataSet.to_dataloader
    self:
      _target_: pytorch_forecasting.TimeSeriesDataSet.from_dataset
      dataset: ${workload.data.train.self}
      data: {_target_: pandas.read_csv, filepath_or_buffer: %s}
      predict: true
      stop_randomization: true
    train: false
    batch_size: 2
  test: ${workload.data.val}
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's configuration folder and a table of sales."""
    pytest.importorskip("pytorch_forecasting")
    draw, table = random.Random(0), tmp_path / "sales.csv"
    rows = [
        f"{week},s{shop},{3 + math.sin(week / 5 + shop) + draw.gauss(0, 0.1)}"
        for shop in range(4)
        for week in range(40)
    ]
    table.write_text("\n".join(["week,shop,sales", *rows]) + "\n")
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    (folder / "tft.yaml").write_text(YAML % (table, table))
    return tmp_path


def train(user: Path, *arguments: str) -> Done:
    """Its checkpoints hold encoders and scalers of other libraries."""
    return train_own(user, "tft", "trainer.trusted_checkpoints=true", *arguments)


def test_it_trains_is_tested_and_goes_on_from_yaml_alone(user: Path) -> None:
    done = train(user, "trainer.max_epochs=2", "loader=balanced", "loader.num_workers=1")
    assert done.code == 0, done.text
    folder = only_folder(user, "tft")
    record = record_of(folder)
    assert (record["status"], record["plan"]["workload.effective_batch_size"]["value"]) == ("ok", 16)
    assert record["plan"]["loader.prefetch_factor"]["value"] == 4
    assert {"val/loss", "val/SMAPE", "test/loss"} <= set(record["metrics"])
    done = train(user, f"resume={folder}", "trainer.max_epochs=3")
    assert done.code == 0, done.text
    assert record_of(folder)["steps"] == record["steps"] * 3 // 2
