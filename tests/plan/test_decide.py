import dataclasses
import itertools
import math
import os
import typing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.composed import compose
from tests.kit.examples import examples
from tests.kit.few import few
from tests.kit.machines import GIB, H200, LAPTOP, SMALL, TWO, card, machine
from wellfed.config.schema import (
    Accelerator,
    Allocator,
    Backend,
    Compile,
    FeatureMode,
    GpuConfig,
    LoaderConfig,
    MemoryConfig,
    OnNan,
    Precision,
    RunConfig,
    ScheduleName,
    Strategy,
    TrainerConfig,
    WorkloadConfig,
)
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, OwnLoader, RunPlan
from wellfed.ranks import share_of
from wellfed.train.memory.step_down import MicroBatches

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
OPTIONS = {
    group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in ("gpu", "loader", "memory")
}
FETCH = DataFacts(100_000, has_fetch=True)
ITEMS = DataFacts(100_000, has_fetch=False)
OWN = OwnLoader(
    "DataLoader over Rows",
    {"num_workers": 3, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False, "timeout_s": 0},
    batch_size=64,
)
BROUGHT = dataclasses.replace(ITEMS, own_loader=OWN)
TABLE = dataclasses.replace(FETCH, feature_rows=10_000, feature_bytes=GIB)
MODEL = ModelFacts(200 * 2**20, 100 * 2**20, 200 * 2**20)
TIMED = FirstBatches(
    2.5,
    2**20,
    100,
    2.5,
    {"inline": 5.1, "threads": 2.7, "processes": 4.1},
)


@cache
def composed(*overrides):
    return compose(overrides).config


def config(effective=64, **groups):
    """A configuration with some groups given."""
    kinds = {"gpu": GpuConfig, "loader": LoaderConfig, "memory": MemoryConfig, "trainer": TrainerConfig}
    made = {name: kind(**groups.get(name, {})) for name, kind in kinds.items()}
    return RunConfig(workload=WorkloadConfig(name="w", effective_batch_size=effective), **made)


def planned(given=None, facts=H200, *, data=FETCH, model=MODEL, choices=None, trial=None):
    given = given or config()
    device = plan_device(given, choices or {}, facts)
    return plan_run(given, choices or {}, facts, device, data, model, trial)


def faults_of(*args, **more):
    with pytest.raises(ConfigError) as raised:
        planned(*args, **more)
    return "\n".join(map(str, raised.value.faults))


def check_reasons(plan):
    """Each knob has its reason, and a value of the type that its section declares."""
    sections = [plan.trainer, plan.device]
    if isinstance(plan, RunPlan):
        sections += [plan.workload, plan.memory, plan.loader]
        names = [f"{section.group}.{knob}" for section in sections for knob in section.reasons]
        assert sorted(plan.to_dict()) == sorted(names)
    for section in sections:
        types = typing.get_type_hints(type(section))
        for knob, reason in section.reasons.items():
            assert reason.because.strip(), knob
            assert reason.source in ("set", "predicted", "measured"), knob
            value, allowed = getattr(section, knob), options(types[knob])
            assert value in allowed or type(value) in allowed or (float in allowed and type(value) is int), knob
            if isinstance(plan, RunPlan):
                entry = {"value": value, "because": reason.because, "source": reason.source}
                assert plan.to_dict()[f"{section.group}.{knob}"] == entry


def options(declared):
    """The values of a Literal, and the other types of a union."""
    if typing.get_origin(declared) is typing.Literal:
        return typing.get_args(declared)
    parts = typing.get_args(declared)
    return [each for part in parts for each in options(part)] if parts else [declared]


GUEST = replace(MODEL, whole_steps=True, brings_step=True)
BY_HAND = replace(GUEST, steps_by_hand=True)
NORM = replace(MODEL, has_batch_norm=True)
BLOCKS = replace(MODEL, has_blocks=True)
EIGHT = machine(card(), cores=8.0)


def brought(num_workers=3, **facts):
    """Data in a DataLoader with so many workers."""
    return replace(BROUGHT, own_loader=replace(OWN, values={**OWN.values, "num_workers": num_workers}, **facts))


