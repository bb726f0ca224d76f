"""Does the forecaster forecast? Seasonal naive, ETS and the default options over the same origins of the same series.

    python benchmarks/forecast_references.py --out benchmarks/records/DATE_forecast_references_DEVICE.json

Needs statsmodels, for ETS and for the real series that come with it. Every training is ``python src/train.py`` as a
user types it, tested with the weights that were best on validation. ETS is chosen for each series by AICc of `FORMS`,
fitted to all that comes before the first test origin (validation included, which the network is not trained on), and
rolled over the origins with these parameters; missing values are interpolated for it. MASE divides by the seasonal
naive error of the train part. Differences come with a paired bootstrap over series, or over origins where series are
few. In the table of hours ETS knows one season, the day.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import statsmodels
import torch
from numpy.typing import NDArray
from statsmodels.tsa.exponential_smoothing.ets import ETSModel

from wellfed.record import git_state
from workloads.forecast.synthetic import daily_series

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = Path(statsmodels.__file__).parent
FORMS: tuple[dict[str, Any], ...] = (
    {"error": "add", "trend": None, "seasonal": "add"},
    {"error": "add", "trend": "add", "damped_trend": True, "seasonal": "add"},
    {"error": "mul", "trend": None, "seasonal": "mul"},
    {"error": "mul", "trend": "add", "damped_trend": True, "seasonal": "mul"},
)
RESAMPLES = 10_000
FEW_SERIES = 10
Floats = NDArray[np.float64]
Errors = dict[tuple[str, str], Floats]
"""Absolute errors by series and date of the origin, in units of the series' seasonal naive error."""


@dataclass
class SeriesTable:
    """Series of one frequency, and what is asked of them."""

    values: pd.DataFrame
    """By date; a column each, NaN where there is none."""
    season: int
    source: str
    overrides: list[str] = field(default_factory=list)
    is_embedded: bool = False


def tables() -> dict[str, SeriesTable]:
    """The embedded set, and real ones from the package of statsmodels."""
    dates, values_ST, names = daily_series(20, 1500, 0)
    hourly = pd.read_csv(SHIPPED / "tsa/stl/tests/results/mstl_elec_vic.csv", index_col=0, parse_dates=True)
    return {
        "embedded": SeriesTable(pd.DataFrame(values_ST.T, dates, names), 7, "synthetic.daily_series", is_embedded=True),
        "monthly": SeriesTable(
            monthly(),
            12,
            "statsmodels: elec_equip, elnino, co2 (monthly means), housing starts of the tests of holtwinters",
            ["workload.data.horizon=6", "workload.data.windows=[24,36,60]"],
        ),
        "hourly": SeriesTable(
            hourly.rename(columns={"y": "elec_vic"}),
            24,
            "statsmodels: electricity demand of Victoria, 2012, of the tests of MSTL",
            ["workload.data.horizon=24", "workload.data.windows=[48,168]"],
        ),
    }


def monthly() -> pd.DataFrame:
    """Four series of the real world by month, of unequal length."""
    equipment = pd.read_csv(SHIPPED / "datasets/elec_equip/elec_equip.csv", index_col=0).iloc[:, 0]
    equipment.index = pd.to_datetime(equipment.index, format="%b-%d-%Y")
    housing = pd.read_csv(
        SHIPPED / "tsa/holtwinters/tests/results/housing-data.csv", index_col=0, parse_dates=True
    ).iloc[:, 0]
    sea = pd.read_csv(SHIPPED / "datasets/elnino/elnino.csv", index_col=0).to_numpy().ravel()
    temperature = pd.Series(sea, pd.date_range("1950-01-01", periods=len(sea), freq="MS"))
    weekly = pd.read_csv(SHIPPED / "datasets/co2/co2.csv")
    carbon = pd.Series(weekly["co2"].to_numpy(), pd.to_datetime(weekly["date"].astype(str)))
    named = {"elec_equip": equipment, "housing": housing, "elnino": temperature, "co2": carbon.resample("MS").mean()}
    return pd.DataFrame(named).rename_axis("date")


