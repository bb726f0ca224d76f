"""Each rule between knobs, with its whole message."""

from typing import Any

import pytest

from wellfed.config.rules import RULES, rule_faults
from wellfed.config.schema import (
    Accelerator,
    Backend,
    BestMode,
    EvaluateConfig,
    ScheduleConfig,
    ScheduleName,
    SearchPruner,
    Strategy,
)

# (rule, knobs, where, words of the problem, words of the way out)


def scheduler(name: str, **knobs: Any) -> ScheduleConfig:
    schedule = ScheduleConfig(**knobs)
    schedule._target_ = f"torch.optim.lr_scheduler.{name}"
    return schedule


BROKEN: list[tuple[str, dict[str, Any], str, str, str]] = [
    (
        "workers",
        {"loader.backend": Backend.inline, "loader.num_workers": 2},
        "loader.num_workers=2",
        "has no effect with loader.backend=inline, which builds batches in the training process.",
        "Set loader.num_workers=0, or loader.backend=threads.",
    ),
    (
        "workers",
        {"loader.backend": Backend.processes, "loader.num_workers": 0},
        "loader.num_workers=0",
        "leaves loader.backend=processes without workers.",
        "Set loader.num_workers=1 or more, or loader.backend=inline.",
    ),
    (
        "workers",
        {"loader.backend": Backend.threads, "loader.num_workers": 0},
        "loader.num_workers=0",
        "leaves loader.backend=threads without workers.",
        "Set loader.num_workers=1 or more, or loader.backend=inline.",
    ),
    (
        "needs_workers",
        {"loader.prefetch_factor": 4, "loader.num_workers": 0},
        "loader.prefetch_factor=4",
        "has no effect without worker processes (loader.num_workers=0).",
        "Set loader.num_workers>=1, or loader.prefetch_factor=null.",
    ),
    (
        "needs_workers",
        {"loader.prefetch_factor": 4, "loader.backend": Backend.inline},
        "loader.prefetch_factor=4",
        "has no effect without worker processes (loader.backend=inline).",
        "Set loader.backend=auto, or loader.prefetch_factor=null.",
    ),
    (
        "needs_workers",
        {"loader.persistent_workers": True, "loader.num_workers": 0},
        "loader.persistent_workers=true",
        "has no effect without worker processes (loader.num_workers=0).",
        "Set loader.num_workers>=1, or loader.persistent_workers=null.",
    ),
    (
        "batch_split",
        {"workload.effective_batch_size": 2, "trainer.devices": 4},
        "workload.effective_batch_size=2",
        "is less than one sample for each of trainer.devices=4.",
        "Set trainer.devices=2; a larger workload.effective_batch_size changes what is learned.",
    ),
    (
        "batch_split",
        {"workload.effective_batch_size": 5, "trainer.devices": 4, "trainer.num_nodes": 2},
        "workload.effective_batch_size=5",
        "is less than one sample for each of trainer.num_nodes=2 x trainer.devices=4.",
        "Set trainer.num_nodes=1 trainer.devices=4; a larger workload.effective_batch_size changes what is learned.",
    ),
    (
        "batch_split",
        {"workload.effective_batch_size": 3, "trainer.devices": 2, "trainer.num_nodes": 4},
        "workload.effective_batch_size=3",
        "is less than one sample for each of trainer.num_nodes=4 x trainer.devices=2.",
        "Set trainer.num_nodes=1 trainer.devices=2; a larger workload.effective_batch_size changes what is learned.",
    ),
    (
        "batch_split",
        {"workload.effective_batch_size": 65, "trainer.devices": 2, "memory.micro_batch": 34},
        "memory.micro_batch=34",
        "is more than the 33 samples of a device (workload.effective_batch_size=65, trainer.devices=2).",
        "Set memory.micro_batch=33 or less, or memory.micro_batch=null.",
    ),
    (
        "batch_split",
        {"workload.effective_batch_size": 3, "memory.accumulate": 4},
        "memory.accumulate=4",
        "would split the 3 samples of a device (workload.effective_batch_size=3, trainer.devices=1) into empty parts.",
        "Set memory.accumulate=3 or less, or memory.accumulate=null.",
    ),
    (
        "batch_split",
        {"memory.micro_batch": 16, "memory.accumulate": 3},
        "memory.accumulate=3",
        "contradicts memory.micro_batch=16, which needs 4 of the 64 samples of a device",
        "Set one of them: memory.accumulate=null, or memory.micro_batch=null.",
    ),
    (
        "length",
        {"trainer.max_epochs": None},
        "trainer.max_epochs=null",
        "leaves the run without an end: trainer.max_steps and trainer.max_time_s are null too.",
        "Set trainer.max_epochs=10.",
    ),
    (
        "length",
        {
            "trainer.max_epochs": None,
            "trainer.max_time_s": 5.0,
            "workload.schedule": ScheduleConfig(ScheduleName.cosine),
        },
        "workload.schedule.name=cosine",
        "needs the number of the last step, and trainer.max_time_s alone does not give it.",
        "Set trainer.max_steps=1000 or trainer.max_epochs=10, or workload.schedule.name=constant.",
    ),
    (
        "schedule",
        {"workload.schedule": ScheduleConfig(monitor="val/loss")},
        "workload.schedule.monitor=val/loss",
        "is about a scheduler that workload.schedule._target_ names, and it names none.",
        "Set workload.schedule.monitor=null.",
    ),
    (
        "schedule",
        {"workload.schedule": scheduler("StepLR", warmup_steps=3)},
        "workload.schedule.warmup_steps=3",
        "has no effect beside workload.schedule._target_=torch.optim.lr_scheduler.StepLR.",
        "Set workload.schedule.warmup_steps=0.",
    ),
    (
        "schedule",
        {"workload.schedule": scheduler("ReduceLROnPlateau")},
        "workload.schedule.monitor=null",
        "goes by a figure, and none is named.",
        "Set workload.schedule.monitor=val/loss.",
    ),
    (
        "callback_names",
        {"callbacks": ["ema"]},
        "callbacks=['ema']",
        "gives its callbacks no names.",
        "Write callbacks: {my_name: {_target_: my_package.MyCallback}}.",
    ),
    (
        "strategy",
        {"trainer.strategy": Strategy.fsdp, "trainer.accelerator": Accelerator.cpu},
        "trainer.strategy=fsdp",
        "shards over CUDA devices only, and trainer.accelerator=cpu.",
        "Set trainer.strategy=ddp, or trainer.accelerator=gpu.",
    ),
    (
        "strategy",
        {"trainer.deterministic": True, "gpu.cudnn_benchmark": True},
        "gpu.cudnn_benchmark=true",
        "picks kernels by the clock, which trainer.deterministic=true forbids.",
        "Set gpu.cudnn_benchmark=false, or trainer.deterministic=false.",
    ),
    (
        "best",
        {"trainer.best_metric": "val/loss"},
        "trainer.best_metric=val/loss",
        "does not say whether more is better.",
        "Add trainer.best_mode=max or trainer.best_mode=min.",
    ),
    (
        "best",
        {"trainer.best_mode": BestMode.max},
        "trainer.best_mode=max",
        "has no metric to apply to.",
        "Add trainer.best_metric=<name>, or set trainer.best_mode=null.",
    ),
    (
        "pruning",
        {"search.pruner": SearchPruner.median},
        "search.pruner=median",
        "ends trials of a search by Optuna, and search.sampler=grid runs every combination to its end.",
        "Set search=optuna, or search.pruner=none.",
    ),
    (
        "continuing",
        {"resume": "auto", "rerun": "logs/a"},
        "resume=auto",
        "goes on with a run, rerun=logs/a starts one anew: not both.",
        "Leave one of them out.",
    ),
    (
        "folder_name",
        {"workload.name": "a/b"},
        "workload.name=a/b",
        "becomes a folder: letters, digits, '_', '-' and '.', the first a letter, digit or '_'.",
        "Set workload.name=a_b.",
    ),
    ("folder_name", {"workload.name": ".."}, "workload.name=..", "becomes a folder", "Set workload.name=my_workload."),
]

