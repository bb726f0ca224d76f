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

from tests.kit.examples import examples
from tests.kit.few import few
from tests.kit.machines import GIB, H200, LAPTOP, SMALL, TWO, card, machine
from wellfed.config.compose import compose
from wellfed.config.schema import (
    Accelerator,
    Allocator,
    Backend,
    Compile,
    FeatureMode,
    GpuConfig,
    LoaderConfig,
    MemoryConfig,
    OnOom,
    Precision,
    RunConfig,
    ScheduleName,
    Strategy,
    TrainerConfig,
    WorkloadConfig,
)
from wellfed.data.backends.first_batches import BackendTime, FirstBatches
from wellfed.errors import ConfigError
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, OwnLoader, RunPlan, StreamFacts
from wellfed.ranks import share_of
from wellfed.train.memory.step_down import MicroBatches

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
OPTIONS = {
    group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in ("gpu", "loader", "memory")
}
FETCH = DataFacts(100_000, has_fetch=True)
ITEMS = DataFacts(100_000, has_fetch=False)
STREAM = StreamFacts("Tars", has_length=True, shared_by="shard")
ITERABLE = dataclasses.replace(ITEMS, stream=STREAM)
OWN = OwnLoader(2048, num_workers=3, prefetch_factor=2, persistent_workers=True, pin_memory=False, timeout_s=0)
TABLE = dataclasses.replace(FETCH, feature_rows=10_000, feature_bytes=GIB)
MODEL = ModelFacts(200 * 2**20, 100 * 2**20, 200 * 2**20)
TIMED = FirstBatches(
    2.5,
    2**20,
    100,
    2.5,
    {"inline": BackendTime(5.1), "threads": BackendTime(2.7, 3), "processes": BackendTime(4.1, 3)},
)


@cache
def composed(*overrides):
    return compose(overrides).config


CLIPPED = {"trainer": {"gradient_clip": 1.0}}


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


# -- where, and in which precision ------------------------------------------------------------------------------------


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


def test_the_least_capable_of_the_cards_decides_the_precision():
    facts = machine(card(0), card(1, name="RTX 2080 Ti", capability="7.5"), card(2, name="GTX 1080", capability="6.1"))
    plan = plan_device(config(trainer={"devices": 2}), {}, facts)
    assert plan.device.precision == "16-mixed"
    assert plan.device.reasons["precision"].because.startswith("RTX 2080 Ti (capability 7.5)")
    assert plan_device(config(), {}, facts).device.precision == "bf16-mixed"  # the first card alone
    typed = config(gpu={"precision": Precision["bf16-mixed"]}, trainer={"devices": 2})
    with pytest.raises(ConfigError, match="this card is RTX 2080 Ti"):
        plan_device(typed, {}, facts)


def test_the_device_has_its_name():
    assert planned(facts=H200).device.name == "NVIDIA H200"
    assert planned(facts=LAPTOP).device.name == "A CPU"


HELD = card(memory_gib=23.6, held_gib=23.4, by=[(4711, "ollama", 20.0), (12, None, None)])


@pytest.mark.parametrize(
    ("facts", "given", "gpu", "said"),
    [
        (machine(HELD), {}, "auto", ["ollama (pid 4711, 20,480 MiB)", "a process (pid 12, size unknown)", "0.2 GiB"]),
        (machine(HELD), {"gpu": {"memory_gib": 7.2}}, "8gb", ["ollama (pid 4711", "End them"]),
        (
            machine(card(memory_gib=23.6, held_gib=10, by=[(4711, "ollama", 10.0)])),
            {"gpu": {"memory_gib": 20.0}},
            "auto",
            ["20 GiB were asked for", "ollama (pid 4711, 10,240 MiB)", "gpu.memory_gib=12.2"],
        ),
        (
            machine(card(memory_gib=23.6)),
            {"gpu": {"memory_gib": 30.0}},
            "auto",
            ["30 GiB were asked for", "(23.6 GiB)"],
        ),
    ],
)
def test_a_budget_that_can_not_be_had_names_who_holds_the_card(facts, given, gpu, said):
    with pytest.raises(ConfigError) as raised:
        plan_device(config(**given), {"gpu": gpu}, facts)
    (fault,) = raised.value.faults
    assert [part for part in said if part not in str(fault)] == []


