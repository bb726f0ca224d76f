"""The simulated machine: which cards a process sees, lost ones, other processes, and what NVML can read of it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.end_to_end.commands import start_warm
from tests.fake_cuda.machine import Cards, FakeCuda, machine_environment
from tests.fake_cuda.shared_state import MachineState
from tests.fake_nvml.driver import FakeDriver
from tests.kit.watched import until

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

MIB = 1 << 20
TIMEOUT_S = 100


@pytest.fixture
def start(fake_cuda: FakeCuda, tmp_path: Path) -> Callable[..., Any]:
    """``start(code, *arguments, cards=2, ...)`` runs Python code on a machine of its own; ``.communicate`` ends it."""

    def start(code: str, *arguments: str, visible: str | None = None, **cards: Any) -> Any:
        script = tmp_path / f"{hash(code)}.py"
        script.write_text(code)
        more = fake_cuda.environment(**cards) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        return start_warm(script, *arguments, cwd=tmp_path, **more)

    return start


@pytest.mark.simulated(cards=4)
@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ("2", [2]),
        ("3,1", [3, 1]),
        ("0,9,1", [0]),
        ("GPU-aaaa1111-0000-0000-0000-000000000002", [1]),
        ("", []),
        ("-1", []),
        (None, [0, 1, 2, 3]),
    ],
)
def test_visible_devices_choose_cards(asked: str | None, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_cuda

    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert fake_cuda.visible_cards() == seen


def test_a_process_has_the_cards_that_are_visible(start: Callable[..., Any]) -> None:
    code = (
        "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(),"
        " [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())])"
    )
    for visible, said in {"1": "True 1 ['aaaa1111-0000-0000-0000-000000000002']", "": "False 0 []"}.items():
        out, err = start(code, visible=visible, cards=2).communicate(timeout=TIMEOUT_S)
        assert out.strip() == said, err


@pytest.mark.simulated
def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        torch.ones(1, device="cuda:1")
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(1)


@pytest.mark.simulated(cards=2, lost_after="1:3")
def test_a_lost_card_fails_from_then_on() -> None:
    held = torch.ones(2, device="cuda:1")
    event = torch.cuda.Event()
    for _ in range(2):
        held += 1
    with pytest.raises(torch.AcceleratorError, match="CUDA error: unspecified launch failure") as caught:
        held += 1
    assert caught.value.error_code == 719
    for call in (
        held.tolist,
        held.cpu,
        lambda: torch.empty(1, device="cuda:1"),
        lambda: torch.cuda.synchronize(1),
        lambda: torch.cuda.mem_get_info(1),
        lambda: torch.cuda.Stream("cuda:1"),
        lambda: event.record(torch.cuda.default_stream("cuda:1")),
        lambda: torch.cuda.default_stream("cuda:1").query(),
    ):
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            call()
    assert torch.ones(2, device="cuda:0").sum() == 2


@pytest.mark.simulated
def test_launches_to_a_loss_are_written_by_card() -> None:
    import fake_cuda

    assert fake_cuda.lost_after("", 2) == [-1, -1]
    assert fake_cuda.lost_after("7", 2) == [7, 7]
    assert fake_cuda.lost_after("1:5,2:0", 3) == [-1, 5, 0]


@pytest.mark.simulated
def test_a_forked_child_can_not_use_the_cards() -> None:
    torch.ones(2, device="cuda")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="cuda")
        except Exception as error:  # noqa: BLE001  told to the parent
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"Cannot re-initialize CUDA in forked subprocess" in os.read(reader, 10_000)


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.ones(1, device="cuda")
    for context in ("fork", "spawn"):
        loader = DataLoader(
            TensorDataset(torch.arange(8.0)), 4, num_workers=1, pin_memory=True, multiprocessing_context=context
        )
        total = 0.0
        for (batch,) in loader:
            assert batch.is_pinned()
            total += batch.to("cuda", non_blocking=True).sum().item()
        assert total == 28
    print("fed")
"""


def test_worker_processes_feed_pinned_batches(start: Callable[..., Any]) -> None:
    out, err = start(LOADER).communicate(timeout=TIMEOUT_S)
    assert out.strip() == "fed", err


