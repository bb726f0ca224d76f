"""Every workload that there is, your own among them: what `wellfed.testing` holds, and a card beside the code."""

import pytest
import yaml

from wellfed import project
from wellfed.testing import WorkloadContract

OPTIONS = sorted((project.root() / "configs" / "workload").glob("*.yaml"), key=lambda path: path.stem)


QUICK = ("hyperspectral", "recsys")


@pytest.mark.slow
class TestOtherWorkloads(WorkloadContract):
    """Workloads that take longer, and your own."""

    workloads = tuple(option.stem for option in OPTIONS if option.stem not in QUICK)
    experiments = ()


class TestWorkloads(WorkloadContract):
    """Workloads that are built in a moment, all experiments and all cards."""

    workloads = QUICK

    @pytest.mark.parametrize("option", OPTIONS, ids=lambda path: path.stem)
    def test_it_has_a_card(self, option):
        module = yaml.safe_load(option.read_text())["model"]["_target_"].split(".")
        card = project.sources().joinpath(*module[:-2], "README.md")
        assert card.read_text(encoding="utf-8").startswith(f"# {option.stem}")