def test_a_card_that_others_use_gives_what_is_left_and_says_who_has_the_rest():
    facts = machine(card(memory_gib=23.6, held_gib=10, by=[(4711, "ollama", 10.0)]))
    plan = plan_device(config(gpu={"memory_gib": 21.6}), {"gpu": "24gb"}, facts)
    assert plan.device.memory_gib == pytest.approx(0.9 * 13.6)
    assert "ollama (pid 4711" in plan.warnings[0]


def test_on_the_cpu_a_budget_is_not_enforced():
    plan = plan_device(config(gpu={"memory_gib": 7.2, "enforce": True}), {"gpu": "8gb"}, LAPTOP)
    assert plan.device.enforce is False
    assert any(warning.startswith("gpu.enforce=true has no effect") for warning in plan.warnings)


def test_training_on_the_cpu_beside_a_card_caps_nothing_and_says_so():
    given = config(trainer={"accelerator": Accelerator.cpu})
    plan = plan_device(given, {"gpu": "24gb"}, H200)
    assert (plan.device.enforce, plan.device.memory_gib) == (False, 21.6)
    (warning,) = plan.warnings
    assert warning.startswith(
        "gpu=24gb: trainer.accelerator=cpu trains on the CPU; the 21.6 GiB budget is planned with"
    )
    assert plan_device(given, {"gpu": "auto"}, H200).warnings == ()


def test_a_budget_without_a_gpu_names_what_was_typed():
    (warning,) = plan_device(config(gpu={"memory_gib": 5.0}), {"gpu": "auto"}, LAPTOP).warnings
    assert warning.startswith("gpu.memory_gib=5: no NVIDIA GPU here")


def test_several_devices_share_the_work():
    assert planned(facts=H200).trainer.strategy == "auto"
    plan = planned(config(trainer={"devices": 2}), TWO)
    assert (plan.trainer.strategy, plan.memory.on_oom) == ("ddp", "retry")
    assert "fail has DDP sum them during it" in plan.knobs["memory.on_oom"].because
    sparse = planned(config(trainer={"devices": 2}), TWO, model=dataclasses.replace(MODEL, has_sparse_gradients=True))
    assert sparse.memory.on_oom == "fail"
    plan = planned(config(trainer={"devices": 2, "strategy": Strategy.fsdp}), TWO)
    assert (plan.trainer.strategy, plan.knobs["trainer.strategy"].source) == ("fsdp", "set")
    assert plan.memory.on_oom == "fail"
    assert plan.knobs["trainer.strategy"].because == "trainer.strategy=fsdp"
    check_reasons(plan)


@pytest.mark.parametrize(
    ("facts", "given", "gpu", "message"),
    [
        (
            LAPTOP,
            {"trainer": {"accelerator": Accelerator.gpu}},
            "auto",
            "trainer.accelerator: gpu was asked for, and there is no GPU that torch can use (NVML: driver not loaded). "
            "Set trainer.accelerator=auto to train on the CPU.",
        ),
        (
            replace(LAPTOP, torch_problem="torch finds no usable GPU with CUDA_VISIBLE_DEVICES=7"),
            {"trainer": {"accelerator": Accelerator.gpu}},
            "auto",
            "trainer.accelerator: gpu was asked for, and there is no GPU that torch can use (torch finds no usable GPU "
            "with CUDA_VISIBLE_DEVICES=7). Run: unset CUDA_VISIBLE_DEVICES. Or set trainer.accelerator=auto to train "
            "on the CPU.",
        ),
        (
            H200,
            {"trainer": {"accelerator": Accelerator.gpu}},
            "cpu",
            "trainer.accelerator: gpu was asked for, and gpu=cpu says to train on the CPU. "
            "Set gpu=auto, or trainer.accelerator=auto.",
        ),
        (
            TWO,
            {"trainer": {"devices": 99}},
            "auto",
            "trainer.devices: 99 devices were asked for, and 2 GPU(s) are visible. "
            "Set trainer.devices=2, or make more visible with CUDA_VISIBLE_DEVICES.",
        ),
        (
            LAPTOP,
            {"trainer": {"devices": 99}},
            "auto",
            "trainer.devices: 99 processes were asked for, and this machine gives 4 CPU cores. "
            "Set trainer.devices=4 or less.",
        ),
        (
            LAPTOP,
            {"trainer": {"strategy": Strategy.fsdp}},
            "auto",
            "trainer.strategy: fsdp shards over GPUs, and this run trains on the CPU. "
            "Set trainer.strategy=ddp, or trainer=default.",
        ),
        (
            LAPTOP,
            {"gpu": {"precision": Precision["16-mixed"]}},
            "auto",
            "gpu.precision: 16-mixed needs a GPU (fp16 with a gradient scaler), and this run trains on the CPU. "
            "Set gpu.precision=auto or gpu.precision=bf16-mixed.",
        ),
    ],
    ids=["no-gpu", "hidden", "contradiction", "cards", "cores", "fsdp", "precision"],
)
def test_what_the_machine_cannot_do(facts, given, gpu, message):
    assert faults_of(config(**given), facts, choices={"gpu": gpu}) == message


