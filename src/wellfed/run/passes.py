"""Makes the passes of a run over its data: training, validation, test, ceiling; each with its callbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellfed.batches import Delivery, num_bytes
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, FeatureModeName
from wellfed.data.backend_benchmark import copied
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.loader_parts import loader_of
from wellfed.data.non_finite_samples import NonFiniteSample
from wellfed.data.streams.stream import Stream
from wellfed.data.streams.stream_loader import StreamLoader
from wellfed.data.streams.stream_ranks import StepsOfRanks
from wellfed.errors import ConfigError, LastSaveFailed, reason_of
from wellfed.observe.hardware.detect import shm_gib
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock
from wellfed.observe.timing.wall import LOGGING, VALIDATION
from wellfed.plan.host_room import Room
from wellfed.plan.loader import PREFETCH_FACTOR
from wellfed.plan.run_plan import RunPlan
from wellfed.process import StopRequest
from wellfed.ranks import launched
from wellfed.record import LongestWaitEntry
from wellfed.run.bookkeeper import PROFILE, Bookkeeper
from wellfed.run.folder.checkpoint_file import step_of
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.run.objects import assemble
from wellfed.run.objects.assemble import Parts
from wellfed.run.objects.feature_stages import planned_stages
from wellfed.run.objects.learner import GuestLearner, ModelLearner
from wellfed.run.objects.user_callbacks import check_monitors
from wellfed.run.outcome import lost_rank
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import Clock, StopWhenMeasured, TimedLoader
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.process_watch import ProcessWatch
from wellfed.train.lightning.callbacks.profile import ProfilerTrace
from wellfed.train.lightning.callbacks.progress import Counts, ProgressBar, ProgressReport
from wellfed.train.lightning.callbacks.pruning import Judge, Pruning
from wellfed.train.lightning.callbacks.stage_switch import FeatureStages
from wellfed.train.lightning.callbacks.stop import StopAtStepEnd
from wellfed.train.lightning.callbacks.synchronisations import Synchronisations
from wellfed.train.lightning.ceiling import CEILING_BATCHES, FEWEST, run_ceiling, whole
from wellfed.train.lightning.checkpoints.checkpoints import BEST
from wellfed.train.lightning.prefetch import prefetched
from wellfed.train.lightning.sanity import SanityCheck
from wellfed.train.step.non_finite import NonFiniteLoss
from wellfed.units import GIB, counted, show_duration

_LOG = logging.getLogger(__name__)
_CEILING_S, _CEILING_FRAC = 10.0, 0.05
"""What the ceiling may take: seconds, or this share of the time of training where that is more."""
_TOLD_S = 1.5
"""A ceiling that is expected to take longer is announced."""
_MOST_EXAMINED, _MOST_NAMED = 200, 3
"""Batches that are examined for NaN after a loss that is none, and steps that were left out whose samples are named."""
_LITTLE_MS = 500
"""By so much longer a few batches may take without worker processes, which must be started and ended for them."""


@dataclass(frozen=True)
class Measure:
    """How long a training that is only timed goes on."""

    steps: int
    """At most, without the warm-up."""
    within: float = 0.02
    """Half the 95 % interval of samples/s over the rate: known well enough."""


class Passes:
    """Holds what the passes share: learner, loader, options and the latest figures."""

    def __init__(
        self, config: RunConfig, parts: Parts, plan: RunPlan, books: Bookkeeper, *, rank: int, may_adapt: bool = True
    ) -> None:
        """``may_adapt``: where the plan says so; False = out of memory ends it, as a result of its own."""
        parts = assemble.for_features(parts, plan.memory.features)
        self._config, self._parts, self._plan, self._books, self._rank = config, parts, plan, books, rank
        self._journal, self._progress = books.journal, books.progress
        is_guest, trainer = parts.is_lightning_module, config.trainer
        self._options = options = lit.TrainerOptions(
            accelerator=plan.trainer.accelerator,
            devices=plan.trainer.devices,
            num_nodes=plan.trainer.num_nodes,
            strategy=plan.trainer.strategy,
            precision=plan.device.precision,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            max_time_s=trainer.max_time_s,
            gradient_clip=trainer.gradient_clip,
            validate_every_steps=trainer.validate_every_steps,
            deterministic=trainer.deterministic,
            tf32=plan.device.tf32,
            cudnn_benchmark=config.gpu.cudnn_benchmark,
            accumulate=plan.memory.accumulate if is_guest else 1,
        )
        lit.set_backend_flags(options)
        settings, on_event = assemble.loader_settings(config, plan.loader), books.journal.event
        self._loader = assemble.make_train_loader(config, settings, parts.data, rank=rank, on_event=on_event)
        self.steps_per_epoch = self._loader.steps_per_epoch
        """Optimizer steps of one pass over the training data; None = a stream that does not say."""
        self.is_pruned = False
        """Training was ended early, by its judge."""
        self._loaders: dict[str, Any] = {"train": self._loader}
        """Of the splits that are read while it trains."""
        self._eval_bytes: dict[str, int] = {}
        """Of the largest batch of each split that was tried before training."""
        self._ceiling_steps = config.telemetry.ceiling_steps if config.telemetry.enabled else 0
        self.figures = figures = Figures(
            self._log,
            every=trainer.log_every_steps,
            stop_on_nan=trainer.on_nan.value == "raise" and not is_guest,
            throughput=books.journal.recent_throughput,
        )
        self._learner: ModelLearner | GuestLearner
        if is_guest:
            self._learner = GuestLearner(config, parts, plan, books, options, figures, may_adapt)
        else:
            total_steps = lit.total_steps(options, self.steps_per_epoch)
            self._learner = ModelLearner(config, parts, plan, books, options, figures, may_adapt, total_steps)
        best_metric, best_mode = self._learner.best_metric()
        self._checkpoints = self._learner.checkpoints(
            books.folder / CHECKPOINTS,
            every_steps=trainer.checkpoint_every_steps,
            minutes=trainer.checkpoint_minutes,
            keep_last=trainer.keep_last,
            best_metric=best_metric,
            best_mode=best_mode,
            metrics=figures.latest,
            on_disk_error=books.journal.disk_full,
            progress=books.progress,
            finite_step=lambda: figures.handed_over_step if figures.stops_on_nan else 0,
            on_saved=lambda step, name: books.saved(step, name, figures.latest),
        )

    @property
    def saved(self) -> Mapping[str, int]:
        """Step of each checkpoint that was written in this process, by file name."""
        return self._checkpoints.saved

    def check_saved(self) -> None:
        """Raises a LastSaveFailed where the weights that training ended with are in no file."""
        failure, step = self._checkpoints.failure, self.figures.step
        if failure is not None:
            raise LastSaveFailed(step, self._checkpoints.folder, failure)

    def check_fits(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """A ConfigError that names the first weights that don't go into this model, where some don't."""
        found = self._learner.misfits(state["state_dict"])
        if found:
            problem = f"does not fit workload.model: {'; '.join(found)}."
            way_out = "Set workload.* as it was when the checkpoint was written."
            raise ConfigError.of(f"resume={checkpoint}", problem, way_out)

    def fit(
        self,
        console: Console,
        stop: StopRequest,
        checkpoint: Path | None,
        on_start: Callable[[], None],
        judge: Judge | None = None,
    ) -> None:
        """Train, with the validations in between; goes on from a checkpoint if there is one.

        ``judge`` may end it after any of them.
        """
        config, clock = self._config, self._clock()
        for split in ("val", "test"):
            if self._learner.evaluates(split):  # an empty one is refused before training, not after it
                assemble.make_eval_loader(config, self._plan, self._parts.data, split).close()
        total_steps = lit.total_steps(self._options, self.steps_per_epoch)
        bar = ProgressBar(
            console,
            total_steps=total_steps,
            latest=self.figures.latest,
            rate=self._journal.recent_rate,
            unit=config.workload.sample_unit,
        )
        callbacks = [*self._callbacks(Clock(clock, self._journal.steps), on_start), bar]
        if stages := planned_stages(config, self._plan, self._parts):
            callbacks.append(FeatureStages(stages, self._data_for, self._journal.event))
        if config.trainer.profile_steps and self._rank == 0:  # what other ranks do differs in nothing but its data
            path, steps = self._books.folder / PROFILE, config.trainer.profile_steps
            on_event = self._journal.event
            profiler = ProfilerTrace(path, steps, self._books.profiled, on_event=on_event, interrupt=clock.interrupt)
            callbacks.insert(1, profiler)
        if config.trainer.sanity_batches:
            splits = [split for split in ("val", "test") if self._learner.evaluates(split)]
            few = {split: partial(self._few_of, split) for split in splits}
            loaders = [loader for split in splits if (loader := loader_of(self._parts.data, split))]
            drawn_from = [generator for loader in loaders for generator in loader.generators]
            callbacks.insert(0, SanityCheck(few, self._check_names, drawn_from))
        validations = 0 if judge is None else self._journal.validations_written()
        pruning = Pruning(judge, self._latest_best_metric, total_steps, validations)
        keep = [self._checkpoints, pruning, StopAtStepEnd(stop, self._checkpoints.save_before_end)]
        trainer = self._learner.training(self._options, callbacks, keep)
        with self._books.wall.running():
            with self._eval_batches("val", trainer) as val_batches:
                try:
                    self._fit(trainer, clock, val_batches, checkpoint)
                finally:
                    self._loaders.pop("val", None)
            self._end_training(trainer, pruning)

    def _end_training(self, trainer: Any, pruning: Pruning) -> None:
        """Notes what ended it, and validates the last step."""
        if self._options.world_size > 1:
            self._compare_waiting()
        self._books.record.ended_by = lit.ended_by(trainer, self._options)
        if pruning.reason is not None:
            self.is_pruned, self._books.record.ended_by = True, pruning.reason
            self._journal.event("pruned", message=pruning.reason)
        if self.figures.step == 0:  # nothing was left to train
            self.figures.step, self.figures.epoch = trainer.global_step, trainer.current_epoch
        self._validate_last_step(trainer.global_step)

    def _compare_waiting(self) -> None:
        """A collective: all ranks wait in the steps of the one that waits for its data."""
        launch, found = launched(), self._journal.summary()
        own: LongestWaitEntry | None = None
        if found is not None:
            node, wait_frac, ready_frac = 0 if launch is None else launch.node, found.wait_frac, found.readiness_frac
            own = {"rank": self._rank, "node": node, "wait_frac": wait_frac, "readiness_frac": ready_frac}
        told: list[Any] = [None] * self._options.world_size
        torch.distributed.all_gather_object(told, own)
        self._books.waited([one for one in told if one is not None])

    def measure(self, measure: Measure, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Train to see how fast it goes, epoch after epoch; validates nothing and keeps nothing.

        To be called when steps have been done already (`warm_up`): batches that are loaded while the first step takes
        its time would be a stock that makes a slow loader look fast for as long as it lasts.
        """
        clock, warmup = self._clock(), WARMUP_STEPS + self._plan.loader.num_workers  # whose first batches come at once
        callbacks = [
            *self._callbacks(Clock(clock, self._journal.steps, warmup_steps=warmup), on_start),
            StopWhenMeasured(self._journal.summary, measure.within),
        ]
        keep = [StopAtStepEnd(stop, lambda trainer: None)]
        steps = warmup + measure.steps
        options = replace(self._options, max_epochs=None, max_steps=steps, max_time_s=None, validate_every_steps=None)
        with self._learner.measuring(), self._books.wall.running():
            self._fit(self._learner.training(options, callbacks, keep, is_timed=True), clock, None, None)

    def _data_for(self, mode: FeatureModeName) -> Datasets:
        """The data for another way of holding features; loaders read from them from their next pass on."""
        before, parts = self._parts, assemble.for_features(self._parts, mode)
        self._parts = self._learner.parts = parts
        for split, loader in self._loaders.items():
            if (data := getattr(parts.data, split)) is not getattr(before.data, split):
                loader.read_from(data)
        return parts.data

    def _clock(self) -> StepClock:
        device = torch.device("cuda" if self._options.accelerator == "gpu" else "cpu")
        wall = self._books.wall
        if device.type == "cuda":
            wall.wait_for_device = torch.cuda.synchronize
        return StepClock(origin_s=self._journal.origin_s, new_event=lit.new_event_factory(device), wall=wall)

    def _log(self, *figures: Any, **about: Any) -> None:
        """Hands figures to the journal; the time counts as logging."""
        before = self._books.wall.switch(LOGGING)
        self._journal.metrics(*figures, **about)
        self._books.wall.back(before)

    def _callbacks(self, clock: Clock, on_start: Callable[[], None]) -> list[Any]:
        def started() -> None:
            on_start()
            for name, part in self._parts.model.named_modules():
                if isinstance(part, torch.nn.DataParallel):
                    self._journal.event(
                        "data_parallel", module=name or type(part).__name__, devices=len(part.device_ids)
                    )

        is_on_gpu = self._options.accelerator == "gpu"
        self._synchronisations = Synchronisations(self._books.synchronised) if is_on_gpu else None
        return [
            clock,
            *([] if self._synchronisations is None else [self._synchronisations]),
            ProcessWatch(self._books.computed),
            ProgressReport(self._progress),
            Counts(started, self._books.stepped, self.steps_per_epoch),
            self.figures,
        ]

    def _fit(self, trainer: Any, clock: StepClock, val_batches: Any, checkpoint: Path | None) -> None:
        device, learner = trainer.strategy.root_device, self._learner  # this rank's own
        learner.begin_pass()
        with prefetched(self._loader, learner.module, device, self._plan.loader.device_prefetch) as own:
            has_ranks = isinstance(self._loader, StreamLoader) and self._options.world_size > 1
            batches = StepsOfRanks(own, drop_last=self._config.workload.drop_last) if has_ranks else own
            is_guest, told = self._parts.is_lightning_module, self._books.first_batch
            loader = learner.in_parts(TimedLoader(batches, clock, unwrap=is_guest, on_first=told))
            with nullcontext() if self._synchronisations is None else closing(self._synchronisations):
                try:
                    learner.fit(trainer, loader, val_batches, checkpoint)
                except NonFiniteLoss as error:
                    self._name_sample(error, batches.state_dict())
                    raise
            self._name_left_out(trainer.global_step, batches.state_dict())
        self.close()

    def _name_sample(self, error: NonFiniteLoss, state: dict[str, Any]) -> None:
        """Has the error name the sample that made the loss no finite number, if one of the latest did."""
        trainer = self._config.trainer
        steps = 2 * max(trainer.log_every_steps, trainer.checkpoint_every_steps or 0)
        found = self._non_finite_sample(state, steps=min(steps, _MOST_EXAMINED))
        if found is None:
            return
        self._books.bad_sample = asdict(found)
        skip = f"loader.skip_ids=[{','.join(map(str, [*self._config.loader.skip_ids, found.sample]))}]"
        error.args = (
            f"{type(self._parts.data.train).__name__}: training sample {found.sample} holds {found.value} (epoch "
            f"{found.epoch}, batch {found.batch}), so the loss is no finite number.",
        )
        error.__notes__ = [f"Repair it, or set {skip}; trainer.on_nan=skip leaves out its whole step."]

    def _name_left_out(self, step: int, state: dict[str, Any]) -> None:
        """Names the samples of the first steps that were left out because their loss was no finite number."""
        left_out = [one for one in self._books.record.events if one["kind"] == "nan" and "sample" not in one]
        for event in left_out[:_MOST_NAMED]:
            found = self._non_finite_sample(state, skipped=step - event["step"])
            if found is not None:
                event.update(asdict(found))

    def _non_finite_sample(self, state: dict[str, Any], **which: int) -> NonFiniteSample | None:
        """None for a stream, whose samples have no numbers."""
        if isinstance(self._loader, StreamLoader):
            return None
        try:
            return self._loader.non_finite_sample(state, **which)
        except Exception as error:  # noqa: BLE001  the loss is what ended the run
            _LOG.info("the batches could not be examined: %r", error)
            return None

    def close(self) -> None:
        """Stop what builds batches of training ahead, worker processes too."""
        self._loader.close()

    def test(self) -> dict[str, Path]:
        """Metrics on the test split with the best weights; the files that the evaluation wrote."""
        if not self._learner.evaluates("test"):
            return {}
        self._progress.enter("test")
        best, checkpoints = self._checkpoints.folder / BEST, self._checkpoints
        is_there = best.exists()
        self.evaluate(best if is_there else None)
        self._books.record.tested = f"the weights of step {self.figures.step}, which training ended with"
        if is_there:
            step, by = step_of(best), f"best {checkpoints.best_mode} of val/{checkpoints.best_metric}"
            where = "" if step is None else f" of step {step}"
            self._books.record.tested = f"the weights of {BEST}{where} ({by})"
            if any(type(callback).__name__ == "ModelCheckpoint" for callback in self._parts.callbacks.values()):
                self._books.record.tested += "; your ModelCheckpoint keeps files of its own"
        return {} if self._rank > 0 else self._learner.artifacts()

    def evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        """Metrics on the test split, which must be there, with a checkpoint's weights or those at hand."""
        if not self._learner.evaluates("test"):
            raise ConfigError.of("workload.data", "has no test split.", "Return Datasets(..., test=...).")
        self._learner.begin_pass()
        trainer = self._learner.evaluating([self.figures])
        with self._eval_batches("test", trainer) as batches:
            self._learner.test(trainer, batches, checkpoint)
        return {
            name.removeprefix("test/"): value for name, value in self.figures.latest.items() if name.startswith("test/")
        }

    def warm_up(self) -> float | None:
        """Do a few steps on batches that are on the device already; their rate as by `ceiling`.

        Training goes on after these batches: those it begins with are as new to it as all others.
        """
        few, steps = self._few_without_workers(), self._ceiling_steps
        rate = self._rate_without_data(self._first_batches if few is None else lambda: few, max(1, steps))
        return rate if steps else None

    def ceiling(self, console: Console) -> float | None:
        """Samples/s on batches already on the device; None if not asked for, or where it can't be told.

        Takes `_CEILING_S`, or `_CEILING_FRAC` of the time of training where that is more. Whatever goes wrong in it is
        an event, and changes nothing else of a run that is done.
        """
        if not self._ceiling_steps:
            return None
        wall, known = self._books.wall.entry(), self._journal.summary()
        most_s = max(_CEILING_S, _CEILING_FRAC * (wall["total_s"] if wall else 0.0))
        steps, batches, expected_s = self._ceiling_steps, CEILING_BATCHES, 0.0
        if known is not None:
            step_s = 1e-3 * known.step_ms_mean * (1 - known.wait_frac)
            build_s = 1e-3 * max(known.build_ms_mean or 0.0, known.step_ms_mean * known.wait_frac)
            batches = max(1, min(batches, int(0.5 * most_s / max(build_s, 1e-9))))
            room_s = most_s - batches * build_s
            steps = max(0, min(steps, int(room_s / max(step_s, 1e-9)) - WARMUP_STEPS))
            steps = steps if steps >= min(FEWEST, self._ceiling_steps) else 0
            expected_s = batches * build_s + (steps + WARMUP_STEPS) * step_s
        if steps == 0:
            console.print(f"The ceiling is not measured: that would take longer than {show_duration(most_s)}.")
        elif expected_s >= _TOLD_S:
            what = f"Measuring the ceiling, {steps} steps on batches that are on the device already"
            console.print(f"{what}: about {show_duration(expected_s)}, at most {show_duration(most_s)}.")
        return self._rate_without_data(lambda: self._first_batches(batches) if steps else [], steps, most_s)

    def _rate_without_data(
        self, few: Callable[[], list[Delivery]], steps: int, most_s: float = math.inf
    ) -> float | None:
        self._learner.begin_pass()
        self._progress.enter("ceiling")
        deliveries: list[Delivery] = []
        failure, summary = None, None
        try:
            deliveries = whole(few())
        except Exception as error:  # noqa: BLE001  it costs a figure; other ranks are told below
            failure = error
        try:
            learner, data_module = self._learner, self._parts.data_module
            summary = run_ceiling(
                learner.module,
                deliveries,
                self._options,
                steps,
                self._books.folder,
                data_module,
                learner.in_parts,
                most_s,
            )
        except Exception as error:  # noqa: BLE001  a user's step in another place than training
            failure = error
        if failure is not None:
            message = "another rank failed in it" if lost_rank(failure) else reason_of(failure)
            _LOG.warning("The ceiling could not be measured: %s", message)
            _LOG.info("it ended by", exc_info=failure)
            self._journal.event("ceiling_failed", message=message)
        return None if summary is None else summary.samples_per_s

    def _first_batches(self, number: int = CEILING_BATCHES) -> list[Delivery]:
        """Of an epoch, by the loader of training, which is closed and goes on after them."""
        loader = self._loader
        loader.load_state_dict({**loader.state_dict(), "epoch": loader.epoch, "batch": 0})
        try:
            return list(islice(loader, number))
        finally:
            loader.close()

    def _few_without_workers(self) -> list[Delivery] | None:
        """The same, built in this process where that is sooner than starting workers twice.

        None where it is not, or where it can't be done.
        """
        config, data, known, planned = self._config, self._parts.data, self._parts.first_batches, self._plan.loader
        if known is None or not planned.has_processes or isinstance(data.train, Stream):  # read in other parts
            return None
        later_ms = CEILING_BATCHES * known.build_ms * (1 - 1 / planned.num_workers)
        if later_ms > _LITTLE_MS or config.loader.max_skipped:  # a sample may be expected to kill who loads it
            return None
        data = replace(data, train=copied(data.train))  # shares no file that is opened on first use
        inline = assemble.make_train_loader(config, assemble.inline_settings(config), data)
        try:
            with closing(inline):
                few = list(islice(inline, CEILING_BATCHES))
        except Exception as error:  # noqa: BLE001  data that loads in workers alone; else training tells
            _LOG.info("the first batches could not be built without workers: %r", error)
            return None
        self._loader.load_state_dict(inline.state_dict())
        return few

    def _latest_best_metric(self) -> float | None:
        """As the last validation gave it; which one it is may be found out then."""
        return self.figures.latest.get(f"val/{self._checkpoints.best_metric}")

    def _validate_last_step(self, step: int) -> None:
        """The run may have ended between two validations."""
        learner = self._learner
        if not learner.evaluates("val") or self.figures.validated_step == step:
            return
        learner.begin_pass()
        trainer = learner.evaluating([ProgressReport(self._progress), self.figures])
        with self._books.wall.during(VALIDATION), self._eval_batches("val", trainer) as batches:
            trainer.validate(learner.module, batches, verbose=False)
        value = self._latest_best_metric()
        if value is not None and self._rank == 0:
            self._checkpoints.validated_at_end(value, step)

    @contextmanager
    def _few_of(self, split: str) -> Iterator[Any]:
        """The first batches of a split that is evaluated; all others are taken to be as large."""
        few = self._config.trainer.sanity_batches
        with closing(assemble.make_eval_loader(self._config, self._plan, self._parts.data, split, few=few)) as loader:
            yield self._measured(split, loader)
        self._make_room(split)

    def _measured(self, split: str, loader: Any) -> Iterator[Any]:
        for delivery in loader:
            size = num_bytes(getattr(delivery, "batch", delivery))
            self._eval_bytes[split] = max(size, self._eval_bytes.get(split, 0))
            yield delivery

    def _make_room(self, split: str) -> None:
        """Gives an evaluation as many workers as /dev/shm has room for: the plan knows no size of its batches."""
        loader = self._loaders.get(split)
        if split not in self._eval_bytes or not isinstance(loader, EvalLoader):
            return
        had, free_gib = loader.settings, shm_gib()[1]
        if had.num_workers == 0 or had.backend == "threads" or free_gib is None:
            return
        factor, devices, size = had.prefetch_factor or PREFETCH_FACTOR, self._options.devices, self._eval_bytes[split]
        room = Room(had.num_workers, factor, devices, size, len(loader), True, "/dev/shm", free_gib * GIB)
        if not room.is_full:
            return
        most = room.most_workers
        if most == 0:
            factor = 1
            # Without workers a thread that copies ahead would build, and draw from the process's generators.
            has_fetch = callable(getattr(getattr(self._parts.data, split), "fetch", None))
            may_build_here = self._plan.loader.device_prefetch == 0 or has_fetch
            has_room_for_one = not replace(room, num_workers=1, prefetch_factor=1).is_full
            most = 1 if has_room_for_one or not may_build_here else 0
        loader.limit(most, factor)
        now = f"{counted(most, 'worker')} with loader.prefetch_factor={factor}" if most else "no workers"
        _LOG.warning("Evaluating %s: %s. It has %s instead.", split, room.describe(), now)

    def _check_names(self, split: str, metrics: Mapping[str, float]) -> None:
        if split == "val":
            check_monitors(self._config, self._parts, {f"val/{name}" for name in metrics})
        name = self._config.trainer.best_metric
        if split == "val" and name is not None and name not in metrics:
            bare = name.removeprefix("val/").removeprefix("val_")
            listed = f"Set trainer.best_metric to one of {', '.join(metrics)}; null leaves it to the workload."
            way_out = f"Set trainer.best_metric={bare}." if bare in metrics else listed
            raise ConfigError.of(f"trainer.best_metric={name}", "validation gives no such metric.", way_out)

    @contextmanager
    def _eval_batches(self, split: str, trainer: Any) -> Iterator[Any]:
        """A split for a Trainer, built and copied ahead as training's batches are; None where it is not evaluated."""
        data, plan, learner = self._parts.data, self._plan, self._learner
        if not learner.evaluates(split):
            yield None
            return
        share = {"rank": self._rank, "world_size": self._options.world_size} if learner.shares_evaluation else {}
        loader = assemble.make_eval_loader(self._config, plan, data, split, **share)
        ahead = assemble.eval_device_prefetch(plan, getattr(data, split))
        self._loaders[split] = loader
        self._make_room(split)
        device = trainer.strategy.root_device
        with closing(loader), prefetched(loader, learner.module, device, ahead, what=split) as deliveries:
            yield learner.batches(deliveries)