HOLDS = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
open("holds", "w").close()
time.sleep(float(sys.argv[2]))
"""


def test_processes_share_a_cards_memory(start: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "machine"
    kind: dict[str, Any] = {"state": state, "mib": 1000, "context_mib": 50}
    first = start(HOLDS, "600", str(TIMEOUT_S), **kind)
    try:
        until((tmp_path / "holds").exists)
        _, err = start(HOLDS, "400", "0", **kind).communicate(timeout=TIMEOUT_S)
        assert "of which 300.00 MiB is free" in err
        assert f"Process {first.pid} has 650.00 MiB memory in use. Including non-PyTorch memory, this process" in err
        assert MachineState(state).processes(card=0) == {first.pid: 600 * MIB}
    finally:
        first.send_signal(signal.SIGKILL)
    until(lambda: not psutil.pid_exists(first.pid) or psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE)
    _, err = start(HOLDS, "900", "0", **kind).communicate(timeout=TIMEOUT_S)  # what a killed process held is free again
    assert err == ""
    first.communicate(timeout=TIMEOUT_S)
    assert MachineState(state).processes(card=0) == {}


def test_a_lost_card_is_lost_for_all(start: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "machine"
    code = "import torch; torch.ones(1, device='cuda:0'); torch.ones(1, device='cuda:1')"
    for lost_after in ("1:0", ""):
        _, err = start(code, cards=2, state=state, lost_after=lost_after).communicate(timeout=TIMEOUT_S)
        assert "unspecified launch failure" in err
    assert [MachineState(state).is_lost(card) for card in range(2)] == [False, True]


BUSY = """
import time, torch
from fake_cuda import driver
host = torch.ones(1 << 20).pin_memory()
for card in range(2):
    torch.ones(1, device=f"cuda:{card}")
    torch.cuda.synchronize(card)
began_ns = time.monotonic_ns()
card = host.to("cuda", non_blocking=True)
for _ in range(40):
    card.add_(0)  # lag behind: 5 ms each
back = card.cpu()
torch.cuda.synchronize()
half_ns = time.monotonic_ns()
time.sleep(0.2)
ended_ns = time.monotonic_ns()
print(began_ns, half_ns, ended_ns, driver.busy_ns(0, began_ns, ended_ns), driver.busy_ns(1, began_ns, ended_ns))
"""


def test_busy_time_and_copied_bytes_are_those_of_the_card(start: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "machine"
    out, err = start(BUSY, cards=2, kernel_us=5000, state=state).communicate(timeout=TIMEOUT_S)
    assert err == ""
    began_ns, half_ns, ended_ns, busy_ns, other_ns = map(int, out.split())
    assert 0.2e9 < busy_ns < half_ns - began_ns + 2e6
    assert other_ns < 1e6  # of the millisecond in which its first kernel ended
    machine = MachineState(state)
    assert abs(machine.busy_ns(0, began_ns, ended_ns) - busy_ns) < 2e6
    assert machine.busy_ns(0, half_ns + 2_000_000, ended_ns) == 0
    assert machine.total(0, "busy_ns") >= busy_ns - 2e6
    assert machine.total(0, "to_card_bytes") == machine.total(0, "to_host_bytes") == 4 * MIB
    assert machine.total(0, "num_launches") >= 42
    assert machine.processes(card=0) == {}  # it has ended


ENERGY = """
import time, pynvml, torch
held = torch.ones(1, device="cuda")
torch.cuda.synchronize()
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
energy_mj, began_s = -pynvml.nvmlDeviceGetTotalEnergyConsumption(card), time.monotonic()
held += 1  # takes a second, of which next to nothing has passed
energy_mj += pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
print(energy_mj, 1e3 * (time.monotonic() - began_s))
torch.cuda.synchronize()
time.sleep(0.01)  # figures are those of whole milliseconds
print(pynvml.nvmlDeviceGetTotalEnergyConsumption(card))
"""


def test_energy_is_of_what_the_card_has_done(tmp_path: Path, fake_cuda: FakeCuda, fake_driver: FakeDriver) -> None:
    (tmp_path / "energy.py").write_text(ENERGY)
    machine = machine_environment(fake_driver, tmp_path, Cards(kernel_us=1_000_000))
    out, err = start_warm(tmp_path / "energy.py", cwd=tmp_path, **machine).communicate(timeout=TIMEOUT_S)
    assert err == ""
    at_once_mj, at_once_ms, later_mj = map(float, out.split())
    assert at_once_mj <= 350 * (at_once_ms + 2)  # 350 W, to a millisecond at both ends
    assert later_mj > 350 * 1000


@pytest.mark.simulated(kernel_us=20_000)
def test_streams_that_run_at_once_count_once() -> None:
    import fake_cuda

    held = [torch.ones(1, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    began_ns = time.monotonic_ns()
    for tensor in held:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                tensor.add_(1)
    assert fake_cuda.driver.busy_ns(0, began_ns, began_ns + 10**9) < 0.15e9  # 100 ms each, side by side
    torch.cuda.synchronize()
    assert fake_cuda.driver.busy_ns(0, began_ns, time.monotonic_ns()) > 0.1e9


def test_a_state_of_something_else_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not a machine")
    _, err = start("import torch", state=other).communicate(timeout=TIMEOUT_S)
    assert f"FAKE_CUDA_STATE={other}: Invalid argument" in err
    assert other.read_text() == "not a machine"