def test_all_faults_are_told_at_once():
    given = config(trainer={"devices": 99, "strategy": Strategy.fsdp}, gpu={"precision": Precision["16-mixed"]})
    assert len(faults_of(given, LAPTOP).splitlines()) == 3


def test_an_allocator_without_cuda_is_a_warning():
    (warning,) = planned(config(gpu={"allocator": Allocator.expandable}), LAPTOP).warnings
    assert warning.startswith("gpu.allocator=expandable has no effect on the CPU")
    assert planned(config(gpu={"allocator": Allocator.expandable}), H200).warnings == ()


# -- micro-batches ----------------------------------------------------------------------------------------------------


def test_a_plan_for_several_nodes_tells_the_ranks_and_is_that_of_as_many_devices_elsewhere():
    four = planned(config(trainer={"devices": 4}), machine(*map(card, range(4)), cores=32.0))
    nodes = planned(config(trainer={"devices": 2, "num_nodes": 2}), TWO)
    check_reasons(nodes)
    assert nodes.knobs["trainer.num_nodes"].because == "trainer.num_nodes=2: 2 nodes x 2 devices = 4 ranks"
    assert "trainer.num_nodes" not in four.knobs
    assert (nodes.trainer.world_size, nodes.trainer.strategy) == (4, "ddp")
    assert nodes.memory == four.memory
    assert nodes.memory.decided("micro_batch").because.startswith("64 samples a step over 4 devices")
    assert nodes.loader.num_workers == four.loader.num_workers  # cores are shared by the ranks of a machine alone
    one_each = planned(config(trainer={"num_nodes": 2}), H200)
    assert (one_each.trainer.strategy, one_each.memory.micro_batch) == ("ddp", 32)


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


@pytest.mark.parametrize(
    ("memory", "size", "number", "sources"),
    [
        ({}, 64, 1, ("predicted", "predicted")),
        ({"micro_batch": 48}, 48, 2, ("set", "predicted")),
        ({"accumulate": 4}, 16, 4, ("set", "set")),
        ({"accumulate": 30}, 3, 22, ("set", "predicted")),
        ({"micro_batch": 16, "accumulate": 4}, 16, 4, ("set", "set")),
    ],
)
def test_a_step_of_64_samples(memory, size, number, sources):
    plan = planned(config(memory=memory))
    assert (plan.memory.micro_batch, plan.memory.accumulate) == (size, number)
    assert (plan.knobs["memory.micro_batch"].source, plan.knobs["memory.accumulate"].source) == sources
    check_reasons(plan)


def test_an_accumulate_that_does_not_divide_says_what_came_of_it():
    because = planned(config(memory={"accumulate": 30})).knobs["memory.accumulate"].because
    assert because == "64 samples a device in micro-batches of 3: memory.accumulate=30 has no equal parts here"


def test_a_model_with_batch_norm_is_never_split():
    model = dataclasses.replace(MODEL, has_batch_norm=True)
    plan = planned(config(), model=model)
    assert (plan.memory.micro_batch, plan.memory.accumulate, plan.memory.on_oom) == (64, 1, "fail")
    assert "BatchNorm" in plan.knobs["memory.on_oom"].because
    assert faults_of(config(memory={"micro_batch": 32}), model=model) == (
        "memory.micro_batch: 32 would split 64 samples of a model with BatchNorm, whose statistics belong to the whole "
        "batch; the result would differ. Set memory.micro_batch=null and memory.accumulate=null, or replace BatchNorm "
        "by GroupNorm."
    )


