"""Any list of overrides composes, or is told what is wrong with it: no other exception reaches the user."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from wellfed.config.compose import compose
from wellfed.config.faults.find_faults import find_faults
from wellfed.config.hydra_session import open_hydra
from wellfed.config.knobs import FREE_NODES, all_knobs
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIONS = {
    folder.name: [file.stem for file in folder.glob("*.yaml")] for folder in CONFIGS.iterdir() if folder.is_dir()
}
KNOBS = [*all_knobs(RunConfig)]
NAMES = [
    *KNOBS,
    *OPTIONS,
    *FREE_NODES,
    *(f"{node}._target_" for node in FREE_NODES),
    *(f"{knob}.more" for knob in KNOBS[::7]),
    *("workload.schedule._target_", "workload.schedule.gamma", "callbacks.ema.decay", "callbacks.ema"),
    *("workload.data.scale", "workload.model.dim", "workload.optimizer.betas[0]", "loader.skip_ids[0].x"),
    *("hydra.run.dir", "hydra/launcher", "hydra.job.name", "hydra", "no_such", "gpu@loader", "loader@gpu.x", ""),
]
FITTING = [*[name for name, options in OPTIONS.items() if options] * 3, *KNOBS]
"""Names whose options, or often whose plain values, compose."""
PLAIN = ("auto", "null", "true", "false", "1", "2", "8", "0.5")
INTERPOLATIONS = ("${.}", "${..}", "${...}", "${}", "${", "${seed}", "${.seed}", "${..seed}", "${a b}", "${oc.env:X}")
INTERPOLATIONS += ("${oc.env:HOME}", "${oc.env:}", "${now:%Y}", "${hydra:runtime.cwd}", "${no:such}", "${${seed}}")
INTERPOLATIONS += ("${gpu}", "${workload.model}", "${loader.num_workers}", "x${.}y", "${oc.decode:'['}", "${[0]}")
WORDS = ["null", "true", "1", "-1", "0", "1e400", "nan", "1.5", "x", "", "???", "é", "a b", "*", "~", "@", "a=b"]
WORDS += ["1,2", "range(3)", "choice(a,b)", "glob(*)", "int(1)", "[]", "{}", "[1,2]", "[null]", "{a: 1}", "[[1],{}]"]
WORDS += ["'q'", "'", '"', "[", "}", "(", "$", "\\", "[{a: 0}]", "{_target_: torch.nn.Linear}", "[{_target_: 3}]"]
WORDS += ["0x1f", "1_0", "\x00", "\u200b", "\ud800"]


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """One override: one that may well fit, or else a name that the schema has or nearly has, a sign, and any value."""
    if draw(st.booleans()):
        name = draw(st.sampled_from(FITTING))
        return f"{name}={draw(st.sampled_from(OPTIONS.get(name, PLAIN)))}"
    name = draw(st.sampled_from(NAMES) | st.text(st.sampled_from("abgpu._/@[]0-é "), max_size=8))
    options = OPTIONS.get(name, ["auto"])
    value = draw(st.sampled_from([*INTERPOLATIONS, *WORDS, *options]) | st.text(max_size=8))
    if draw(st.integers(0, 5)) == 0:
        value += draw(st.sampled_from([*INTERPOLATIONS, *WORDS]))
    sign = draw(st.sampled_from(["", "", "", "", "", "", "", "+", "++", "~", "+~"]))
    return sign + name + draw(st.sampled_from(["=", "=", "=", "=", ""])) + value


@st.composite
def axes(draw: st.DrawFn) -> str:
    """An override of a multirun: often with several values."""
    return draw(overrides()) + draw(st.sampled_from(["", ",", ",1", ",auto", ",choice(a,b)", ",[{a: 1}]", ",${.}"]))


@pytest.mark.slow
@examples(125)
@given(st.lists(overrides(), min_size=1, max_size=3))
def test_every_list_composes_or_is_told(typed: list[str]) -> None:
    try:
        composed = compose(typed)
    except ConfigError:
        return
    assert composed.yaml()


@pytest.mark.slow
@examples(50)
@given(st.lists(axes(), min_size=1, max_size=3))
def test_the_faults_of_a_multirun_are_found_in_every_list(typed: list[str]) -> None:
    loader = open_hydra().config_loader
    assert find_faults(loader, "train", typed, ValueError("did not compose"), multirun=True)
