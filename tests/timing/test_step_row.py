from wellfed.timing.step_row import StepRow


def row(**changes):
    facts = {"step": 1, "time_s": 0, "epoch": 0, "samples": 8, "micro_batch": 8, "num_micro": 1, "wait_ms": 1,
             "copy_ms": 2, "compute_ms": 4, "host_ms": 8, "asked_wait_ms": 1}  # fmt: skip
    return StepRow(**{**facts, **changes})


def test_a_step_is_the_sum_of_its_shares():
    assert row().step_ms == 15
    assert row(copy_ms=None).step_ms == 13


def test_ready_is_a_twentieth_of_a_millisecond_or_a_hundredth_of_the_step():
    assert row(asked_wait_ms=0.05).ready
    assert not row(asked_wait_ms=0.16).ready  # 1 % of 15 ms is 0.15
    assert row(asked_wait_ms=0.15).ready
    assert row(wait_ms=0, asked_wait_ms=0.05, copy_ms=None, compute_ms=0, host_ms=0).ready