@dataclass
class Tested:
    """What a training leaves of each origin; the seasonal naive forecasts, too."""

    default: Errors
    seasonal_naive: Errors
    naive_mae: dict[str, float]
    """By series."""
    seconds: float


def train(table: SeriesTable, seed: int, *overrides: str) -> Tested:
    """One run of the command, in a folder that goes with it.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        options = ["workload=forecast", f"seed={seed}", "gpu=cpu", "logger=none", "telemetry=none", *overrides]
        if not table.is_embedded:
            table.values.to_csv(Path(scratch) / "series.csv", index_label="date")
            options += [f"workload.data.path={scratch}/series.csv", *table.overrides]
        command = [sys.executable, str(ROOT / "src" / "train.py"), f"hydra.run.dir={folder}", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        steps, series = rows_of(folder / "forecasts_test.csv"), rows_of(folder / "series_test.csv")
        seconds = json.loads((folder / "run.json").read_text())["duration_s"]
    naive_mae = {row["series"]: float(row["mae"]) / float(row["mase"]) for row in series}
    found: dict[str, dict[tuple[str, str], dict[int, float]]] = {"forecast": {}, "forecast_seasonal_naive": {}}
    for row in steps:
        step = int(row["step"])
        origin = table.values.index[table.values.index.get_loc(pd.Timestamp(row["date"])) - step + 1]
        for name, errors in found.items():
            error = abs(float(row[name]) - float(row["target"])) / naive_mae[row["series"]]
            errors.setdefault((row["series"], str(origin)), {})[step] = error
    default, naive = (
        {origin: np.array([error for _, error in sorted(steps.items())]) for origin, steps in errors.items()}
        for errors in found.values()
    )
    return Tested(default, naive, naive_mae, seconds)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def ets(table: SeriesTable, like: Errors, naive_mae: dict[str, float]) -> tuple[Errors, dict[str, str]]:
    """Errors at the origins of ``like``, and the form that was chosen for each series."""
    errors: Errors = {}
    chosen: dict[str, str] = {}
    for name, unit in naive_mae.items():
        series = table.values[name]
        origins = [series.index.get_loc(pd.Timestamp(origin)) for of, origin in like if of == name]
        first = series.index.get_loc(series.first_valid_index())
        form, parameters = fitted(whole(series, first, min(origins)), table.season)
        chosen[name] = " ".join(str(value) for value in form.values())
        horizon = max(map(len, like.values()))
        for origin in origins:
            model = ETSModel(whole(series, first, origin), seasonal_periods=table.season, **form)
            forecast = np.asarray(model.smooth(parameters).forecast(horizon))
            target = series.to_numpy()[origin : origin + horizon]
            error = np.abs(forecast[: len(target)] - target) / unit
            errors[name, str(series.index[origin])] = error[~np.isnan(error)]
    return errors, chosen


def whole(series: pd.Series, first: int, end: int) -> Floats:
    """What is known before an origin, gaps interpolated."""
    return series.iloc[first:end].interpolate(limit_direction="both").to_numpy()


def fitted(values: Floats, season: int) -> tuple[dict[str, Any], Floats]:
    """The form of the lowest AICc, and its parameters."""
    found = []
    for form in FORMS:
        if form["error"] == "mul" and values.min() <= 0:
            continue
        result = ETSModel(values, seasonal_periods=season, **form).fit(disp=False, maxiter=300)
        found.append((result.aicc, form, np.asarray(result.params)))
    _, form, parameters = min(found, key=lambda each: each[0])
    return form, parameters


def by_series(errors: Errors) -> dict[str, float]:
    """MASE of each series."""
    names = dict.fromkeys(name for name, _ in errors)
    return {name: float(np.concatenate([e for (of, _), e in errors.items() if of == name]).mean()) for name in names}


def difference(one: Errors, other: Errors) -> dict[str, Any]:
    """Of MASE, first minus second: mean over series, and 95 % of the bootstrapped ones."""
    names = list(by_series(one))
    rng = np.random.default_rng(0)
    paired = [np.array([one[key].mean() - other[key].mean() for key in one if key[0] == name]) for name in names]
    of_series = np.array([by_series(one)[name] - by_series(other)[name] for name in names])
    if len(names) >= FEW_SERIES:
        means = [rng.choice(of_series, len(names)).mean() for _ in range(RESAMPLES)]
    else:
        means = [np.mean([rng.choice(each, len(each)).mean() for each in paired]) for _ in range(RESAMPLES)]
    return {
        "mean": float(of_series.mean()),
        "ci95": [float(bound) for bound in np.percentile(means, [2.5, 97.5])],
        "over": "series" if len(names) >= FEW_SERIES else "origins within series",
        "series_better": int((of_series < 0).sum()),
        "series": len(names),
    }


def compared(name: str, table: SeriesTable, seeds: int, jobs: int, *overrides: str) -> dict[str, Any]:
    """One set: MASE of each series and each forecaster, and paired differences to the mean over seeds."""
    runs = []
    with ThreadPoolExecutor(jobs) as pool:
        for seed, run in enumerate(pool.map(lambda seed: train(table, seed, *overrides), range(1, seeds + 1)), 1):
            runs.append(run)
            mase = np.mean(list(by_series(run.default).values()))
            print(f"{name} seed {seed}: {mase:.3f} in {run.seconds:.0f} s", flush=True)
    naive = runs[0].seasonal_naive
    default = {key: np.mean([run.default[key] for run in runs], 0) for key in naive}
    smoothed, forms = ets(table, naive, runs[0].naive_mae)
    errors = {"seasonal_naive": naive, "ets": smoothed, "default": default}
    of_series = {of: by_series(each) for of, each in errors.items()}
    summary = {of: float(np.mean(list(each.values()))) for of, each in of_series.items()}
    print(f"{name}: {summary}", flush=True)
    return {
        "set": name,
        "source": table.source,
        "overrides": [*table.overrides, *overrides],
        "origins": len(naive),
        "n": seeds,
        "mase": summary,
        "mase_of_each_seed": [float(np.mean(list(by_series(run.default).values()))) for run in runs],
        "mase_of_each_series": of_series,
        "mae_of_each_series": {
            of: {series: value * runs[0].naive_mae[series] for series, value in each.items()}
            for of, each in of_series.items()
        },
        "ets_form": forms,
        "default_minus_ets": difference(default, smoothed),
        "default_minus_seasonal_naive": difference(default, naive),
        "seconds": [round(run.seconds, 1) for run in runs],
    }


def sentences(results: list[dict[str, Any]]) -> Iterator[str]:
    for each in results:
        low, high = each["default_minus_ets"]["ci95"]
        verdict = "better than" if high < 0 else "worse than" if low > 0 else "level with"
        mase = ", ".join(f"{of} {value:.3f}" for of, value in each["mase"].items())
        yield f"{each['set']}: {verdict} ETS ({mase}; difference {low:.3f} to {high:.3f})."


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecasts of workload=forecast against its references.")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of the default options, seeds 1, 2, ...")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; nothing is timed")
    parser.add_argument("--only", help="names of sets, with commas between")
    parser.add_argument("--steps", type=int, help="trainer.max_steps; left out: as long as the default options train")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # ETS's optimiser tells of most fits that it could go on
    overrides = [] if chosen.steps is None else [f"trainer.max_steps={chosen.steps}"]
    sets = {name: table for name, table in tables().items() if not chosen.only or name in chosen.only.split(",")}
    began_at_s = time.perf_counter()
    results = [compared(name, table, chosen.seeds, chosen.jobs, *overrides) for name, table in sets.items()]
    record = {
        "theme": "forecast_references",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/forecast_references.py" + "".join(f" {word}" for word in sys.argv[1:]),
        "git": git_state(ROOT),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "statsmodels": statsmodels.__version__,
            },
        },
        "config": {"workload": (ROOT / "configs/workload/forecast.yaml").read_text(), "overrides": overrides},
        "results": results,
        "seconds": round(time.perf_counter() - began_at_s),
        "says": " ".join(sentences(results)),
    }
    print(record["says"])
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
