import pytest

from wellfed.observe.telemetry.run_progress import Progress


@pytest.fixture
def edges():
    """A progress, and its edges as (phase left, phase that shows then)."""
    progress, found = Progress(), []
    progress.on_edge = lambda left: found.append((left, progress.phase))
    return progress, found


def test_a_run_starts_at_its_step_in_start():
    assert (Progress().step, Progress(7).step, Progress().phase) == (0, 7, "start")


def test_edges_are_where_training_begins_and_ends(edges):
    progress, found = edges
    for phase in ["start", "ceiling", "train", "validate", "train", "checkpoint", "validate", "test", "start", "test"]:
        progress.enter(phase)
        assert progress.phase == phase
    # The phase that is over still shows: a reading that comes in between counts to it too.
    assert found == [("ceiling", "ceiling"), ("validate", "validate")]


def test_a_phase_for_the_length_of_a_block(edges):
    progress, found = edges
    progress.enter("train")
    found.clear()
    with progress.during("validate"), progress.during("checkpoint"):
        assert progress.phase == "checkpoint"
    assert (progress.phase, found) == ("train", [])
    with progress.during("test"):
        assert progress.phase == "test"
    assert (progress.phase, found) == ("train", [("train", "train"), ("test", "test")])


def test_the_time_in_each_phase_is_counted_and_how_often_it_came():
    now_s = [1.0]
    progress = Progress(time_s=lambda: now_s[0])

    def pass_s(seconds):
        now_s[0] += seconds

    pass_s(2)
    progress.enter("train")
    pass_s(3)
    for _ in range(2):
        progress.enter("validate")
        pass_s(1)
        with progress.during("checkpoint"):
            pass_s(0.5)
        progress.enter("train")
    pass_s(4)
    spent = progress.spent()
    assert spent["start"] == (2, 0)
    assert spent["train"][0] == 7
    assert spent["validate"] == (2, 2)
    assert spent["checkpoint"] == (1, 2)