def test_a_lightning_module_runs_its_own_step():
    model = dataclasses.replace(MODEL, is_lightning_module=True)
    plan = planned(model=model)
    assert (plan.memory.micro_batch, plan.memory.accumulate, plan.memory.on_oom) == (64, 1, "retry")
    assert "from the last checkpoint" in plan.knobs["memory.on_oom"].because
    check_reasons(plan)
    for asked in ({"accumulate": 4}, {"micro_batch": 16}):
        plan = planned(config(memory=asked), model=model)
        assert (plan.memory.micro_batch, plan.memory.accumulate, plan.loader.device_prefetch) == (16, 4, 0)
        check_reasons(plan)


@pytest.mark.parametrize(
    ("facts", "says"), [({"steps_by_hand": True}, "steps by hand"), ({"has_batch_norm": True}, "BatchNorm")]
)
def test_a_lightning_module_whose_steps_stay_whole(facts, says):
    model = dataclasses.replace(MODEL, is_lightning_module=True, **facts)
    given, split = config(), config(memory={"accumulate": 4})
    assert planned(given, model=model).memory.on_oom == "fail"
    assert says in planned(given, model=model).knobs["memory.on_oom"].because
    assert says in faults_of(split, model=model)


@pytest.mark.parametrize(
    "guest", [{}, {"is_lightning_module": True}, {"is_lightning_module": True, "steps_by_hand": True}]
)
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


def test_batches_that_a_lightning_module_changes_or_splits_are_not_copied_ahead():
    guest = replace(MODEL, is_lightning_module=True)
    assert planned(model=guest).loader.device_prefetch == 2
    for model, groups in ((replace(guest, changes_before_copy=True), {}), (guest, {"memory": {"accumulate": 2}})):
        plan = planned(config(**groups), model=model)
        assert (plan.loader.device_prefetch, plan.refused) == (0, ("loader.device_prefetch",))
    plan = planned(config(loader={"device_prefetch": 3}), model=replace(guest, changes_before_copy=True))
    assert "loader.device_prefetch=3 is not used: on_before_batch_transfer changes batches" in "\n".join(plan.warnings)


@pytest.mark.parametrize("guest", [{"steps_by_hand": True}, {"has_sparse_gradients": True}, {}])
@pytest.mark.parametrize("is_lightning_module", [False, True])
def test_knobs_that_a_model_refuses_are_named(guest, is_lightning_module):
    model = replace(MODEL, **guest, is_lightning_module=is_lightning_module)
    tried = {"gpu.compile": {"gpu": {"compile": Compile.default}}, "trainer.gradient_clip": CLIPPED}
    refused = []
    for knob, groups in tried.items():
        try:
            planned(config(**groups), model=model)
        except ConfigError:
            refused.append(knob)
    assert list(planned(model=model).refused) == refused


def test_knobs_that_the_data_refuse_are_named():
    own = config(2048, loader={"backend": Backend.own})
    size = "workload.effective_batch_size"
    for more, refused in (
        ({}, ()),
        ({"has_own_batches": True}, (size,)),
        ({"only_as_it_came": "val: it is odd"}, ("loader.backend", size)),
    ):
        assert planned(own, data=replace(ITEMS, own_loader=OWN, **more)).refused == refused


def test_features_that_may_be_kept_have_a_size():
    assert planned(data=TABLE).feature_table_bytes == TABLE.feature_bytes > 0
    assert planned(data=replace(TABLE, features_trainable=True)).feature_table_bytes == 0


def test_out_of_memory_is_retried_where_it_can_be():
    assert planned().memory.on_oom == "retry"
    assert planned(config(memory={"on_oom": OnOom.fail})).knobs["memory.on_oom"].source == "set"


def test_checkpointing_is_as_set_and_off_by_default():
    assert planned().memory.checkpoint_activations is False
    plan = planned(config(memory={"checkpoint_activations": True}), model=replace(MODEL, has_blocks=True))
    assert plan.memory.checkpoint_activations is True
    assert plan.knobs["memory.checkpoint_activations"].because == "memory.checkpoint_activations=true"