def case(groups, expected, facts=H200, **more):
    """Groups of the configuration, what is planned by dotted knob, the machine, and the rest for `planned`."""
    return groups, expected, facts, more


@pytest.mark.parametrize(
    ("groups", "expected", "facts", "more"),
    [
        # devices
        case({}, {"trainer.strategy": "auto"}),
        case({"trainer": {"devices": 2}}, {"trainer.strategy": "ddp", "memory.on_oom": "retry"}, TWO),
        case({"trainer": {"devices": 2, "strategy": Strategy.fsdp}}, {"memory.on_oom": "fail"}, TWO, model=GUEST),
        case({"trainer": {"devices": 2, "num_nodes": 2}},
             {"trainer.num_nodes": 2, "trainer.strategy": "ddp", "memory.micro_batch": 16}, TWO),
        # micro-batches
        case({}, {"memory.micro_batch": 64, "memory.accumulate": 1, "memory.on_oom": "retry"}),
        case({"memory": {"micro_batch": 48}}, {"memory.micro_batch": 48, "memory.accumulate": 2}),
        case({"memory": {"accumulate": 4}}, {"memory.micro_batch": 16, "memory.accumulate": 4}),
        case({"memory": {"accumulate": 30}}, {"memory.micro_batch": 3, "memory.accumulate": 22}),
        case({}, {"memory.micro_batch": 64, "memory.on_oom": "fail"}, model=NORM),
        case({}, {"memory.micro_batch": 64, "memory.on_oom": "retry", "loader.device_prefetch": 0}, model=GUEST),
        case({}, {"memory.on_oom": "fail"}, model=BY_HAND),
        case({"memory": {"micro_batch": 16}},
             {"memory.micro_batch": 16, "memory.accumulate": 4, "loader.device_prefetch": 0}, model=GUEST),
        case({}, {"memory.checkpoint_activations": False}, model=BLOCKS),
        case({"memory": {"checkpoint_activations": True}}, {"memory.checkpoint_activations": True}, model=BLOCKS),
        case({"memory": {"checkpoint_activations": True}}, {"memory.checkpoint_activations": False},
             choices={"memory": "tight"}),
        # features
        case({}, {"memory.features": None}),
        case({}, {"memory.features": "dynamic"}, data=replace(TABLE, features_trainable=True)),
        case({"memory": {"features": FeatureMode.cache}}, {"memory.features": "cache"},
             data=replace(TABLE, feature_bytes=70 * GIB)),
        # backend and workers
        case({}, {"loader.backend": "inline", "loader.num_workers": 0}, EIGHT),
        case({}, {"loader.backend": "processes", "loader.num_workers": 8}, EIGHT, data=ITEMS),
        case({"loader": {"num_workers": 0}}, {"loader.backend": "torch"}, EIGHT, data=ITEMS),
        case({"loader": {"num_workers": 3}}, {"loader.backend": "threads", "loader.num_workers": 3}, EIGHT),
        case({"loader": {"num_workers": 3}}, {"loader.backend": "processes"}, EIGHT, data=ITEMS),
        case({"loader": {"prefetch_factor": 2}}, {"loader.backend": "threads", "loader.num_workers": 8}, EIGHT),
        case({"loader": {"backend": Backend.inline}}, {"loader.num_workers": 0}, EIGHT, data=ITEMS),
        case({}, {"loader.backend": "own", "loader.num_workers": 3, "loader.device_prefetch": 0,
                  "loader.persistent_workers": True}, EIGHT, data=BROUGHT),
        case({"loader": {"device_prefetch": 4}}, {"loader.device_prefetch": 4}, data=BROUGHT),
        case({"loader": {"device_prefetch": 4}}, {"loader.device_prefetch": 0}, data=brought(0)),
        case({"loader": {"num_workers": 2}}, {"loader.num_workers": 2},
             data=brought(2, typed=frozenset(["num_workers"]))),
        # copies to the device
        case({}, {"loader.device_prefetch": 2, "loader.pin_memory": True}),
        case({"loader": {"device_prefetch": 4}}, {"loader.device_prefetch": 4}),
        case({"loader": {"device_prefetch": 4}}, {"loader.device_prefetch": 0, "loader.pin_memory": False}, LAPTOP),
        case({"loader": {"pin_memory": False}}, {"loader.pin_memory": False}),
        case({"loader": {"device_prefetch": 4}}, {"loader.device_prefetch": 0}, model=GUEST),
        case({}, {"gpu.precision": "32-true"}, model=GUEST),
        case({"gpu": {"precision": Precision["16-mixed"]}}, {"gpu.precision": "16-mixed"}, model=GUEST),
        case({"loader": {"device_prefetch": 2, "num_workers": 0}}, {"loader.device_prefetch": 0}, data=ITEMS),
    ],
)  # fmt: skip
def test_facts_and_what_is_planned(groups, expected, facts, more):
    plan = planned(config(**groups), facts, **more)
    assert {knob: plan.knobs[knob].value for knob in expected} == expected
    for knob, entry in plan.knobs.items():
        group, _, name = knob.partition(".")
        if name in groups.get(group, {}) and entry.value == groups[group][name]:
            assert entry.source == "set", knob
    check_reasons(plan)


