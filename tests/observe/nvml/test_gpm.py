from contextlib import ExitStack

import pytest

from tests.fake_nvml.driver import (
    DRAM_ACTIVE,
    NO_DATA,
    NO_PERMISSION,
    NOT_SUPPORTED,
    PCIE_RX,
    PCIE_TX,
    SM_ACTIVE,
    SM_OCCUPANCY,
    TENSOR_ACTIVE,
    UNKNOWN,
    FakeGpu,
    FakeMig,
    Scenario,
    Wave,
)
from wellfed.observe.nvml.gpm import FIGURES, Gpm
from wellfed.observe.nvml.readings import OpenDevice
from wellfed.observe.nvml.session import NvmlError, NvmlSession


class Watched:
    """A Gpm on a clock that only the test turns."""

    def __init__(self, driver, nvml, uuid, is_mig):
        self.driver, self.now_s = driver, 7.0
        self.device = OpenDevice(uuid, nvml)
        self.gpm = Gpm(self.device, is_mig=is_mig, now_s=lambda: self.now_s)

    def later(self, seconds=1.0):
        self.driver.advance(seconds)
        self.now_s += seconds
        return self.gpm.read()

    def begin(self):
        with pytest.raises(NvmlError, match="no data"):
            self.gpm.read()


@pytest.fixture
def watch(fake_driver):
    """``watch(gpu)``; at the end no sample may be left with the driver."""
    with ExitStack() as stack:

        def begin(gpu, uuid=None, driver=fake_driver, *, is_mig=False, **options):
            loaded = stack.enter_context(driver.load(Scenario([gpu], **options)))
            watched = Watched(loaded, stack.enter_context(NvmlSession()), uuid or gpu.uuid, is_mig)

            def end():
                watched.gpm.close()
                assert loaded.num_gpm_samples() == 0
                watched.gpm.close()

            stack.callback(end)
            return watched

        yield begin


def test_figures_in_our_units(watch):
    scales = {SM_ACTIVE: 0.9, SM_OCCUPANCY: 0.5, TENSOR_ACTIVE: 0.25, DRAM_ACTIVE: 0.75, PCIE_TX: 1, PCIE_RX: 1}
    gpu = FakeGpu(gpm=True, util=80, gpm_scales=scales, pcie_rx_kb_s=5_000_000, pcie_tx_kb_s=250_000)
    watched = watch(gpu)
    watched.begin()
    assert watched.later() == pytest.approx(
        {
            **{"sm_active_pct": 72, "sm_occupancy_pct": 40, "tensor_active_pct": 20, "dram_active_pct": 60},
            **{"pcie_rx_mb_s": 5000, "pcie_tx_mb_s": 250},
        }
    )


def test_figures_are_means_since_the_reading_before(watch):
    watched = watch(FakeGpu(gpm=True, util=Wave(4.0, 0.5, 0, 100)))
    watched.begin()
    assert watched.later(8.0)["sm_active_pct"] == pytest.approx(50, abs=2)
    found = [watched.later(2.0)["sm_active_pct"] for _ in range(4)]
    assert found == [pytest.approx(mean, abs=10) for mean in (100, 0, 100, 0)]
    assert watched.driver.num_gpm_samples() == 2


@pytest.mark.parametrize(
    ("gpu", "error"),
    [
        (FakeGpu(gpm=False), "nvmlGpmQueryDeviceSupport: not supported"),
        (FakeGpu(gpm=True, errors={"nvmlGpmSampleGet": NOT_SUPPORTED}), "nvmlGpmSampleGet: not supported"),
        (FakeGpu(gpm=True, errors={"nvmlGpmSampleGet": NO_PERMISSION}), "nvmlGpmSampleGet: no permission"),
        (FakeGpu(gpm=True, errors={"nvmlGpmSampleGet": UNKNOWN}), "nvmlGpmSampleGet: unknown error"),
    ],
)
def test_what_is_refused_is_raised(watch, gpu, error):
    watched = watch(gpu)
    for _ in range(3):
        with pytest.raises(NvmlError, match=error):
            watched.later()
    assert watched.driver.num_gpm_samples() in (0, 2)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_DATA])
def test_a_metric_that_is_refused_is_left_out(watch, code):
    watched = watch(FakeGpu(gpm=True, util=50, gpm_errors={TENSOR_ACTIVE: code}))
    watched.begin()
    assert set(watched.later()) == set(FIGURES) - {"tensor_active_pct"}


def test_an_instance_is_asked_of_its_card(watch):
    instances = [FakeMig("MIG-1", gpu_instance_id=3, util=10), FakeMig("MIG-2", gpu_instance_id=5, util=70)]
    watched = watch(FakeGpu(gpm=True, util=99, mig=instances), "MIG-2", is_mig=True)
    watched.begin()
    assert watched.later()["sm_active_pct"] == pytest.approx(70)
