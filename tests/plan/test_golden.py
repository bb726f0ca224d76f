"""Plans of every gpu x loader x memory option, and the guide's recommender, from committed footprints.

After a change that is meant: ``make goldens``, and read the diff. The
footprints themselves come from ``make_footprints.py``.
"""

import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path

import pytest

from tests.kit.composed import compose
from tests.kit.machines import H200
from wellfed.observe.hardware.profiles import with_cards
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.predict.peak import Footprint, Point, StepShape, predicted_peak
from wellfed.plan.run_plan import DataFacts, ModelFacts
from wellfed.units import show_bytes

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).parents[2] / "configs"
OPTIONS = [sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in ("gpu", "loader", "memory")]
RECORDED = json.loads((GOLDEN / "footprints.json").read_text(encoding="utf-8"))
SECRET_SHOWN = ("trainer.accelerator", "gpu.precision", "memory.micro_batch", "memory.accumulate", "memory.features")
SECRET_SHOWN += ("memory.checkpoint_activations", "loader.backend", "loader.num_workers", "loader.prefetch_factor")


@functools.cache
def estimate_of(name):
    """The footprints of one model, by feature mode and checkpointing."""
    footprints = {
        way: Footprint(**{**each, "points": tuple(Point(**point) for point in each["points"])})
        for way, each in RECORDED[name]["footprints"].items()
    }
    return lambda mode, checkpointed: footprints[f"{mode}/{checkpointed}"]


def planned(name, composed, facts=H200):
    recorded = RECORDED[name]
    device = plan_device(composed.config, composed.choices, facts)
    data, model = DataFacts(**recorded["data"]), ModelFacts(**recorded["model"])
    return plan_run(composed.config, composed.choices, facts, device, data, model, estimate=estimate_of(name))


def check(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WELLFED_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_every_combination_of_options_is_planned_as_committed(name):
    base = compose([])
    rows = []
    for gpu, loader, memory in itertools.product(*OPTIONS):
        if loader == "own":  # only DataLoaders have it, and these data came without
            continue
        chosen = compose([f"gpu={gpu}", f"loader={loader}", f"memory={memory}"]) if rows == [] else None
        config = dataclasses.replace(
            base.config, gpu=group("gpu", gpu), loader=group("loader", loader), memory=group("memory", memory)
        )
        choices = {**base.choices, "gpu": gpu, "loader": loader, "memory": memory}
        if chosen is not None:
            assert chosen.config == config, "groups may be put together apart"
        plan = planned(name, dataclasses.replace(base, config=config, choices=choices))
        values = " ".join(str(plan.knobs[knob].value) for knob in SECRET_SHOWN)
        fits = "fits" if plan.misfit is None else "DOES NOT FIT"
        rows.append(f"{gpu} {loader} {memory}: {values}; {plan.predicted_peak_gib:.3f} GiB, {fits}")
    check(f"all_{name}", "\n".join([f"gpu loader memory: {' '.join(SECRET_SHOWN)}; peak", *rows]) + "\n")


def group(name, option, known={}):  # noqa: B006  composed once
    if (name, option) not in known:
        known[name, option] = getattr(compose([f"{name}={option}"]).config, name)
    return known[name, option]


GUIDE = {  # GiB, lowest and highest, as the published guide counts them for one GPU
    "parameters": (0.51, 0.57),  # GPT-2 base, embeddings, MLP
    "gradients": (0.51, 0.57),
    "optimizer state": (1.02, 1.14),
    "feature table": (0.0024, 0.0024),  # 10,000 rows of 64 floats
    "activations": (0.1, 0.2),
}
WHY = {
    "optimizer state": "Adam keeps nothing for what is frozen",
    "feature table": "rows as GPT-2 gives them, 768 wide",
    "gradients": "the encoder is frozen where its rows are cached: gradients of the towers alone",
    "activations": "256 triplets a device and a small MLP: GPT-2 does not run in a step",
    "gradient buckets": "DDP's, which the guide leaves out",
    "inputs": "three rows of ids a triplet, three batches on the device",
}


def test_the_guides_recommender_stands_beside_ours():
    """GPT-2 base, 8 devices, 2048 triplets, cached: 2.5-3 GB there."""
    composed = compose(["gpu=8gb", "memory=cache", "trainer.devices=8"])
    facts, _ = with_cards(H200, "8gb", 7.2, 8)
    plan = planned("recsys_gpt2", composed, facts)
    assert plan.misfit is None
    footprint = estimate_of("recsys_gpt2")("cache", False)
    shape = StepShape(256, plan.loader.device_prefetch, 8)
    step = predicted_peak(dataclasses.replace(footprint, filling=0), 256, shape)
    lines = [f"{'part of a step':<22} {'guide, GiB':>10} {'ours':>10}  why they differ"]
    for name in dict.fromkeys([*GUIDE, *step.parts]):
        low, high = GUIDE.get(name, (None, None))
        guide = "-" if low is None else f"{low:g}" if low == high else f"{low:g}-{high:g}"
        lines.append(f"{name:<22} {guide:>10} {show_bytes(step.parts.get(name, 0)):>10}  {WHY.get(name, '')}".rstrip())
    lines.append(f"{'all of a step':<22} {'2.5-3':>10} {show_bytes(step.tensor_bytes):>10}  tensors")
    highest = show_bytes(plan.predicted_peak_gib * 2**30)
    lines.append(f"{'highest of the run':<22} {'':>10} {highest:>10}  {plan.peak_moment}")
    check("guide_recsys_memory", "\n".join(lines) + "\n")
    assert 0.5 < plan.predicted_peak_gib < 1.0
