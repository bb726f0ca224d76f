from tests.fake_nvml.driver import NOT_SUPPORTED, FakeGpu, FakeMig, Lost, Scenario
from tests.kit.watched import h200, until
from wellfed.observe.telemetry.series import HOST
from wellfed.watch.monitor import Monitor
from wellfed.watch.screens import plain_line
from wellfed.watch.seen_gpus import FoundGpus, find_gpus


def test_gpus_and_host_are_read_and_summed_up(fake_driver):
    scenario = Scenario([h200("GPU-1", power_limit_w=700, processes=[(4711, 5.0, "/bin/train")]), h200("GPU-2")])
    taken = []
    with fake_driver.load(scenario) as driver:
        monitor = Monitor(find_gpus(), interval_s=0.1)
        monitor.add_receiver(taken.extend)
        with monitor:
            until(lambda: all(monitor.board.curve(gpu)[0].size >= 3 for gpu in (0, 1, HOST)))
        assert driver.num_users() == 0
    assert monitor.new_lines() == [
        "GPU 0 NVIDIA H200, 140.5 GiB",
        "GPU 1 NVIDIA H200, 140.5 GiB",
        "GPU 0 is used by train (pid 4711, 5,120 MiB)",
    ]
    assert monitor.new_lines() == []
    assert {one.gpu for one in taken} == {0, 1, HOST}
    summary = monitor.summary()
    assert "GPU 0 NVIDIA H200: utilisation 60 % on average: room left." in summary
    assert any(line.startswith("  power: mean 350 W, peak 350 of 700 W; ") for line in summary)
    assert any(line.startswith("  CPU: mean ") for line in summary)
    assert plain_line(monitor.board, monitor.time_s()).startswith("gpu0 util 60 %, ")


def test_what_happens_to_a_gpu_is_told(fake_driver):
    gone = h200("GPU-1", lost=Lost(from_s=50))
    lacks = h200(
        "GPU-2", errors={"nvmlDeviceGetTemperature": NOT_SUPPORTED, "nvmlDeviceGetTemperatureV": NOT_SUPPORTED}
    )
    with fake_driver.load(Scenario([gone, lacks])) as driver, Monitor(find_gpus(), interval_s=0.1) as monitor:
        until(lambda: monitor.board.latest(0) and monitor.board.latest(1))
        driver.advance(60)
        told = []
        until(lambda: told.extend(monitor.new_lines()) or any("GPU 0 is lost" in line for line in told))
    assert "GPU 1 does not offer temp_c (not supported by this device)." in told
    assert any(line.startswith("GPU 0 is lost: NVML ") for line in told)


def test_a_process_that_comes_later_is_named_by_the_memory_it_takes(fake_driver, monkeypatch):
    monkeypatch.setattr("wellfed.observe.telemetry.sampler.SLOW_S", 0.2)
    busy = Scenario([h200("GPU-1", used_gib=9, processes=[(4711, 8.5, "/bin/train")])])
    told = []
    with (
        fake_driver.load(Scenario([h200("GPU-1", used_gib=0)])) as driver,
        Monitor(find_gpus(), interval_s=0.1) as monitor,
    ):
        until(lambda: monitor.board.latest(0))
        driver.switch(busy)
        until(lambda: told.extend(monitor.new_lines()) or any("is used by" in line for line in told))
    assert told[-1] == "GPU 0 is used by train (pid 4711, 8,704 MiB)"


def test_an_instance_is_watched_beside_its_card(fake_driver):
    card = FakeGpu("GPU-1", gpm=True, util=70, mig=[FakeMig("MIG-1", util=40, used_gib=3)])
    with fake_driver.load(Scenario([card])), Monitor(find_gpus(), interval_s=0.1) as monitor:
        until(lambda: monitor.board.curve(1)[0].size)
    assert "gpu1 SM 40 %, memory 3.0/16.0 GiB" in plain_line(monitor.board, monitor.time_s())


def test_without_gpus_the_host_is_watched():
    with Monitor(FoundGpus((), "library not found"), interval_s=0.1) as monitor:
        until(lambda: monitor.board.curve(HOST)[0].size)
    assert monitor.new_lines() == []
    assert "GPU utilisation is unknown (NVML: library not found)." in monitor.summary()