@pytest.mark.parametrize(
    ("facts", "given", "gpu", "expected"),
    [
        (LAPTOP, {}, "auto", ("cpu", "32-true", None, False)),
        (LAPTOP, {}, "8gb", ("cpu", "32-true", 7.2, False)),
        (SMALL, {}, "auto", ("gpu", "bf16-mixed", 6.84, False)),
        (SMALL, {}, "cpu", ("cpu", "32-true", None, False)),
        (SMALL, {"trainer": {"accelerator": Accelerator.cpu}}, "auto", ("cpu", "32-true", None, False)),
        (H200, {}, "auto", ("gpu", "bf16-mixed", 125.82, False)),
        (H200, {}, "24gb", ("gpu", "bf16-mixed", 21.6, True)),
        (H200, {"gpu": {"enforce": False}}, "24gb", ("gpu", "bf16-mixed", 21.6, False)),
        (H200, {"gpu": {"precision": Precision["32-true"]}}, "auto", ("gpu", "32-true", 125.82, False)),
        (machine(card(name="T4", memory_gib=14.6, capability="7.5")), {}, "auto", ("gpu", "16-mixed", 13.14, False)),
        (machine(card(held_gib=39.8)), {}, "auto", ("gpu", "bf16-mixed", 90.0, False)),
        (LAPTOP, {"gpu": {"memory_gib": 5.0}}, "auto", ("cpu", "32-true", 5.0, False)),
    ],
)
def test_device_precision_and_budget(facts, given, gpu, expected):
    plan = plan_device(config(**given), {"gpu": gpu}, facts)
    found = (plan.trainer.accelerator, plan.device.precision, plan.device.memory_gib, plan.device.enforce)
    assert found == pytest.approx(expected)
    assert (plan.device.memory_gib, plan.device.enforce) == pytest.approx(expected[2:])
    assert plan.device.tf32 == (expected[0] == "gpu")
    check_reasons(plan)


def refused(groups, where, way_out, facts=LAPTOP, **more):
    return groups, where, way_out, facts, more


HELD = card(memory_gib=23.6, held_gib=23.4, by=[(4711, "ollama", 20.0)])


