"""Makes data and model in a fork server, and has a function for each task of its forked processes.

A task gets the shared objects and the connection to the study, and returns the exit code of its process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

# What a trial needs is imported before the fork.
import wellfed.explain.report.last_screen
import wellfed.run.stages  # noqa: F401
from wellfed.config.compose import Composed
from wellfed.config.schema import Backend, RunConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError, Fault, WellfedError
from wellfed.explain.pages.html_page import script, templates
from wellfed.explain.report import run_page
from wellfed.explain.report.finding_pages import page_of_finding
from wellfed.generators import seed_everything
from wellfed.observe.hardware.detect import installed_versions, machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.observe.loggers import wandb_sink
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.run_plan import RunPlan
from wellfed.record.provenance import engine_state
from wellfed.run.objects import assemble, loaders
from wellfed.run.objects.evaluation import searched_metric
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.passes.choice import passes_class
from wellfed.run.planner import Planner
from wellfed.run.train import TRIAL, own_git_state, train
from wellfed.study.executors.executor import PointPlan
from wellfed.study.trial_end import TrialMetric


@dataclass(frozen=True)
class SharedParts:
    """Objects that trials of the same data and model share."""

    parts: RunObjects | None
    """None = each trial makes its own, since they depend on its folder."""
    num_threads: int
    """Threads of torch before it was limited to one, since threads do not survive a fork."""

    def for_task(self) -> RunObjects | None:
        """Returns the objects in a process of its own, which is set up for a run; None = it makes its own."""
        # A loader would otherwise start a server for its workers, which imports torch once more.
        multiprocessing.set_start_method("fork", force=True)
        torch.set_num_threads(self.num_threads)
        return self.parts


def prepare(composed: Composed[RunConfig], *, is_timed: bool = True) -> SharedParts:
    """Makes data and model, as a run's own process would, unless they depend on the folder of the trial.

    Args:
        composed: configuration of one of the trials.
        is_timed: the trials have neither loggers nor pages.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    config, num_threads = composed.config, torch.get_num_threads()
    torch.set_num_threads(1)
    seed_everything(config.seed)
    _fill_caches()
    if not is_timed:
        script()
        pages = templates(Path(run_page.__file__).parent)
        for name in pages.list_templates(["j2"]):
            pages.get_template(name)
    mode = wandb_sink.decide_mode(config.logger.mode.value)
    if not is_timed and mode != "disabled":
        with suppress(Exception):  # the trials report what is wrong with it
            wandb_sink.import_wandb()
    parts, asked = None, list[bool]()
    if not composed.is_tied_to_folder:
        with composed.without_folder(lambda: asked.append(True)):
            parts = assemble.make_objects(config)
            passes_class(parts)  # imports what they train by
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        problem = "uses CUDA while it is made, and a process that has used CUDA can't be forked into trials."
        way_out = "Leave tensors on the CPU; the engine moves them. Or add hydra/launcher=basic: all in one process."
        raise ConfigError([Fault("workload.data or workload.model", problem, way_out)])
    return SharedParts(None if asked else parts, num_threads)


def _fill_caches() -> None:
    """Looks up what each trial would look up again: state of the code, installed packages, their versions, devices."""
    own_git_state()
    engine_state()
    installed_versions()
    page_of_finding("healthy", Path())


def run_timed(shared: SharedParts, study: Connection, composed: Composed[RunConfig], plan: PointPlan | None) -> int:
    """Runs a trial that is only timed.

    Args:
        shared: data and model.
        study: connection to the study, which is not used.
        composed: configuration.
        plan: plan of the point; None where planning ended its process.
    """
    parts = shared.for_task()
    if plan is not None and parts is not None:
        parts = replace(parts, first_batches=plan.first_batches, footprints=plan.footprints)
    os.environ[TRIAL] = "1"
    return train(composed, parts)


def train_whole(
    shared: SharedParts, study: Connection, composed: Composed[RunConfig], *, may_be_pruned: bool = False
) -> int:
    """Trains to the end. With ``may_be_pruned`` the study gets each validation and replies why to end, or None."""

    def pruner(number: int, value: float) -> str | None:
        study.send((number, value))
        reason: str | None = study.recv()
        return reason

    return train(composed, shared.for_task(), pruner=pruner if may_be_pruned else None)


def see_metric(shared: SharedParts, study: Connection, composed: Composed[RunConfig]) -> int:
    """Sends the machine, then the metric that ranks trials: None without a validation split, or faults."""
    parts = shared.for_task()
    study.send(machine(torch_cuda()))
    with composed.without_folder() as inside:
        try:
            parts = parts or assemble.make_objects(inside.config)
            assemble.check_around(inside.config, parts)
            is_validated = parts.brings_step or parts.data.val is not None
            study.send(TrialMetric(*searched_metric(inside.config, parts)) if is_validated else None)
        except ConfigError as error:
            study.send(error.faults)
    return 0


def plan_points(shared: SharedParts, study: Connection, points: Sequence[tuple[str, Composed[RunConfig]]]) -> int:
    """Sends the machine, then the plan of each point as soon as it is made: planning may end this process."""
    for answer in planned(shared.for_task(), points):
        study.send(answer)
    return 0


def planned(
    parts: RunObjects | None, points: Sequence[tuple[str, Composed[RunConfig]]]
) -> Iterator[MachineFacts | PointPlan]:
    """Yields the machine, then the plan of each point by its id. Points without shared parts are not planned."""
    facts = machine(torch_cuda())
    if parts is None:
        yield facts
        yield from (PointPlan(point) for point, _ in points)
        return
    seen: dict[str, FirstBatches | None] = {}
    """First batches by what they depend on, built once."""

    def first_batches(config: RunConfig, plan: RunPlan) -> FirstBatches | None:
        """Returns the first batches; None where nothing depends on them, or they can't be built."""
        first = loaders.first_builder(config, plan)
        if first is None:
            return None
        workload, loader, trainer = config.workload, config.loader, config.trainer
        batches = [workload.effective_batch_size, workload.drop_last, trainer.world_size]
        limits = [trainer.limit_batches, trainer.overfit_batches, loader.skip_ids, loader.max_skipped]
        features = plan.memory.features
        key = repr([first, batches, limits, features])  # data and seed are the fork server's
        if key not in seen:
            seen[key] = loaders.look_at_first_batches(config, first, parts.for_features(features))
        return seen[key]

    def plan_with_model(point: str, composed: Composed[RunConfig]) -> PointPlan:
        try:
            assemble.check_around(composed.config, parts)
        except ConfigError as error:
            return PointPlan(point, " ".join(map(str, error.faults)), status="invalid")
        return plan_point(point, composed, Planner.start(composed, facts, parts))

    def plan_point(point: str, composed: Composed[RunConfig], planner: Planner) -> PointPlan:
        rough = planner.rough()
        estimate, first = planner.estimate(rough), first_batches(planner.config, rough)
        # A backend that is still to be chosen is chosen by times, in the trial.
        is_open = composed.config.loader.backend is Backend.auto
        plan = planner.estimated(estimate, None if is_open else first)
        return PointPlan(
            point,
            problem=None if plan.misfit is None else str(plan.misfit),
            predicted_peak_gib=plan.predicted_peak_gib,
            first_batches=first,
            footprints=estimate.known,
        )

    yield facts
    for point, composed in points:
        try:
            with composed.without_folder() as inside:
                plan = plan_with_model(point, inside)
            yield plan
        except ConfigError as error:
            yield PointPlan(point, " ".join(map(str, error.faults)))
        except WellfedError as error:
            yield PointPlan(point, str(error))
