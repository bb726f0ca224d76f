"""What every workload of this project must hold, new ones too."""

from __future__ import annotations

from wellfed.testing import WorkloadContract


class TestWorkloads(WorkloadContract):
    """Plans, trains and describes each workload of configs/workload; composes each experiment."""
