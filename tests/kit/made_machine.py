"""Makes up machines whose every cost is known, and runs configurations on them in no time.

What a configuration means is decided by the real plan, and what its trial says by the real rules of the diagnosis; only
the times are made up: a period is the slowest of building, handing over, copying and computing, and of all their work
over the cores.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from tests.kit.machines import card, machine
from wellfed.config.rules import needs_workers, workers
from wellfed.config.schema import (
    Backend,
    Compile,
    FeatureMode,
    GpuConfig,
    LoaderConfig,
    MemoryConfig,
    RunConfig,
    WorkloadConfig,
)
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError
from wellfed.explain.diagnosis.evidence import HOST, Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, RunPlan
from wellfed.record.entries import RunRecord
from wellfed.study.rows import Row
from wellfed.study.tune.trial import TuneTrial

SAMPLES = 64
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "loader": {
        "baseline": {
            **{"backend": Backend.torch, "num_workers": 0, "persistent_workers": False, "pin_memory": False},
            **{"timeout_s": 0, "device_prefetch": 0},
        },
        "conservative": {"num_workers": 1, "prefetch_factor": 2, "device_prefetch": 1, "timeout_s": 60},
        "balanced": {"prefetch_factor": 4, "device_prefetch": 2, "timeout_s": 60},
        "aggressive": {"prefetch_factor": 8, "device_prefetch": 4, "timeout_s": 60},
        "auto": {},
    },
    "memory": {
        "auto": {},
        "cache": {"features": FeatureMode.cache},
        "cache_host": {"features": FeatureMode.cache_host},
        "dynamic": {"features": FeatureMode.dynamic},
        "accumulate": {"accumulate": 4},
    },
}
"""As configs/ has them."""
GRID = [
    (f"loader={loader}", f"memory={memory}", f"gpu.compile={compile_}")
    for loader, memory, compile_ in product(_OPTIONS["loader"], _OPTIONS["memory"], ("none", "default"))
]
"""The points of ``sweep=full``."""
_STEPS, _EPOCH = 150, 50


@dataclass(frozen=True)
class MadeMachine:
    """Cost of everything, in milliseconds of one step or batch."""

    seed: int
    cores: int
    has_card: bool
    step_ms: float
    """On the device, alone, without features."""
    launch_ms: float
    getitem_ms: float
    """CPU time of a batch sample by sample."""
    fetch_ms: float | None
    """CPU time of a whole batch; None: the data has no fetch."""
    outside_ms: float
    """Time that a batch waits for a disk."""
    lock_frac: float
    """Share of building under Python's lock."""
    handover_ms: float
    """Time to receive a batch from another process."""
    copy_ms: float
    encoder_ms: float | None
    """Cost of features that are not kept; None: there are none."""
    split_factor: float
    """Factor on a step in four parts."""
    compiled_factor: float
    restart_ms: float
    noise: float
    """Standard deviation of a rate between runs, as a fraction."""
    unevenness: float
    """Half of the interval of a rate that worker processes feed, as a fraction: their batches come in bursts."""

    @classmethod
    def draw(cls, seed: int) -> MadeMachine:
        """Returns a random machine."""
        dice = random.Random(seed)
        spread = lambda low, high: low * (high / low) ** dice.random()  # noqa: E731
        has_card, getitem_ms = dice.random() < 0.5, spread(0.3, 200)
        return cls(
            seed=seed,
            cores=dice.choice((2, 4, 8, 16)),
            has_card=has_card,
            step_ms=spread(1, 100),
            launch_ms=spread(0.5, 5) if has_card else 0.0,
            getitem_ms=getitem_ms,
            fetch_ms=getitem_ms / spread(1, 200) if dice.random() < 0.5 else None,
            outside_ms=spread(0.1, 100) if dice.random() < 0.3 else 0.0,
            lock_frac=dice.choice((0.05, 0.3, 0.9)),
            handover_ms=spread(0.3, 10),
            copy_ms=spread(0.05, 10) if has_card else 0.0,
            encoder_ms=spread(1, 100) if dice.random() < 0.3 else None,
            split_factor=1 + spread(0.02, 0.6) if has_card or dice.random() < 0.7 else 1 - spread(0.02, 0.3),
            compiled_factor=dice.choice((1.0, 1.05, 0.9, 0.7)),
            restart_ms=spread(20, 500),
            noise=spread(0.003, 0.02),
            unevenness=dice.choice((0.0, 0.0, 0.05, 0.3)),
        )

    def starts(self) -> Iterator[tuple[str, ...]]:
        """Yields the overrides that a user may start with."""
        yield "loader=baseline", "memory=dynamic"
        yield "loader=baseline", "memory=dynamic", "loader.num_workers=4", "loader.prefetch_factor=2"
        yield "loader=baseline", "memory=accumulate", f"loader.num_workers={2 * self.cores}", "loader.prefetch_factor=1"
        yield "loader=auto", "memory=auto"
        yield "loader=conservative", "memory=cache_host"

    @cached_property
    def _timed(self) -> dict[Any, dict[str, float]]:
        """Times of the backends, by all that decides which are timed, and with how many workers."""
        return {}

    @cached_property
    def _facts(self) -> Any:
        return machine(*([card(capability="8.6")] if self.has_card else []), cores=float(self.cores))

    @cached_property
    def _data(self) -> DataFacts:
        rows = {} if self.encoder_ms is None else {"feature_rows": 1000, "feature_bytes": 2**20}
        return DataFacts(100_000, has_fetch=self.fetch_ms is not None, **rows)

    def plan(self, words: Sequence[str]) -> tuple[RunConfig, RunPlan]:
        """Returns configuration and plan, as a run would make them.

        Raises:
            ConfigError: the words contradict each other.
        """
        config, choices = _configured(words)
        if faults := [*workers(config), *needs_workers(config)]:
            raise ConfigError(faults)
        device = plan_device(config, choices, self._facts)
        model = ModelFacts(2**20, 2**20, 2**21)

        def planned(loader: LoaderConfig, first: FirstBatches) -> RunPlan:
            given = replace(config, loader=loader)
            return plan_run(given, choices, self._facts, device, self._data, model, first)

        build_ms = (self.fetch_ms or self.getitem_ms) + self.outside_ms
        first, step_ms = FirstBatches(build_ms, 2**16, 1000), max(1.0, build_ms)
        rough = planned(config.loader, first)
        if not rough.loader.candidates or not 0.05 <= build_ms <= 250:
            return config, rough
        key = (rough.loader.candidates, config.loader.num_workers, choices.get("loader"))
        if key not in self._timed:
            for name in rough.loader.candidates:
                if name != "processes" or build_ms >= 1:
                    one = planned(replace(config.loader, backend=Backend(name)), first)
                    period_ms = sum(self._step(one, step_ms)[:4])
                    if self.has_card and not one.loader.num_workers:  # nothing is built while that loop rests
                        period_ms = build_ms + step_ms
                    self._timed.setdefault(key, {})[name] = period_ms
        return config, planned(config.loader, replace(first, timed=self._timed.get(key, {})))

    def _step(self, plan: RunPlan, step_ms: float) -> tuple[float, float, float, float, float, float]:
        """Wait, copy, compute and host of a step; CPU time of building a batch, and of all."""
        loader, fetches = plan.loader, self.fetch_ms is not None and plan.loader.backend != "torch"
        cpu_ms = self.fetch_ms if fetches and self.fetch_ms is not None else self.getitem_ms
        build_ms, host_ms, count = cpu_ms + self.outside_ms, 0.1, loader.num_workers
        is_thread = loader.backend == "threads"
        handover_ms = 0.0 if not count else 0.05 if is_thread else self.handover_ms
        made_ms = build_ms / count if count else build_ms
        if is_thread:
            made_ms = max(made_ms, self.lock_frac * cpu_ms)
        if not self.has_card:
            of_step_ms = 0.8 * self.cores * step_ms
            if not count:
                return build_ms, 0.0, step_ms, host_ms, cpu_ms, cpu_ms + of_step_ms
            crowded_ms = (cpu_ms + handover_ms + of_step_ms) / self.cores
            compute_ms = max(step_ms, crowded_ms - handover_ms)
            wait_ms = max(handover_ms, made_ms - compute_ms)
            return wait_ms, 0.0, compute_ms, host_ms, cpu_ms, cpu_ms + of_step_ms
        copy_ms = self.copy_ms * (0.5 if loader.pin_memory else 1.0)
        launched_ms = self.launch_ms + handover_ms + (self.lock_frac * cpu_ms if is_thread else 0.0)
        shown_ms = max(0.0, copy_ms - step_ms) if loader.device_prefetch else copy_ms
        if not count and not loader.device_prefetch:
            launched_ms += build_ms
        crowded_ms = (cpu_ms + launched_ms) / self.cores
        period_ms = max(step_ms + shown_ms, launched_ms, made_ms, crowded_ms)
        wait_ms = period_ms - step_ms - shown_ms
        return wait_ms, shown_ms, step_ms, host_ms, cpu_ms, cpu_ms + launched_ms

    def rate(self, words: Sequence[str]) -> tuple[float, float] | None:
        """Samples a second without noise, and the seconds of its trial; None: it can't be run."""
        try:
            _, plan = self.plan(words)
        except ConfigError:
            return None
        parts = self._step(plan, self._step_alone(plan))
        period_ms = sum(parts[:4]) + (self.restart_ms / _EPOCH if _restarts(plan) else 0.0)
        return 1e3 * SAMPLES / period_ms, _trial_s(plan, period_ms)

    def noisy(self, words: Sequence[str], rate: float) -> float:
        """A rate as it is seen once; the same for the same words."""
        return rate / random.Random(f"{self.seed} {sorted(words)}").gauss(1.0, self.noise)

    def run(self, words: Sequence[str]) -> TuneTrial:
        """A trial of these words; the same of the same words."""
        try:
            config, plan = self.plan(words)
        except ConfigError as error:
            refused = {"kind": "config", "message": str(error.faults[0]), "advice": ""}
            row = Row("point", "trial", tuple(words), "invalid", 1, seconds=0.1, error=refused)
            return TuneTrial(row, RunRecord("run"))
        step_ms = self._step_alone(plan)
        wait_ms, copy_ms, compute_ms, host_ms, cpu_ms, all_cpu_ms = self._step(plan, step_ms)
        slow = 1 / self.noisy(words, 1.0)
        dice = np.random.default_rng(self.seed)
        waits = slow * wait_ms * dice.normal(1.0, 0.02, _STEPS)
        if _restarts(plan):
            waits[::_EPOCH] += self.restart_ms
        computes = np.full(_STEPS, slow * compute_ms)
        period_ms = float(np.mean(waits + computes)) + copy_ms + host_ms
        rate, top = 1e3 * SAMPLES / period_ms, 1e3 * SAMPLES / (step_ms + host_ms) * dice.normal(1.0, 0.01)
        half = max(2 * self.noise, self.unevenness if plan.loader.has_processes else 0.0) * rate
        record = RunRecord(
            "run",
            status="ok",
            overrides=list(words),
            config={"loader": vars(config.loader), "memory": vars(config.memory)},
            steps=_STEPS,
            samples=SAMPLES * _STEPS,
            plan=plan.to_dict(),
            machine={"cpu_quota_cores": float(self.cores)},
            throughput={
                **{"samples_per_s": rate, "ci95": [rate - half, rate + half], "steps": _STEPS, "warmup_steps": 0},
                "sample_unit": "samples",
            },
            ceiling={"samples_per_s": top},
            readiness_frac=float(np.mean(waits < 0.01 * period_ms)),
            time={
                "wait_frac": float(np.mean(waits)) / period_ms,
                "copy_frac": copy_ms / period_ms if self.has_card else None,
                "compute_frac": float(np.mean(computes)) / period_ms,
                "host_frac": host_ms / period_ms,
                "step_ms_mean": period_ms,
                "step_ms_p50": period_ms,
                "step_ms_p95": period_ms,
                "launch_ms_p50": self.launch_ms if self.has_card else None,
            },
            loading={
                "build_ms_mean": cpu_ms + self.outside_ms,
                "build_ms_p50": cpu_ms + self.outside_ms,
                "cpu_frac": cpu_ms / (cpu_ms + self.outside_ms),
                "has_fetch": self.fetch_ms is not None,
            },
        )
        table = {
            "step": np.arange(1.0, _STEPS + 1),
            "time_s": np.cumsum(waits + computes + copy_ms + host_ms) / 1e3,
            "epoch": np.arange(_STEPS) // _EPOCH * 1.0,
            "wait_ms": waits,
            "copy_ms": np.full(_STEPS, copy_ms if self.has_card else np.nan),
            "compute_ms": computes,
            "host_ms": np.full(_STEPS, host_ms),
            "build_ms": np.full(_STEPS, cpu_ms + self.outside_ms),
            "build_cpu_ms": np.full(_STEPS, cpu_ms),
        }
        curves = {"cpu_pct": np.full(10, 100 * all_cpu_ms / period_ms), "others_cpu_pct": np.zeros(10)}
        if plan.loader.has_processes:
            curves["loader_cpu_pct"] = np.full(10, 100 * cpu_ms / period_ms)
        record.findings = [each.entry() for each in run_rules(Evidence(record, table, {HOST: curves}))]
        row = Row(
            *("point", "trial", tuple(words), "ok", 1),
            samples_per_s=rate,
            seconds=_trial_s(plan, period_ms),
            ci95=(rate - half, rate + half),
            readiness_frac=record.readiness_frac,
            ceiling_samples_per_s=top,
        )
        return TuneTrial(row, record)

    def _step_alone(self, plan: RunPlan) -> float:
        step_ms = self.step_ms
        if plan.memory.accumulate > 1:
            step_ms *= self.split_factor
        if plan.device.compile != "none":
            step_ms *= self.compiled_factor
        return step_ms + (self.encoder_ms or 0.0 if plan.memory.features == "dynamic" else 0.0)