@pytest.mark.parametrize(
    ("groups", "where", "way_out", "facts", "more"),
    [
        refused({"trainer": {"accelerator": Accelerator.gpu}}, "trainer.accelerator", "trainer.accelerator=auto"),
        refused({"trainer": {"accelerator": Accelerator.gpu}}, "trainer.accelerator", "unset CUDA_VISIBLE_DEVICES",
                replace(LAPTOP, torch_problem="torch finds no usable GPU with CUDA_VISIBLE_DEVICES=7")),
        refused({"trainer": {"accelerator": Accelerator.gpu}}, "trainer.accelerator", "gpu=auto", H200,
                choices={"gpu": "cpu"}),
        refused({"trainer": {"devices": 99}}, "trainer.devices", "trainer.devices=2", TWO),
        refused({"trainer": {"devices": 99}}, "trainer.devices", "trainer.devices=4"),
        refused({"trainer": {"strategy": Strategy.fsdp}}, "trainer.strategy", "trainer.strategy=ddp"),
        refused({"gpu": {"precision": Precision["16-mixed"]}}, "gpu.precision", "gpu.precision=auto"),
        refused({}, "gpu: other processes hold", "ollama (pid 4711", machine(HELD)),
        refused({"gpu": {"memory_gib": 30.0}}, "gpu.memory_gib", "gpu.memory_gib=null", machine(card(memory_gib=23.6))),
        refused({"memory": {"micro_batch": 32}}, "memory.micro_batch", "GroupNorm", model=NORM),
        refused({"memory": {"accumulate": 4}}, "memory.accumulate", "memory.accumulate=null", model=BY_HAND),
        refused({"gpu": {"compile": Compile.default}}, "gpu.compile", "gpu.compile=none", model=BY_HAND),
        refused({"trainer": {"on_nan": OnNan.skip}}, "trainer.on_nan=skip", "return None", model=GUEST),
        refused({"memory": {"accumulate": 3}}, "memory.accumulate=3", "that divides them", model=GUEST),
        refused({"trainer": {"devices": 2, "strategy": Strategy.fsdp}}, "trainer.strategy", "trainer.strategy=ddp", TWO,
                data=TABLE),
        refused({"trainer": {"gradient_clip": 1.0}}, "trainer.gradient_clip", "trainer.gradient_clip=null",
                model=BY_HAND),
        refused({"memory": {"checkpoint_activations": True}}, "memory.checkpoint_activations",
                "memory.checkpoint_activations=null"),
        refused({"memory": {"features": FeatureMode.cache}}, "memory.features", "memory.features=dynamic",
                data=replace(TABLE, features_trainable=True)),
        refused({"loader": {"backend": Backend.threads}}, "loader.backend", "loader.backend=processes", data=ITEMS),
        refused({"loader": {"max_skipped": 3}, "trainer": {"devices": 2}}, "loader.max_skipped", "loader.skip_ids",
                TWO, data=ITEMS),
        refused({"loader": {"backend": Backend.own}}, "loader.backend=own", "loader=auto"),
        refused({"loader": {"backend": Backend.threads}}, "loader.backend=threads", "hand over the dataset",
                data=BROUGHT),
        refused({"loader": {"backend": Backend.processes}}, "loader.backend=processes", "loader.num_workers=2",
                data=brought(0)),
        refused({"loader": {"skip_ids": [3, 5]}}, "loader.skip_ids=[3,5]", "loader.skip_ids=[]", data=BROUGHT),
        refused({"loader": {"max_skipped": 3}}, "loader.max_skipped=3", "hand over the dataset", data=BROUGHT),
        refused({"trainer": {"overfit_batches": 2}}, "trainer.overfit_batches=2", "hand over the dataset",
                data=BROUGHT),
    ],
)  # fmt: skip
def test_facts_and_what_is_refused(groups, where, way_out, facts, more):
    with pytest.raises(ConfigError) as raised:
        planned(config(**groups), facts, **more)
    (fault,) = raised.value.faults
    assert where in str(fault)
    assert way_out in str(fault)


