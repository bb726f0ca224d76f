"""Tests the promises of docs/workloads.md for every workload of a project, and that its experiments compose."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from wellfed import project
from wellfed.batches import named_tensors
from wellfed.config.compose import compose
from wellfed.config.quoting import assigned
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.own_loader import is_stream
from wellfed.data.settings import LoaderSettings
from wellfed.errors import ConfigError, first_line
from wellfed.run.objects import datasets
from wellfed.testing.made_workload import SAMPLES, MadeWorkload, differences, fail, plainly

SPLITS = ("train", "val", "test")
_SHOWN_LINES = 25
"""Number of last lines shown of a failed training's output."""


class WorkloadContract:
    """Base class for a project's tests of its workloads; each test runs for each workload.

    Attributes choose what is tested. To skip a test, set it to None: ``test_its_evaluation_is_additive = None``.
    """

    workloads: ClassVar[Sequence[str] | None] = None
    """Options of ``configs/workload/``; None = all."""
    experiments: ClassVar[Sequence[str] | None] = None
    """Options of ``configs/experiment/``; None = all."""
    overrides: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Workload -> more overrides, such as small data: ``{"mine": ["workload.data.path=tests/small.csv"]}``."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs each test for each workload, or each experiment."""
        if not metafunc.config.pluginmanager.has_plugin("wellfed.testing"):
            fail('The tests of workloads need the plugin: pytest_plugins = ["wellfed.testing"] in tests/conftest.py.')
        if "workload" in metafunc.fixturenames:
            # Marked here, since --strict-markers fails if the plugin is not loaded.
            is_slow = metafunc.definition.originalname == "test_it_trains_and_is_evaluated"
            marks = [pytest.mark.slow] if is_slow else []
            names = [pytest.param(name, marks=marks) for name in self._options("workload", self.workloads)]
            metafunc.parametrize("workload", names, scope="class")
        if "experiment" in metafunc.fixturenames:
            metafunc.parametrize("experiment", [None, *self._options("experiment", self.experiments)])

    @staticmethod
    def _options(group: str, chosen: Sequence[str] | None) -> list[str]:
        if chosen is not None:
            return list(chosen)
        folder = project.configs() / group
        found = sorted(path.stem for path in folder.glob("*.yaml"))
        if not found and group == "workload":
            fail(f"{folder} has no workload. Write one: python -m wellfed add workload NAME.")
        return found

    @classmethod
    def words_for(cls, workload: str, folder: Path) -> list[str]:
        """Returns overrides for a workload that write all files into ``folder``."""
        usual = [f"workload={workload}", "gpu=cpu", "logger=none", "telemetry=none"]
        places = [assigned("paths.cache_dir", str(folder / "cache")), assigned("paths.log_dir", str(folder / "logs"))]
        return [*usual, *places, *cls.overrides.get(workload, ())]

    def test_it_trains_and_is_evaluated(self, workload: str, tmp_path: Path) -> None:
        """Runs two steps, validation and test with the command that a user types; all figures are finite."""
        run = tmp_path / "run"
        words = [*self.words_for(workload, tmp_path), "trainer.max_steps=2", assigned("hydra.run.dir", str(run))]
        script = project.root() / "src" / "train.py"
        offline = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", project.VARIABLE: str(project.root())}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HYDRA_")}
        done = subprocess.run(
            [sys.executable, str(script), *words],
            cwd=tmp_path,
            env=environment | offline,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-_SHOWN_LINES:])
            fail(f"python src/train.py {' '.join(words)} ended with exit code {done.returncode}:\n{lines}")
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        if (record["status"], record["steps"]) != ("ok", 2):
            fail(f"workload={workload}: the run ended as {record['status']} after {record['steps']} of 2 steps.")
        if not any(name.startswith("train/") for name in record["metrics"]):
            fail(
                f"workload={workload}: training has left no metric; there are {', '.join(record['metrics']) or 'none'}."
            )
        wrong = [f"{name} = {value}" for name, value in record["metrics"].items() if not _is_finite(value)]
        if wrong:
            fail(f"workload={workload}: these metrics are not finite numbers: {', '.join(wrong)}.")

    def test_its_name_is_that_of_its_file(self, workload: str, tmp_path: Path) -> None:
        """Compares both names: the name in the yaml finds runs, the file name starts them."""
        with plainly(workload):
            name = compose(self.words_for(workload, tmp_path)).config.workload.name
        if name != workload:
            fail(f"configs/workload/{workload}.yaml has name: {name}. Write name: {workload}, or rename the file.")

    def test_every_experiment_composes(self, experiment: str | None) -> None:
        """Composes each experiment, and the command without overrides."""
        try:
            choices = compose([] if experiment is None else [f"experiment={experiment}"]).choices
        except ConfigError as error:
            fail(str(error))
        if (chosen := choices.get("experiment")) != experiment:
            fail(f"experiment={experiment} composes to experiment={chosen}.")

    def test_a_step_trains_it(self, made_workload: MadeWorkload) -> None:
        """Runs two optimizer steps: the loss is one finite number, gradients are finite, weights change."""
        one = made_workload
        model = one.model().train()
        batch, optimizer = one.prepared(one.modes[0]), one.optimizer(model)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

        def step() -> float:
            output = one.loss(model, batch)
            loss = float(output.loss.detach())
            if not math.isfinite(loss):
                one.fail(f"{one.loss_name}: the loss of the first batch is {loss}. It must be finite.")
            for name, value in output.metrics.items():
                if not isinstance(value, Tensor) or value.dim() or not value.isfinite():
                    one.fail(f"{one.loss_name}: metrics[{name!r}] is {value}; it must be one finite number.")
            optimizer.zero_grad()
            output.loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(2):  # a layer initialised with 0 blocks other gradients in the first step
            optimizer.step(step)
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        if not gradients:
            one.fail(f"{one.loss_name}: no parameter got a gradient. Is the loss computed from the model's parameters?")
        if wrong := [name for name, gradient in gradients.items() if not _values(gradient).isfinite().all()]:
            one.fail(f"{one.loss_name}: the gradient of {_some(wrong)} is not finite (sqrt, log or a division at 0?).")
        still = [name for name in gradients if torch.equal(model.get_parameter(name), before[name])]
        if 2 * len(still) >= len(gradients):  # some gradients may still be 0
            one.fail(
                f"two steps leave {len(still)} of {len(gradients)} parameters as they were, among "
                f"them {_some(still)}. Is workload.optimizer.lr 0, or does param_groups() leave them out?"
            )

    def test_the_loss_of_a_batch_is_the_mean_of_its_parts(self, made_workload: MadeWorkload) -> None:
        """Compares the loss of a batch with the losses of its micro-batches."""
        one = made_workload
        model, delivery, prepare = one.model().eval(), one.first_batch(one.modes[0]), one.preparation(one.modes[0])
        sizes = _sizes(delivery.size)
        with torch.no_grad(), plainly(one.name):
            batch = prepare(delivery.batch, delivery, 0, one.source(one.modes[0]))  # cut after the random draws
            whole, parts = one.loss(model, batch).loss, prepare.split(batch, sizes)
            weights = [prepare.weight(part, size) for part, size in zip(parts, sizes, strict=True)]
            losses = [one.loss(model, part).loss for part in parts]
        mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        if not torch.allclose(torch.as_tensor(mean), whole, rtol=1e-4, atol=1e-5):
            one.fail(
                f"{one.loss_name}: the loss of a batch of {delivery.size} is {float(whole):.6g}, but the mean over its "
                f"parts of {sizes[0]} and {sizes[1]} samples (which weigh {weights[0]} and {weights[1]}) is "
                f"{float(mean):.6g}. Return the mean over the batch, not a sum, and let no sample's loss depend on the "
                "others. A mean over something else than samples needs weight(batch) of the data, or "
                "loss_weight(batch) of the model."
            )

    def test_a_batch_is_the_same_again(self, made_workload: MadeWorkload) -> None:
        """Builds a batch twice; random numbers depend on seed, epoch and position alone."""
        one = made_workload
        if found := differences(one.prepared(one.modes[0]), one.prepared(one.modes[0])):
            one.fail(
                f"{one.data_name}: the first batch, built twice, is not the same: {found}. Draw random numbers "
                "from the rng that fetch, on_device and __getitem__(index, rng) are given, not from torch.rand, numpy "
                "or random, and change nothing that the data set holds."
            )

    def test_a_batch_is_the_same_however_it_is_cut(self, made_workload: MadeWorkload) -> None:
        """Cuts a batch differently; random augmentation depends on the sample, not on the micro-batch."""
        one = made_workload
        if callable(getattr(one.data.train, "split", None)):
            pytest.skip("the data cut their batches themselves")
        mode = one.modes[0]
        prepare, delivery, source = one.preparation(mode), one.first_batch(mode), one.source(mode)
        sizes = _sizes(delivery.size)
        with plainly(one.name):
            whole = prepare(delivery.batch, delivery, 0, source)
            parts = prepare.split(delivery.batch, sizes)
            cut = [dict(named_tensors(prepare(part, delivery, n, source))) for n, part in enumerate(parts)]
        for name, tensor in named_tensors(whole):
            pieces = [part.get(name) for part in cut]
            is_alike = all(piece is not None and piece.shape[1:] == tensor.shape[1:] for piece in pieces)
            found = differences(torch.cat(pieces), tensor, 1e-5) if is_alike else "it has another shape"  # type: ignore[arg-type]
            if found:
                one.fail(
                    f"{one.data_name}: {name} is not the same when on_device gets the batch in parts of {sizes[0]} and "
                    f"{sizes[1]} samples: {found}. Draw what belongs to a sample by its index: "
                    "rng.uniform_at(indices), rng.randint_at(indices, high) or rng.bits_at(indices)."
                )

    def test_fetch_gives_what_getitem_gives(self, made_workload: MadeWorkload) -> None:
        """Compares ``loader=baseline``, which reads samples, with other loaders, which read whole batches."""
        one = made_workload
        dataset: Any = one.data.train
        if not callable(getattr(dataset, "fetch", None)) or is_stream(dataset):
            pytest.skip("it has no fetch")
        own = getattr(type(dataset), "__getitem__", None)
        if own in (None, torch.utils.data.Dataset.__getitem__):
            pytest.skip("it has no __getitem__")
        mode = one.modes[0]
        fetched, collated = one.built(mode, by_item=False), one.built(mode, by_item=True)
        if differences(fetched, one.built(mode, by_item=False, place=1)):  # drawn per batch, so that values may differ
            fetched, collated = _blank(fetched), _blank(collated)
        if found := differences(collated, fetched, 1e-6):
            name = type(dataset).__name__
            one.fail(
                f"{name}.fetch(indices, rng) gives another batch than {name}.__getitem__ and "
                f"collating: {found} (collated samples first). Let both return the same for the same indices."
            )

    def test_its_data_can_be_sent_to_a_process(self, made_workload: MadeWorkload) -> None:
        """Pickles the data sets, as for worker processes that are not forked."""
        one = made_workload
        for mode in one.modes:
            data = one.data_for(mode)
            for split, dataset in ((name, getattr(data, name)) for name in SPLITS):
                if dataset is None or is_stream(dataset):
                    continue
                try:
                    again = pickle.loads(pickle.dumps(dataset))
                except Exception as error:  # noqa: BLE001  whatever __reduce__ and __getstate__ raise
                    one.fail(
                        f"{split} can't be sent to worker processes: {type(dataset).__name__}: {first_line(error)}. "
                        "Use a function or class of a module instead of a lambda, a local function or an open file."
                    )
                if len(again) != len(dataset):
                    one.fail(f"{split} has {len(dataset)} samples, and {len(again)} in a worker process.")

    def test_features_are_the_same_wherever_they_are_held(self, made_workload: MadeWorkload) -> None:
        """Compares all modes of ``memory.features``, which affect only memory and speed."""
        one = made_workload
        if one.modes == (None,):
            pytest.skip("it has no features")
        model = one.model().eval()
        found = {mode: one.prepared(mode) for mode in one.modes}
        with torch.no_grad():
            losses = {mode: one.loss(model, batch).loss for mode, batch in found.items()}
        for mode in one.modes:
            differs = differences(found[mode], found["dynamic"], 1e-5)
            if not differs and not torch.allclose(losses[mode], losses["dynamic"], rtol=1e-5, atol=1e-5):
                differs = f"the loss is {float(losses[mode]):.6g} and {float(losses['dynamic']):.6g}"
            if differs:
                one.fail(f"memory.features={mode} and dynamic give different batches: {differs}.")

    def test_its_evaluation_is_additive(self, made_workload: MadeWorkload) -> None:
        """Cuts the batches of a split differently and compares the metrics."""
        one = made_workload
        mode, evaluation = one.modes[0], cast(Any, one.data.evaluation)
        val = one.data_for(mode).val
        if not hasattr(evaluation, "best_metric") or val is None or is_stream(val):
            pytest.skip("it has no evaluation of its own, or no map-style validation data")
        collate = datasets.of_split(one.data.eval_collate, "val") or one.data.collate
        model, prepare, source = one.model().eval(), one.preparation(mode, "val"), one.source(mode)
        results: list[tuple[str, dict[str, Any]]] = []
        with plainly(one.name), torch.no_grad():
            deliveries = list(
                EvalLoader(val, SAMPLES, seed=1, collate=collate, settings=LoaderSettings(), limit_batches=2)
            )
            for how, sizes in (("whole", [SAMPLES]), ("in two parts", [3, 5]), ("sample by sample", [1] * SAMPLES)):
                evaluation.reset()
                for delivery in deliveries:
                    for part in prepare.split(delivery.batch, sizes if delivery.size == SAMPLES else [delivery.size]):
                        batch = prepare(part, delivery, 0, source)
                        evaluation.update(model, batch, *([] if source is None else [source]))
                results.append((how, evaluation.compute()))
            evaluation.reset()
        name = type(evaluation).__name__
        (_, whole), *others = results
        if evaluation.best_metric not in whole:
            one.fail(
                f"{name}.best_metric is {evaluation.best_metric!r}, and compute() gives "
                f"{', '.join(whole) or 'nothing'}."
            )
        for how, other in others:
            if other != pytest.approx(whole, rel=1e-4, abs=1e-5, nan_ok=True):
                one.fail(
                    f"{name}.compute() is {whole} for whole batches and {other} for the same batches "
                    f"{how}. Keep sums and counts in update, and divide in compute."
                )


def _sizes(num_samples: int) -> list[int]:
    """Returns two unequal sizes that cut a batch."""
    if num_samples < 2:
        pytest.skip("its first batch has one sample")
    first = max(1, 3 * num_samples // 8)
    return [first, num_samples - first]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _blank(batch: Any) -> Any:
    """Returns the same names, shapes and types, without values."""
    return {name: torch.zeros_like(tensor) for name, tensor in named_tensors(batch)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