def _restarts(plan: RunPlan) -> bool:
    return plan.loader.has_processes and not plan.loader.persistent_workers


def _trial_s(plan: RunPlan, period_ms: float) -> float:
    return 2.0 + _STEPS * period_ms / 1e3 + (20.0 if plan.device.compile != "none" else 0.0)


def _configured(words: Sequence[str]) -> tuple[RunConfig, dict[str, str]]:
    """Options first, then single knobs, as Hydra merges them."""
    groups: dict[str, dict[str, Any]] = {"loader": {}, "memory": {}, "gpu": {}}
    choices = dict(part for word in words if "." not in (part := tuple(word.split("=")))[0])
    for group, choice in choices.items():
        groups[group] |= _OPTIONS[group][choice]
    kinds: dict[str, Any] = {"backend": Backend, "compile": Compile, "features": FeatureMode}
    for word in words:
        knob, _, text = word.partition("=")
        if "." in knob:
            group, _, name = knob.partition(".")
            plain: dict[str, Any] = {"null": None, "true": True, "false": False}
            value = plain[text] if text in plain else int(text) if text.isdigit() else kinds[name](text)
            groups[group][name] = value
    config = RunConfig(
        workload=WorkloadConfig(name="w", effective_batch_size=SAMPLES),
        loader=LoaderConfig(**groups["loader"]),
        memory=MemoryConfig(**groups["memory"]),
        gpu=GpuConfig(**groups["gpu"]),
    )
    return config, choices