@pytest.mark.parametrize(
    ("groups", "said", "facts", "more"),
    [
        case({"gpu": {"memory_gib": 5.0}}, "gpu.memory_gib=5", LAPTOP),
        case({"gpu": {"memory_gib": 7.2, "enforce": True}}, "gpu.enforce=true has no effect", LAPTOP),
        case({"trainer": {"accelerator": Accelerator.cpu}}, "gpu=24gb", choices={"gpu": "24gb"}),
        case({"gpu": {"allocator": Allocator.expandable}}, "gpu.allocator=expandable has no effect", LAPTOP),
        case({"memory": {"features": FeatureMode.cache}}, "memory.features=cache has no effect"),
        case({"loader": {"num_workers": 9}}, "Set loader.num_workers=4", machine(card(), cores=4.0), data=ITEMS),
        case({"loader": {"device_prefetch": 2, "num_workers": 0}}, "loader.device_prefetch=2 is not used", data=ITEMS),
        case({}, "The last batch of each epoch has 1 sample: BatchNorm", data=DataFacts(65, False), model=NORM),
        case({"trainer": {"devices": 2}}, "has 3 samples for trainer.devices=2: BatchNorm", TWO,
             data=DataFacts(67, False), model=NORM),
        case({"effective": 2, "trainer": {"devices": 2}}, "Set workload.effective_batch_size=4", TWO, model=NORM),
        case(
            {}, "the DataLoader's num_workers=3 is more than the 2 CPU cores", machine(card(), cores=2.0), data=BROUGHT
        ),
        case(
            {"loader": {"prefetch_factor": 4, "timeout_s": 60}},
            "loader.prefetch_factor=4, loader.timeout_s=60 are not used",
            data=brought(0),
        ),
        case({}, "worker_init_fn is not called", data=brought(0, has_worker_init=True)),
        case({}, "does not reach them", data=brought(typed=frozenset(["persistent_workers"]))),
        case({}, "each of 3 workers may give every sample", data=brought(shares_workers=False)),
        case({"trainer": {"devices": 2}}, "may train on every sample", TWO, data=brought(shares_ranks=False)),
        case({}, "the dataset holds numpy.Generator", data=brought(generators=("numpy.Generator",))),
    ],
)  # fmt: skip
def test_facts_and_what_is_warned_of(groups, said, facts, more):
    assert any(said in warning for warning in planned(config(**groups), facts, **more).warnings)


@pytest.mark.parametrize(
    ("groups", "num_train", "model"),
    [
        ({}, 66, NORM),
        ({}, 128, NORM),
        ({}, 65, MODEL),
        ({"loader": {"skip_ids": [3]}}, 65, NORM),
        ({"trainer": {"max_steps": 1}}, 65, NORM),
    ],
)
def test_no_warning_of_a_last_batch_that_is_large_enough_or_never_reached(groups, num_train, model):
    warnings = planned(config(**groups), data=DataFacts(num_train, has_fetch=False), model=model).warnings
    assert not [warning for warning in warnings if "BatchNorm" in warning]


def test_all_faults_are_told_at_once():
    given = config(trainer={"devices": 99, "strategy": Strategy.fsdp}, gpu={"precision": Precision["16-mixed"]})
    with pytest.raises(ConfigError) as raised:
        planned(given, LAPTOP)
    assert len(raised.value.faults) == 3


def test_the_least_capable_of_the_cards_decides_the_precision():
    facts = machine(card(0), card(1, name="RTX 2080 Ti", capability="7.5"))
    assert plan_device(config(trainer={"devices": 2}), {}, facts).device.precision == "16-mixed"
    assert plan_device(config(), {}, facts).device.precision == "bf16-mixed"  # the first card alone


def test_a_schedule_needs_to_know_where_a_stream_ends():
    given = config()
    given.workload.schedule.name = ScheduleName.cosine
    with pytest.raises(ConfigError, match=r"trainer\.max_steps"):
        planned(given, data=brought(has_length=False))
    planned(given, data=BROUGHT)


def test_knobs_that_a_model_or_its_data_refuse_are_named():
    size = "workload.effective_batch_size"
    by_hand = ("gpu.compile", "trainer.gradient_clip", "loader.device_prefetch")
    assert planned(model=BY_HAND).refused == by_hand
    assert planned(data=brought(has_own_batches=True)).refused == (size,)
    assert planned(data=brought(is_fixed=True)).refused == ("loader.num_workers", size)


@examples(50)
@given(
    effective=st.integers(1, 5000), devices=st.integers(1, 4), nodes=st.integers(1, 3),
    micro=st.none() | st.integers(1, 5000),
    accumulate=st.none() | st.integers(1, 600),
)  # fmt: skip
def test_micro_batches_cover_each_devices_share(effective, devices, nodes, micro, accumulate):
    world = devices * nodes
    share = math.ceil(effective / world)
    micro = None if micro is None else min(micro, share)
    accumulate = None if accumulate is None or micro is not None else min(accumulate, share)
    memory = {"micro_batch": micro, "accumulate": accumulate}
    facts = machine(*(card(index) for index in range(devices)))
    plan = planned(config(effective, memory=memory, trainer={"devices": devices, "num_nodes": nodes}), facts)
    size, number = plan.memory.micro_batch, plan.memory.accumulate
    assert plan.workload.effective_batch_size == effective
    assert plan.trainer.world_size == world
    shares = [len(share_of(effective, rank, world)) for rank in range(world)]
    assert sum(shares) == effective
    assert all(sum(MicroBatches(size).sizes(own)) == own for own in shares if own)
    assert 1 <= size <= share
    assert size * number >= share > size * (number - 1)
    parts = MicroBatches(size).sizes(share)
    assert len(parts) == number
    assert parts[-1] > 0
    if micro is not None:
        assert size == micro
    if accumulate is not None:
        assert number <= accumulate