def test_checkpointing_without_anything_to_recompute_is_refused_unless_it_is_tight_memory():
    asked = config(memory={"checkpoint_activations": True})
    assert (
        "memory.checkpoint_activations: true: the model has no nn.ModuleList or nn.Sequential with blocks to recompute."
        " Set memory.checkpoint_activations=null."
    ) in faults_of(asked)
    plan = planned(asked, choices={"memory": "tight"})
    assert plan.memory.checkpoint_activations is False
    entry = plan.knobs["memory.checkpoint_activations"]
    assert entry.because == "off: the model has no nn.ModuleList or nn.Sequential with blocks to recompute"
    model = replace(MODEL, has_blocks=True)
    assert planned(asked, model=model, choices={"memory": "tight"}).memory.checkpoint_activations is True


# -- features ---------------------------------------------------------------------------------------------------------


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


def test_a_mode_that_is_set_is_kept():
    plan = planned(
        config(memory={"features": FeatureMode.cache}), data=dataclasses.replace(TABLE, feature_bytes=70 * GIB)
    )
    assert (plan.memory.features, plan.knobs["memory.features"].source) == ("cache", "set")


def test_features_that_are_trained_are_dynamic():
    data = dataclasses.replace(TABLE, features_trainable=True)
    assert planned(data=data).memory.features == "dynamic"
    assert planned(config(memory={"features": FeatureMode.dynamic}), data=data).knobs["memory.features"].source == "set"
    for mode in (FeatureMode.cache, FeatureMode.cache_host):
        assert faults_of(config(memory={"features": mode}), data=data) == (
            f"memory.features: {mode.value} would freeze features that are trained. "
            "Set memory.features=dynamic, or workload.model.train_encoder=false."
        )


def test_a_workload_without_features():
    assert planned().memory.features is None
    plan = planned(config(memory={"features": FeatureMode.cache}))
    assert plan.memory.features is None
    assert plan.warnings == (
        "memory.features=cache has no effect: this workload offers no features. Set memory.features=null.",
    )


# -- known parts ------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_before_anything_runs():
    model = ModelFacts(4 * GIB, 4 * GIB, 8 * GIB)
    refused = faults_of(facts=SMALL, model=model)
    assert "16.0 GiB: optimizer state 8.0 GiB, parameters 4.0 GiB, gradients 4.0 GiB" in refused
    assert "larger card" in refused
    assert "bf16-true" in faults_of(facts=SMALL, model=ModelFacts(3 * GIB, 3 * GIB, 6 * GIB))
    assert isinstance(planned(facts=LAPTOP, model=model, choices={"gpu": "8gb"}), RunPlan)  # a CPU is not held to it
    half = config(gpu={"precision": Precision["bf16-true"]})
    assert planned(half, machine(card(memory_gib=10.0)), model=model).parts["optimizer state"] == 4 * GIB
    table = dataclasses.replace(TABLE, feature_bytes=8 * GIB)
    given = config(memory={"features": FeatureMode.cache})
    assert "Set memory.features=" in faults_of(given, SMALL, data=table)


# -- the loader -------------------------------------------------------------------------------------------------------

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
    check_reasons(plan)
    plan = option(name, facts, FETCH)
    backend = {"baseline": "torch", "auto": "inline"}.get(name, "threads")
    assert plan.loader.backend == backend
    assert plan.loader.num_workers == (0 if backend == "inline" else COUNTS[name][place])
    check_reasons(plan)


def test_a_loader_that_is_left_as_it_came_shows_its_own_numbers():
    data = dataclasses.replace(ITEMS, own_loader=OWN)
    plan = option("own", H200, data, effective=2048)
    own = {name: getattr(plan.loader, name) for name in ("num_workers", "prefetch_factor", "persistent_workers")}
    assert own == {"num_workers": 3, "prefetch_factor": 2, "persistent_workers": True}
    assert (plan.loader.backend, plan.loader.pin_memory, plan.loader.device_prefetch) == ("own", False, 0)
    assert plan.loader.reasons["num_workers"].because == "as the DataLoader has it"
    check_reasons(plan)


def own_faults(given, **data):
    return faults_of(given, data=dataclasses.replace(ITEMS, **data))


