import pytest

from wellfed.config.compose import compose
from wellfed.config.faults import check_composed
from wellfed.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "purpose"), [("tensorboard", "event files of TensorBoard"), ("mlflow", "runs in mlflow")]
)
def test_a_logger_that_is_not_installed_is_told_with_the_way_out(name, purpose, monkeypatch):
    monkeypatch.setattr(check_composed, "is_installed", lambda package: False)
    with pytest.raises(ConfigError) as caught:
        compose([f"logger={name}", "loader.num_workers=-1"])
    first, second = sorted(map(str, caught.value.faults), key=lambda text: "logger" in text)
    assert "loader.num_workers=-1" in first
    assert second == (
        f"logger.{name}=true: needs the package {name} ({purpose}), which is not installed. "
        f"Install it: python -m pip install 'wellfed[{name}]'; or leave out logger={name}."
    )


def test_what_is_not_chosen_is_not_needed(monkeypatch):
    monkeypatch.setattr(check_composed, "is_installed", lambda package: False)
    compose(["logger=[wandb,csv]"])