@pytest.mark.parametrize("guest", [{}, {"whole_steps": True}, {"whole_steps": True, "steps_by_hand": True}])
@pytest.mark.parametrize("has_batch_norm", [False, True])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_what_may_be_lowered_is_what_is_not_refused(guest, has_batch_norm, has_blocks):
    model = replace(MODEL, **guest, has_batch_norm=has_batch_norm, has_blocks=has_blocks)
    for knob, less in (("micro_batch", 32), ("checkpoint_activations", True)):
        try:
            planned(config(memory={knob: less}), model=model)
            is_refused = False
        except ConfigError:
            is_refused = True
        assert (f"memory.{knob}" not in planned(model=model).may_lower) is is_refused, knob


@pytest.mark.parametrize(
    ("facts", "gpu", "gib", "mode"),
    [
        (H200, "auto", 1, "cache"),
        (H200, "auto", 62, "cache"),
        (H200, "auto", 64, "cache_host"),  # 0.5 of 125.8 GiB
        (H200, "8gb", 3.5, "cache"),
        (H200, "8gb", 3.7, "cache_host"),
        (H200, "auto", 200, "dynamic"),  # 0.5 of 384 GiB of host memory
        (SMALL, "auto", 3.5, "cache_host"),
        (SMALL, "auto", 12.5, "dynamic"),
        (LAPTOP, "auto", 5.9, "cache"),  # 0.5 of 12 GiB
        (LAPTOP, "auto", 6.1, "dynamic"),
        (LAPTOP, "8gb", 3.5, "cache"),  # planned for that card
        (LAPTOP, "8gb", 3.7, "cache_host"),
        (LAPTOP, "80gb", 6.1, "dynamic"),
    ],
)
def test_features_go_where_they_fit(facts, gpu, gib, mode):
    data = dataclasses.replace(TABLE, feature_bytes=int(gib * GIB))
    plan = planned(facts=facts, data=data, choices={"gpu": gpu})
    assert plan.memory.features == mode
    assert plan.knobs["memory.features"].because.count("GiB") >= 2
    assert plan.parts["feature table"] == (data.feature_bytes if mode == "cache" else 0)


def test_what_can_never_fit_is_refused_before_anything_runs():
    model = ModelFacts(4 * GIB, 4 * GIB, 8 * GIB)
    refused = faults_of(facts=SMALL, model=model)
    assert "16.0 GiB: optimizer state 8.0 GiB, parameters 4.0 GiB, gradients 4.0 GiB" in refused
    assert "larger card" in refused
    assert isinstance(planned(facts=LAPTOP, model=model, choices={"gpu": "8gb"}), RunPlan)  # a CPU is not held to it
    half = config(gpu={"precision": Precision["bf16-true"]})
    assert planned(half, machine(card(memory_gib=10.0)), model=model).parts["optimizer state"] == 4 * GIB
    table = dataclasses.replace(TABLE, feature_bytes=8 * GIB)
    given = config(memory={"features": FeatureMode.cache})
    assert "Set memory.features=" in faults_of(given, SMALL, data=table)


QUOTAS = (0.5, 1, 2, 4, 8, 64)
COUNTS = {  # option: workers by quota, for data without fetch
    "conservative": (1, 1, 1, 1, 1, 1),
    "balanced": (1, 1, 2, 4, 4, 4),
    "aggressive": (1, 1, 2, 4, 8, 16),
    "auto": (1, 1, 2, 4, 8, 8),
    "baseline": (0, 0, 0, 0, 0, 0),
}


def option(name, facts, data, **more):
    given = dataclasses.replace(config(**more), loader=composed(f"loader={name}").loader)
    return planned(given, facts, data=data, choices={"loader": name})