def test_what_a_loader_of_the_users_can_not_be():
    own, with_own = {"backend": Backend.own}, {"own_loader": OWN}
    assert "workload.data gives none for training. Set loader=auto" in own_faults(config(loader=own))
    told = own_faults(config(64, loader=own), **with_own)
    assert told == (
        "workload.effective_batch_size=64: the DataLoader's batches have 2048, and loader.backend=own leaves them as "
        "they are. Set workload.effective_batch_size=null, or another loader option."
    )
    two = config(2048, loader=own, trainer={"devices": 2, "accelerator": Accelerator.cpu})
    assert "each of trainer.devices=2 would read the whole" in own_faults(two, **with_own)
    told = own_faults(config(), own_loader=OWN, only_as_it_came="val: it is odd")
    assert told == (
        "workload.data: the DataLoader of val: it is odd: it can't be built again. "
        "Set loader=own, which leaves it as it came."
    )


def test_the_plan_says_whose_batch_size_it_is():
    data = dataclasses.replace(ITEMS, own_loader=OWN)
    because = {size: planned(config(size), data=data).workload.reasons for size in (2048, 64)}
    assert because[2048]["effective_batch_size"].because == "as the DataLoader has it; nothing else changes it"
    assert because[64]["effective_batch_size"].because.endswith("in place of the DataLoader's 2048")


@pytest.mark.parametrize(
    ("build_ms", "batch_bytes", "backend", "asked", "prefetch"),
    [
        (0.1, 2**16, "threads", None, 8),
        (0.1, 2**16, "threads", 3, 3),
        (5.0, 2**16, "threads", None, 2),  # a batch a time keeps the training thread waiting for less
        (0.1, 2**30, "threads", None, 2),
        (0.1, 2**16, "processes", None, 2),
    ],
)
def test_cheap_batches_are_built_several_ahead(build_ms, batch_bytes, backend, asked, prefetch):
    given = config(loader={"backend": Backend[backend], "num_workers": 1, "prefetch_factor": asked})
    plan = planned(given, trial=FirstBatches(build_ms, batch_bytes, 100))
    assert plan.loader.prefetch_factor == prefetch


@pytest.mark.parametrize(
    ("name", "prefetch", "persistent", "pin", "timeout_s"),
    [
        ("baseline", None, False, False, 0),
        ("conservative", 2, True, True, 60),
        ("balanced", 4, True, True, 60),
        ("aggressive", 8, True, True, 60),
        ("auto", 2, True, True, 0),
    ],
)
def test_the_rest_of_an_option(name, prefetch, persistent, pin, timeout_s):
    def rest(plan):
        names = ("prefetch_factor", "persistent_workers", "pin_memory", "timeout_s")
        return tuple(getattr(plan.loader, name) for name in names)

    assert rest(option(name, H200, ITEMS)) == (prefetch, persistent, pin, timeout_s)
    assert rest(option(name, LAPTOP, ITEMS)) == (prefetch, persistent, False, timeout_s)
    # Threads are no processes: nothing lives on, and they share the process's torch threads.
    ahead = option(name, H200, FETCH)
    without = (prefetch, False, pin, timeout_s) if name not in ("auto", "baseline") else (None, False, pin, 0)
    assert rest(ahead) == without


def test_processes_share_the_quota():
    plan = option("aggressive", TWO, ITEMS, trainer={"devices": 2})
    assert plan.loader.num_workers == 8
    assert "16 cores / 2 devices" in plan.knobs["loader.num_workers"].because


@pytest.mark.parametrize(
    ("loader", "data", "backend", "num_workers"),
    [
        ({}, FETCH, "inline", 0),
        ({}, ITEMS, "processes", 8),
        ({"num_workers": 0}, FETCH, "inline", 0),
        ({"num_workers": 0}, ITEMS, "torch", 0),
        ({"num_workers": 3}, FETCH, "threads", 3),
        ({"num_workers": 3}, ITEMS, "processes", 3),
        ({"prefetch_factor": 2}, FETCH, "threads", 8),
        ({"backend": Backend.torch}, FETCH, "torch", 8),
        ({"backend": Backend.torch, "num_workers": 0}, FETCH, "torch", 0),
        ({"backend": Backend.processes, "num_workers": 2}, FETCH, "processes", 2),
        ({"backend": Backend.inline}, ITEMS, "inline", 0),
        ({}, ITERABLE, "processes", 8),
        ({"num_workers": 0}, ITERABLE, "inline", 0),
    ],
)
def test_backend_and_workers(loader, data, backend, num_workers):
    plan = planned(config(loader=loader), machine(card(), cores=8.0), data=data)
    assert (plan.loader.backend, plan.loader.num_workers) == (backend, num_workers)
    is_set = loader.get("num_workers") is not None
    assert plan.knobs["loader.num_workers"].source == ("set" if is_set else "predicted")
    check_reasons(plan)


