"""A figure has one wording, wherever it is shown."""

from pathlib import Path

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.comparison import Comparison
from wellfed.explain.report.figures import FIGURES, figures_of, utilisation
from wellfed.explain.report.last_screen import last_lines
from wellfed.explain.report.run_digest import digest
from wellfed.explain.report.run_page import tiles
from wellfed.explain.report.write import to_markdown
from wellfed.record.entries import RunRecord


def on_card() -> Evidence:
    found = evidence(
        wait_ms=80.0,
        copy_ms=2.0,
        compute_ms=17.0,
        host_ms=1.0,
        ceiling=5.0,
        readiness_frac=0.25,
        gpus={"0": {"util_pct": {"mean": 3.0, "p5": 0.0, "p95": 9.0}, "power_w": {"mean": 69.0}}},
        memory={"device": "card", "budget_gib": 21.6, "measured_peak_gib": 0.5},
        host={"cpu_pct": 20.0, "rss_gib": 1.0},
    )
    assert found.record.time is not None
    found.record.time |= {"forward_frac": 0.05, "backward_frac": 0.1, "optimizer_frac": 0.01}
    found.record.gpus["0"]["energy_per_sample_j"] = 0.5
    return found


def test_every_figure_is_the_same_in_reports_comparisons_and_tiles() -> None:
    found = on_card()
    figures = figures_of(found.record)
    assert figures.keys() == FIGURES.keys()
    report, compared = to_markdown(found.record), Comparison(found, on_card()).figures
    for key, figure in figures.items():
        assert key in ("power", "energy") or figure.shown in report, key
        assert (figure.label, [figure.shown] * 2) in [(one.name, one.shown) for one in compared]
    assert [tile.label for tile in tiles(found.record)] == ["rate", "of the ceiling", "GPU", "wait", "memory"]
    assert figures["rate"].text in digest(Path("a/runs/b"), found.record).cells


def test_a_rate_above_its_ceiling_is_no_share_of_what_is_possible() -> None:
    line = figures_of(evidence(ceiling=0.8).record)["of_ceiling"].line
    assert line.startswith("of the ceiling: 125.0 % of ")
    assert line.endswith(" without loading")


def test_the_screen_has_the_texts_of_the_figures(tmp_path: Path) -> None:
    found = on_card()
    figures = figures_of(found.record)
    screen = "\n".join(line.plain for line in last_lines(found, tmp_path, None))
    for key in (
        "rate",
        "of_ceiling",
        "ready",
        "wait",
        "compute",
        "copy",
        "host",
        "step",
        "gpu",
        "memory",
        "power",
        "cpu",
    ):
        assert figures[key].text in screen, key


def test_what_was_not_measured_is_no_figure() -> None:
    assert figures_of(RunRecord("r")) == {}
    on_cpu = evidence(gpus={"0": {"util_pct": {"mean": 50.0}}}).record
    assert not {"gpu", "power", "energy", "copy"} & figures_of(on_cpu).keys()


def test_several_cards_have_a_range_and_the_mean_for_ratios() -> None:
    figure = utilisation([90.0, 60.0])
    assert (figure.label, figure.text, figure.colour) == ("2 GPUs", "60-90 %", "yellow")
    assert figure.estimate is not None
    assert figure.estimate.value == 75