FINE: list[dict[str, Any]] = [
    {},
    {"loader.backend": Backend.threads, "loader.num_workers": 2, "loader.prefetch_factor": 4},
    {"loader.prefetch_factor": 4, "loader.persistent_workers": True},
    {"loader.backend": Backend.inline, "loader.num_workers": 0, "loader.persistent_workers": False},
    {"memory.micro_batch": 16, "memory.accumulate": 4},
    {"workload.effective_batch_size": 65, "memory.micro_batch": 33, "trainer.devices": 2},
    {"trainer.max_epochs": None, "trainer.max_time_s": 5.0},
    {"workload.schedule": ScheduleConfig(ScheduleName.cosine)},
    {"trainer.strategy": Strategy.fsdp, "trainer.devices": 2},
    {"trainer.best_metric": "val/loss", "trainer.best_mode": BestMode.min},
    {"resume": "auto"},
    {"workload.name": "my-model_2.1"},
    {"workload.schedule": scheduler("ReduceLROnPlateau", monitor="val/loss")},
    {"callbacks": {"ema": None}},
]


@pytest.mark.parametrize("case", BROKEN, ids=[f"{case[0]}-{case[2]}" for case in BROKEN])
def test_says_what_where_and_the_way_out(make_config, case):
    rule, knobs, where, problem, way_out = case
    faults = rule_faults(make_config(knobs))
    assert len(faults) == 1
    assert faults[0].where == where
    assert problem in faults[0].problem
    assert way_out in faults[0].way_out
    (by_rule,) = next(r for r in RULES if r.__name__ == rule)(make_config(knobs))
    assert by_rule == faults[0]