def test_threads_need_fetch():
    assert faults_of(config(loader={"backend": Backend.threads}), data=ITEMS) == (
        "loader.backend: threads needs training data with fetch(indices, rng); this has only __getitem__. "
        "Set loader.backend=processes, or give the dataset fetch."
    )


def stream(**facts):
    return dataclasses.replace(ITERABLE, stream=dataclasses.replace(STREAM, **facts))


def workers_of(data, loader, **more):
    return planned(config(loader=loader, **more), data=data).knobs["loader.num_workers"]


def test_a_stream_has_as_many_workers_as_can_share_it():
    two = workers_of(ITERABLE, {"num_workers": 2})
    assert two.value == 2
    assert two.because.endswith("read in 2 parts in turn: the order of samples goes by the number of workers")
    alone = workers_of(stream(shared_by=None), {})
    assert alone.value == 1
    assert "at most 1; Tars has no shard(index, count), and does not ask" in alone.because
    sharded = workers_of(stream(num_shards=3), {"num_workers": 2})
    assert sharded.because.endswith("; read in 3 parts in turn, whoever reads them")
    assert workers_of(stream(num_shards=3), {}).value == 3


def test_more_workers_than_can_share_a_stream_are_refused():
    assert faults_of(config(loader={"num_workers": 2}), data=stream(shared_by=None)) == (
        "loader.num_workers=2: Tars has no shard(index, count), and does not ask torch's get_worker_info() for its "
        "part: each worker would give every sample. Set loader.num_workers=1, which reads ahead, or give it "
        "shard(index, count)."
    )
    assert faults_of(config(loader={"num_workers": 4}), data=stream(num_shards=3)) == (
        "loader.num_workers=4: Tars can be read in 3 parts (num_shards). Set loader.num_workers=3."
    )


def test_devices_that_may_not_share_a_stream_are_refused():
    fault = faults_of(config(trainer={"devices": 2}), TWO, data=stream(shared_by=None))
    assert "trainer.devices=2: with Tars" in fault
    assert "Give it shard(index, count), or train on one device." in fault


def test_cosine_needs_to_know_where_a_stream_ends():
    def cosine(**groups):
        made = config(**groups)
        made.workload.schedule.name = ScheduleName.cosine
        return made

    assert faults_of(cosine(), data=stream(has_length=False)) == (
        "workload.schedule.name=cosine: needs the number of the last step, and Tars has no __len__ to tell it. "
        "Set trainer.max_steps=1000, or give it __len__."
    )
    planned(cosine(), data=ITERABLE)
    planned(cosine(trainer={"max_steps": 5}), data=stream(has_length=False))


def test_what_is_of_no_use_with_a_stream_is_named():
    plan = planned(config(loader={"backend": Backend.threads, "num_workers": 2, "skip_ids": [3, 5]}), data=ITERABLE)
    assert (plan.loader.backend, plan.loader.num_workers) == ("threads", 2)
    drawn, skipped = plan.warnings
    assert drawn.startswith("loader.backend=threads: what Tars draws from the generators of Python, numpy and torch")
    assert skipped == "loader.skip_ids=[3,5] is not used: a stream's samples have no index to be left out by."


def test_more_workers_than_cores_is_a_warning():
    (warning,) = planned(config(loader={"num_workers": 9}), machine(card(), cores=4.0), data=ITEMS).warnings
    assert "loader.num_workers=9 is more than the 4 CPU cores" in warning
    assert "loader.num_workers=4." in warning
    two = planned(config(loader={"num_workers": 9}, trainer={"devices": 2}), TWO, data=ITEMS)
    assert "loader.num_workers=9 on each of 2 devices" in two.warnings[0]
    assert planned(config(loader={"num_workers": 1}), machine(card(), cores=0.5), data=ITEMS).warnings == ()


def test_batches_are_copied_ahead_where_that_is_of_use():
    assert planned(config()).loader.device_prefetch == 2
    assert planned(config(loader={"device_prefetch": 0})).loader.device_prefetch == 0
    assert planned(config(loader={"device_prefetch": 4})).loader.device_prefetch == 4
    on_a_cpu = planned(config(loader={"device_prefetch": 4}), LAPTOP)
    assert (on_a_cpu.loader.device_prefetch, on_a_cpu.warnings) == (0, ())


