"""Footprints made up for tests: a model of some size whose activations grow in a line."""

from wellfed.plan.predict.peak import Footprint, Point

MIB = 2**20


def footprint(
    mode=None, checkpointed=False, *, parameters=200 * MIB, per_sample=10 * MIB, table=0, fixed=0, encoder=0, **more
):
    """``encoder``: bytes a sample that only ``dynamic`` needs; ``table``: held on the device by ``cache`` alone."""
    each = per_sample // (4 if checkpointed else 1) + (encoder if mode == "dynamic" else 0)
    points = tuple(Point(size, fixed + each * size, parameters, fixed + each * size) for size in (1, 8, 64))
    given = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer_state": 2 * parameters,
        "optimizer_temporaries": 0,
        "feature_table": table if mode == "cache" else 0,
        "filling": 0,
        "inputs": (),
        "points": points,
    }
    return Footprint(**{**given, **more})


def estimate(**sizes):
    """An estimate that answers every mode, with and without checkpointing."""
    return lambda mode, checkpointed: footprint(mode, checkpointed, **sizes)