def test_every_option_is_tabled():
    assert sorted([*COUNTS, "own"]) == OPTIONS["loader"]


@pytest.mark.parametrize("place", few(range(len(QUOTAS)), 3))
@pytest.mark.parametrize("name", COUNTS)
def test_workers_of_an_option_by_quota(name, place):
    facts = machine(card(), cores=float(QUOTAS[place]))
    plan = option(name, facts, ITEMS)
    assert plan.loader.num_workers == COUNTS[name][place]
    assert plan.loader.backend == ("torch" if name == "baseline" else "processes")
    assert not [warning for warning in plan.warnings if "num_workers" in warning]
    plan = option(name, facts, FETCH)
    backend = {"baseline": "torch", "auto": "inline"}.get(name, "threads")
    assert (plan.loader.backend, plan.loader.num_workers) == (
        backend,
        0 if backend == "inline" else COUNTS[name][place],
    )
    check_reasons(plan)


@pytest.mark.parametrize(("build_cpu_ms", "num_workers"), [(19.0, 2), (9.0, 5), (1.0, 7)])
def test_workers_that_wait_for_a_disk_need_no_core_each(build_cpu_ms, num_workers):
    first = FirstBatches(20.0, 2**20, 100, 4.0, {"inline": 24.0, "processes": 5.0}, build_cpu_ms=build_cpu_ms)
    assert planned(facts=machine(card(), cores=2.0), data=ITEMS, trial=first).loader.num_workers == num_workers


# -- everything with everything ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("facts", [LAPTOP, SMALL, H200], ids=["laptop", "8gb-card", "h200"])
def test_all_options_plan_together(facts):
    assert {group: len(names) for group, names in OPTIONS.items()} == {"gpu": 6, "loader": 6, "memory": 6}
    base, count = composed(), 0
    for gpu, loader, memory in itertools.product(*OPTIONS.values()):
        given = dataclasses.replace(
            base,
            gpu=composed(f"gpu={gpu}").gpu,
            loader=composed(f"loader={loader}").loader,
            memory=composed(f"memory={memory}").memory,
        )
        for data in (BROUGHT,) if loader == "own" else (TABLE, ITEMS):
            plan = planned(given, facts, data=data, choices={"gpu": gpu, "loader": loader, "memory": memory})
            assert plan.workload.effective_batch_size == base.workload.effective_batch_size
            check_reasons(plan)
            count += 1
    assert count == 2 * 6 * 5 * 6 + 6 * 6


def as_text(plan):
    budget = (
        "none"
        if plan.device.memory_gib is None
        else f"{plan.device.memory_gib:.2f} GiB{', capped' if plan.device.enforce else ''}"
    )
    lines = [f"device: {plan.device.name}", f"budget: {budget}"]
    lines += [f"{knob} = {entry.value} ({entry.source}): {entry.because}" for knob, entry in plan.knobs.items()]
    lines += [f"part: {name} {size}" for name, size in plan.parts.items()]
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings)]) + "\n"


@pytest.mark.parametrize(
    ("name", "facts", "overrides", "data"),
    [
        ("laptop_defaults", LAPTOP, (), TABLE),
        ("h200_timed", H200, ("memory.micro_batch=512",), TABLE),
        ("laptop_as_8gb_aggressive_tight", LAPTOP, ("gpu=8gb", "loader=aggressive", "memory=tight"), TABLE),
        ("8gb_card_balanced_cache_host", SMALL, ("loader=balanced", "memory=cache_host"), TABLE),
        ("h200_as_24gb_accumulate", H200, ("gpu=24gb", "loader=conservative", "memory=accumulate"), ITEMS),
        ("h200_starved", H200, ("experiment=recsys_starved",), TABLE),
        ("two_h200_ddp", TWO, ("trainer=ddp", "loader=aggressive"), ITEMS),
    ],
)
def test_plans_as_committed(name, facts, overrides, data):
    """After a change that is meant: ``make goldens``, and read the diff."""
    made = compose(overrides)
    trial = TIMED if name.endswith("_timed") else None
    text = as_text(planned(made.config, facts, data=data, choices=made.choices, trial=trial))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WELLFED_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
