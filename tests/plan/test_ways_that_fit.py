"""What is advised when a run has ended for want of memory: each override is one that the run did not have, and needs as
much less as was lacking."""

import dataclasses
import re

import pytest

from tests.kit.footprints import MIB, footprint
from tests.kit.machines import GIB
from tests.plan.test_budget import BLOCKS, DEEP, planned
from tests.plan.test_decide import MODEL, TABLE, config
from wellfed.config.schema import FeatureMode, OnOom
from wellfed.plan.budget import step_shape
from wellfed.plan.predict.peak import NoEstimate, needed_bytes
from wellfed.plan.ways_that_fit import LEAST_FRAC, RanOut, ways_that_fit


def ran(given, gpu="8gb", *, model=BLOCKS, modes=(None,), checkpointed=(False, True), **sizes):
    """The plan of a run with all that was estimated of it."""
    sizes = {**DEEP, **sizes}
    more = {"data": TABLE} if modes != (None,) else {}
    plan = planned(given, gpu, model=model, **more, **sizes)
    found = {(mode, each): footprint(mode, each, **sizes) for mode in modes for each in checkpointed}
    return dataclasses.replace(plan, footprints=found)


def asked(plan, given, *events, model=BLOCKS, message="CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0"):
    ran_out = RanOut.of(plan, events, message)
    return ran_out, ways_that_fit(plan, given, "8gb", model, ran_out)


def size_of(way):
    return int(re.search(r"memory\.micro_batch=(\d+)", way)[1])


def test_a_run_that_was_not_to_retry_is_told_what_needs_less():
    given = config(memory={"on_oom": OnOom.fail})
    plan = ran(given)
    ran_out, (retry, smaller, checkpointed, *more) = asked(plan, given)
    assert ran_out == RanOut(plan.memory.micro_batch, None, False, 512 * MIB)
    assert retry.startswith("memory.on_oom=retry, which goes on")
    assert smaller.startswith("memory.micro_batch=")
    step, known = step_shape(plan, BLOCKS), plan.footprints[None, False]
    failed = needed_bytes(known, plan.memory.micro_batch, step)
    assert needed_bytes(known, size_of(smaller), step) <= failed - 512 * MIB
    assert needed_bytes(known, size_of(smaller) + 1, step) > failed - 512 * MIB  # no smaller than it must be
    assert checkpointed.startswith("memory.checkpoint_activations=true (")
    assert more[-1] == "a larger card (gpu=16gb)"


def test_what_was_tried_is_not_advised():
    given = config()
    plan = ran(given, modes=("cache", "cache_host", "dynamic"), table=GIB)
    assert plan.memory.features == "cache"
    down = {"kind": "step_down", "micro_batch": 1, "before": 2}
    eval_down = {"kind": "step_down", "evaluation_batch": 7, "before": 9}
    recomputed = {"kind": "ladder", "change": "memory.checkpoint_activations=true"}
    ran_out, ways = asked(plan, given, down, eval_down, recomputed)
    assert ran_out == RanOut(1, "cache", True, 512 * MIB)
    assert [way.partition(" (")[0] for way in ways] == [
        "memory.features=cache_host memory.checkpoint_activations=true memory.micro_batch=1",
        "memory.features=dynamic memory.checkpoint_activations=true memory.micro_batch=1",
        "a larger card",
    ]
    moved = {"kind": "ladder", "change": "memory.features=dynamic"}
    ran_out, ways = asked(plan, given, down, recomputed, moved)
    assert (ran_out.features, ways) == ("dynamic", ["a larger card (gpu=16gb)"])


def test_batches_ahead_are_let_go_where_they_are_what_lacked():
    given = config()
    ahead = ran(given, inputs=(MIB,), checkpointed=(False,))
    ahead = dataclasses.replace(ahead, loader=dataclasses.replace(ahead.loader, device_prefetch=2))
    down = {"kind": "step_down", "micro_batch": 1, "before": 2}
    _, ways = asked(ahead, given, down, message="CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert any(way.startswith("loader.device_prefetch=0 (") for way in ways)
    none = dataclasses.replace(ahead, loader=dataclasses.replace(ahead.loader, device_prefetch=0))
    assert not any("device_prefetch" in way for way in asked(none, given, down, message="")[1])


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "another rank ran out of memory.", ""])
def test_where_it_is_not_known_what_lacked_it_is_some_of_what_was_needed(message):
    given = config(memory={"on_oom": OnOom.fail})
    plan = ran(given)
    ran_out, ways = asked(plan, given, message=message)
    step, known = step_shape(plan, BLOCKS), plan.footprints[None, False]
    failed = needed_bytes(known, plan.memory.micro_batch, step)
    assert ran_out.lacking_bytes == 0
    assert needed_bytes(known, size_of(ways[1]), step) <= (1 - LEAST_FRAC) * failed


def test_a_typed_number_of_parts_gives_way_to_the_size():
    given = config(memory={"on_oom": OnOom.fail, "accumulate": 1})
    plan = ran(given, "80gb", checkpointed=(False,))
    _, ways = asked(plan, given)
    assert re.match(r"memory\.micro_batch=\d+ memory\.accumulate=null \(", ways[1])


def test_a_model_that_is_never_split_gets_no_smaller_micro_batch():
    model = dataclasses.replace(BLOCKS, has_batch_norm=True)
    given = config()
    plan = ran(given, "24gb", model=model)
    _, ways = asked(plan, given, model=model)
    assert not any("micro_batch" in way or "on_oom" in way for way in ways)
    assert ways[0].startswith("memory.checkpoint_activations=true (")


def test_without_an_estimate_nothing_is_made_up():
    given = config(memory={"features": FeatureMode.cache})
    plan = ran(given, model=MODEL, modes=("cache",))
    assert asked(dataclasses.replace(plan, footprints={}), given)[1] == []
    nothing = {key: NoEstimate("it asks for values") for key in plan.footprints}
    assert asked(dataclasses.replace(plan, footprints=nothing), given)[1] == []