@pytest.mark.parametrize("knobs", FINE)
def test_lets_through(make_config, knobs):
    assert rule_faults(make_config(knobs)) == []


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == {case[0] for case in BROKEN}


def test_all_faults_are_told_at_once(make_config):
    knobs = {"resume": "a", "rerun": "b", "loader.num_workers": 0, "loader.prefetch_factor": 2, "seed": -1}
    assert len(rule_faults(make_config(knobs))) == 3


@pytest.mark.parametrize(
    "knobs",
    [
        {"trainer.devices": 0},
        {"memory.micro_batch": 0, "memory.accumulate": 2},
        {"workload.effective_batch_size": -5, "memory.micro_batch": 4},
    ],
)
def test_a_number_out_of_range_is_told_once(make_config, knobs):
    assert len(rule_faults(make_config(knobs))) == 1


def test_evaluation_needs_a_checkpoint():
    assert [fault.where for fault in rule_faults(EvaluateConfig(checkpoint=" "))] == ["checkpoint="]
    assert rule_faults(EvaluateConfig(checkpoint="best.ckpt")) == []


EMPTY = [
    ({"workload.sample_unit": ""}, "workload.sample_unit=", "must not be empty.", "=samples."),
    ({"resume": ""}, "resume=", "must not be empty.", "Set resume=null."),
    ({"workload.name": ""}, "workload.name=", "must not be empty.", "Set workload.name=<value>: Name of the workload"),
]


@pytest.mark.parametrize(("knobs", "where", "problem", "way_out"), EMPTY, ids=[case[1] for case in EMPTY])
def test_a_text_that_is_empty(make_config, knobs, where, problem, way_out):
    (fault,) = rule_faults(make_config(knobs))
    assert (fault.where, fault.problem) == (where, problem)
    assert way_out in fault.way_out