def test_a_stream_is_copied_ahead_where_a_worker_reads_it():
    assert planned(config(), data=ITERABLE).loader.device_prefetch == 2
    asked = planned(config(loader={"device_prefetch": 2, "num_workers": 0}), data=ITERABLE)
    assert asked.loader.device_prefetch == 0
    assert asked.warnings[0].startswith("loader.device_prefetch=2 is not used: samples are built one by one")


def test_samples_built_in_the_training_process_are_not_copied_ahead():
    one_by_one = {"backend": Backend.torch, "num_workers": 0}
    assert planned(config(loader=one_by_one), data=ITEMS).loader.device_prefetch == 0
    asked = planned(config(loader={**one_by_one, "device_prefetch": 2}), data=ITEMS)
    assert asked.loader.device_prefetch == 0
    assert asked.warnings[0].startswith("loader.device_prefetch=2 is not used: samples are built one by one")
    assert asked.warnings[0].endswith("Set loader.num_workers=1, or give the dataset fetch.")
    has_fetch = planned(config(loader={**one_by_one, "device_prefetch": 2}))  # which torch's loader leaves alone
    assert has_fetch.loader.device_prefetch == 0
    assert has_fetch.warnings[0].endswith("Set loader.num_workers=1, or loader.backend=inline, which reads by fetch.")


@pytest.mark.parametrize(("asked", "value", "because"), [
    (None, True, "copies from page-locked memory run beside the host"),
    (False, False, "loader.pin_memory=false"),
    (True, True, "loader.pin_memory=true"),
])  # fmt: skip
def test_pinned_memory(asked, value, because):
    entry = planned(config(loader={"pin_memory": asked})).knobs["loader.pin_memory"]
    assert (entry.value, entry.because) == (value, because)
    entry = planned(config(loader={"pin_memory": asked}), LAPTOP).knobs["loader.pin_memory"]
    assert (entry.value, entry.source) == (False, "predicted")


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
        for data in (dataclasses.replace(ITEMS, own_loader=OWN),) if loader == "own" else (TABLE, ITEMS):
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


def test_skipping_bad_samples_is_for_one_device_and_for_data_with_indices():
    assert planned(config(loader={"max_skipped": 3}), data=ITEMS).warnings == ()
    data = ITERABLE
    (warning,) = planned(config(loader={"max_skipped": 3}), data=data).warnings
    assert warning == "loader.max_skipped=3 is not used: a stream's samples have no index to be left out by."
    assert faults_of(config(loader={"max_skipped": 3}, trainer={"devices": 2}), TWO, data=ITEMS) == (
        "loader.max_skipped: 3 with trainer.devices=2: a rank does not know that another left out a sample of the "
        "step. Set loader.max_skipped=0 and loader.skip_ids=[...], or one device."
    )


# -- a LightningModule -------------------------------------------------------------------------------------------------

GUEST = dataclasses.replace(MODEL, is_lightning_module=True)
BY_HAND = dataclasses.replace(GUEST, steps_by_hand=True)


@pytest.mark.parametrize(
    ("given", "model", "says"),
    [
        (config(memory={"accumulate": 4}), BY_HAND, "memory.accumulate: 4 would split a step"),
        (config(gpu={"compile": Compile.default}), BY_HAND, "gpu.compile: default compiles training_step"),
        (config(trainer={"gradient_clip": 1.0}), BY_HAND, "trainer.gradient_clip: 1 clips before an optimizer step"),
    ],
)
def test_what_a_lightning_module_can_not_be_made_to_do_is_refused(given, model, says):
    fault = faults_of(given, model=model)
    assert says in fault
    assert "LightningModule" in fault
    assert "=null" in fault or "=none" in fault
    planned(given)  # of a plain module it is no fault


def test_what_a_lightning_module_has_no_use_for_is_said():
    given = config()
    given.workload.optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
    names = ("workload.optimizer",)
    for model, expected in ((GUEST, 1), (MODEL, 0)):
        said = [warning for warning in planned(given, model=model).warnings if warning.startswith(names)]
        assert len(said) == expected


def test_automatic_optimization_is_compiled_and_clipped():
    given = config(gpu={"compile": Compile.default}, trainer={"gradient_clip": 1.0})
    assert planned(given, model=GUEST).device.compile == "default"
