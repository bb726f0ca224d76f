import copy
import os
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tests.config.test_quoting import read_by_hydra
from tests.kit.composed import compose
from wellfed.config.quoting import key_value
from wellfed.errors import ConfigError
from wellfed.record.entries import RunRecord
from wellfed.run.folder.resume import Target, check_unchanged, expand, latest_checkpoint, locate


def checkpoint(path, *, cut=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"global_step": 3, "state_dict": {"w": torch.zeros(50)}}
    torch.save(state, path)
    if cut:
        path.write_bytes(path.read_bytes()[:-200])
    return path


def run(folder, *, status="failed", overrides=("seed=5",), checkpoints=("last",), cut=(), **facts):
    """A run folder as a run leaves it."""
    folder.mkdir(parents=True)
    record = RunRecord.start(folder.name)
    record.status, record.overrides = status, list(overrides)
    for name, value in facts.items():
        setattr(record, name, value)
    record.write(folder)
    for name in checkpoints:
        checkpoint(folder / "checkpoints" / f"{name}.ckpt", cut=name in cut)
    return folder


def message(call, *args, **more):
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    return str(caught.value)


# -- expand -----------------------------------------------------------------------------------------------------------


def test_without_resume_only_quotes_are_added():
    assert expand(["gpu=8gb", "workload.data.path=a b"]) == ["gpu=8gb", "workload.data.path='a b'"]
    assert expand(["resume=null", "rerun=null"]) == ["resume=null", "rerun=null"]


def test_a_run_folder_is_gone_on_with_in_place(tmp_path):
    folder = run(tmp_path / "it's a=b (1)", overrides=["loader=balanced", "seed=5", "workload.data.path='c d'"])
    found = expand([f"resume={folder}", "trainer.max_epochs=9"])
    assert found[:4] == ["loader=balanced", "seed=5", "workload.data.path='c d'", "trainer.max_epochs=9"]
    assert [key_value(text)[0] for text in found[4:]] == ["hydra.run.dir", "resume"]
    assert [read_by_hydra(text) for text in found[4:]] == [str(folder), str(folder)]


def test_later_overrides_replace_earlier_ones_of_the_same_key(tmp_path):
    earlier = [
        "loader=balanced",
        "loader.num_workers=3",
        "+experiment=a",
        "gpu@x=8gb",
        "resume=old",
        "rerun=old",
        "seed=5",
    ]
    folder = run(tmp_path / "run", overrides=earlier)
    found = expand([f"resume={folder}", "loader=aggressive", "++loader.num_workers=1", "experiment=b"])
    assert found[:5] == ["gpu@x=8gb", "seed=5", "loader=aggressive", "++loader.num_workers=1", "experiment=b"]
    assert [text for text in found if text.startswith(("rerun", "resume"))] == [f"resume={folder}"]


def test_a_checkpoint_elsewhere_brings_its_runs_overrides_and_a_new_folder(tmp_path):
    folder = run(tmp_path / "run")
    path = folder / "checkpoints" / "last.ckpt"
    assert expand([f"resume={path}"]) == ["seed=5", f"resume={path}"]
    lone = checkpoint(tmp_path / "elsewhere" / "deep" / "x.ckpt")
    assert expand([f"resume={lone}", "seed=2"]) == ["seed=2", f"resume={lone}"]


def test_rerun_replays_the_overrides(tmp_path):
    folder = run(tmp_path / "a b", overrides=["seed=5", "loader=balanced"], status="ok", checkpoints=())
    assert expand([f"rerun={folder}", "seed=6"]) == ["loader=balanced", "seed=6", f"rerun='{folder}'"]
    assert "there is no such file or folder" in message(expand, [f"rerun={tmp_path / 'none'}"])
    alone = checkpoint(tmp_path / "alone.ckpt")
    assert f"rerun={alone}: is no run folder." in message(expand, [f"rerun={alone}"])
    assert expand([f"resume={alone}"]) == [f"resume={alone}"]


def test_a_run_is_named_by_its_name_a_beginning_or_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = Path("logs", "recsys", "runs")
    older = run(tmp_path / runs / "2026-01-01_00-00-00_aaaa", overrides=["seed=5"])
    run(tmp_path / runs / "2026-02-01_00-00-00_bbbb", overrides=["seed=6"])
    far = run(tmp_path / "far" / "recsys" / "runs" / "mine", overrides=["seed=7"])
    assert expand(["rerun=last"])[0] == "seed=6"
    assert "Taking the newest run: logs/recsys/runs/2026-02-01_00-00-00_bbbb" in capsys.readouterr().err
    assert expand(["rerun=2026-01"]) == ["seed=5", f"rerun={runs / older.name}"]  # other ranks read the path
    assert expand([f"resume={older.name}", "seed=9"])[-1] == f"resume={runs / older.name}"
    assert expand(["resume=mine", "paths.log_dir=far"])[-1] == "resume=far/recsys/runs/mine"
    assert far.is_dir()
    found = message(expand, ["rerun=2026"])
    assert "rerun=2026: may be any of 2 folders. Write one: " in found
    found = message(expand, ["resume=min"])
    assert "resume=min: is neither the folder nor the name of a run in logs." in found


def test_resume_and_rerun_together_are_left_to_the_rules(tmp_path):
    assert expand(["resume=a", "rerun=b"]) == ["resume=a", "rerun=b"]


def test_a_running_run_is_expanded_and_refused_when_located(tmp_path):
    folder = run(tmp_path / "run", status="running")
    assert expand([f"resume={folder}"])[-1] == f"resume={folder}"
    told = message(locate, folder)
    assert f"resume={folder}: is still running (process {os.getpid()} on " in told


def test_a_run_whose_process_is_dead_is_gone_on_with(tmp_path):
    folder = run(tmp_path / "run", status="running", boot_id="an earlier boot")
    assert locate(folder).earlier.status == "killed"


@pytest.mark.parametrize(
    ("launch", "host", "goes_on"),
    [
        ({"by": "torchrun", "job": "torchrun mine", "attempt": 0}, "elsewhere", True),
        ({"by": "torchrun", "job": "torchrun mine", "attempt": 1}, "elsewhere", False),
        ({"by": "torchrun", "job": "torchrun other", "attempt": 0}, "elsewhere", False),
        ({"by": "torchrun", "job": "torchrun mine", "attempt": 0}, None, False),
        (None, "elsewhere", False),
    ],
    ids=["an attempt before", "this attempt", "another job", "it lives on this machine", "nobody started it"],
)
def test_what_this_is_the_next_attempt_of_is_over(tmp_path, monkeypatch, launch, host, goes_on):
    more = {} if host is None else {"host_name": host}
    folder = run(tmp_path / "run", status="running", launch=launch, **more)
    for name, value in (("TORCHELASTIC_RUN_ID", "mine"), ("RANK", "0"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    if goes_on:
        assert locate(folder).in_place
    else:
        assert "is still running" in message(locate, folder)


# -- values that followed from the data --------------------------------------------------------------------------------

RATE = {"workload.data.sample_rate": {"value": 8000, "because": "all 288 clips have it", "source": "data"}}


def test_values_that_followed_from_the_data_stay_as_they_were(tmp_path):
    before = compose(["workload=speech"])
    folder = run(tmp_path / "run", overrides=["workload=speech"], plan=RATE, config=copy.deepcopy(before.resolved))
    again = expand([f"resume={folder}"])
    assert "workload.data.sample_rate=8000" in again
    now = compose(["workload=speech", "workload.data.sample_rate=8000"])
    check_unchanged(now, RunRecord.read(folder))
    assert expand([f"rerun={folder}"]) == ["workload=speech", f"rerun={folder}"]


def test_only_a_resume_may_begin_to_train_the_encoder(tmp_path):
    frozen, trained = (compose(["workload=recsys", f"workload.model.train_encoder={on}"]) for on in ("false", "true"))
    folders = [
        run(tmp_path / name, config=copy.deepcopy(made.resolved)) for name, made in (("a", frozen), ("b", trained))
    ]
    assert check_unchanged(trained, RunRecord.read(folders[0])) == []
    assert "train_encoder: is False now" in message(check_unchanged, frozen, RunRecord.read(folders[1]))
    with pytest.raises(ConfigError):
        check_unchanged(trained, RunRecord.read(folders[0]), evaluates=True)


# -- resume=auto ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "logs" / "recsys" / "runs"


def auto(runs):
    found = expand(["resume=auto", f"paths.log_dir={runs.parents[1]}"])
    assert found[-1].startswith("resume=") or "resume" not in " ".join(found)
    return Path(read_by_hydra(found[-1])).name if found[-1].startswith("resume=") else None


def test_auto_takes_the_newest_that_did_not_end_well_and_has_a_whole_checkpoint(runs, capsys):
    run(runs / "2026-01-01_00-00-00_aaaa")
    run(runs / "2026-01-02_00-00-00_aaaa", status="interrupted")
    run(runs / "2026-01-03_00-00-00_aaaa", status="ok")
    run(runs / "2026-01-04_00-00-00_aaaa", checkpoints=())
    run(runs / "2026-01-06_00-00-00_aaaa", status="running")
    (runs / "2026-01-07_00-00-00_aaaa").mkdir()
    (runs / "2026-01-08_00-00-00_aaaa").write_text("no folder")
    assert auto(runs) == "2026-01-02_00-00-00_aaaa"
    told = capsys.readouterr().err
    assert f"{runs}/2026-01-06_00-00-00_aaaa is still running (process " in told
    assert f"{runs}/2026-01-04_00-00-00_aaaa has no checkpoint that can be read; going on with " in told


def test_auto_takes_a_killed_run(runs):
    run(runs / "2026-01-01_00-00-00_aaaa", status="running", boot_id="an earlier boot")
    assert auto(runs) == "2026-01-01_00-00-00_aaaa"


def test_auto_without_a_run_starts_afresh_and_says_so(runs, capsys):
    run(runs.parents[1] / "another" / "runs" / "2026-01-01_00-00-00_aaaa")
    assert auto(runs) is None
    assert capsys.readouterr().err == ("resume=auto: no earlier run of this workload to go on from; starting afresh.\n")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def damage(path):
    """As a bad disk leaves it: its ends are whole, the weights are not."""
    data = bytearray(path.read_bytes())
    start = bytes(data).index(torch.zeros(50).numpy().tobytes())
    data[start + 90 : start + 110] = b"\xff" * 20
    path.write_bytes(data)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    names = ("last", "last-1", "last-2", "last-10", "best")
    folder = run(tmp_path / "run", checkpoints=names)
    assert latest_checkpoint(folder) == folder / "checkpoints" / "last.ckpt"
    for number, name in enumerate(names[:-1], start=1):
        damage(folder / "checkpoints" / f"{name}.ckpt")
        target = locate(folder)
        assert target.checkpoint == folder / "checkpoints" / f"{names[number]}.ckpt"
        assert [path.stem for path in target.damaged] == list(names[:number])
    told = message(locate, folder / "checkpoints" / "last.ckpt")
    assert told.endswith("last.ckpt: is not a checkpoint that can be read. Name another, e.g. last-1.ckpt.")
    damage(folder / "checkpoints" / "best.ckpt")
    assert latest_checkpoint(folder) is None
    assert f"has no checkpoint that can be read. Start it again: rerun={folder}" in message(locate, folder)


def test_what_resume_cannot_mean(tmp_path):
    assert "there is no such file or folder" in message(locate, tmp_path / "none")
    assert "is no run folder" in message(locate, tmp_path)
    (tmp_path / "x.ckpt").write_text("text")
    assert "is not a checkpoint that can be read" in message(locate, tmp_path / "x.ckpt")
    (tmp_path / "run.json").write_text('{"schema": 99, "run_id": "x", "status": "ok"}')
    assert "has schema 99" in message(locate, tmp_path)


def test_a_checkpoint_that_was_named(tmp_path):
    folder = run(tmp_path / "run")
    path = folder / "checkpoints" / "last.ckpt"
    found = locate(path)
    assert (found.checkpoint, found.in_place, found.earlier.seed) == (path, False, None)
    of_the_user = checkpoint(folder / "lightning" / "version_0" / "checkpoints" / "epoch=3-step=100.ckpt")
    found = locate(of_the_user)
    assert (found.checkpoint, found.folder, found.earlier.seed) == (of_the_user, folder, None)
    assert expand([f"resume={of_the_user}"]) == ["seed=5", f"resume='{of_the_user}'"]
    lone = checkpoint(tmp_path / "x" / "y" / "z.ckpt")
    assert locate(lone) == Target(lone, False, None)


# -- what must not change ---------------------------------------------------------------------------------------------


def test_another_seed_or_workload_lists_both_values():
    then = compose([]).resolved
    now = compose(["seed=2", "workload.effective_batch_size=512", "workload.optimizer.lr=0.1", "loader=aggressive"])
    told = message(check_unchanged, now, RunRecord("r", config=then))
    assert told.startswith("3 faults")
    assert f"seed: is 2 now and was {then['seed']} in the run to resume. Leave it at {then['seed']}, or start" in told
    assert "workload.effective_batch_size: is 512 now and was 2048" in told
    assert "workload.optimizer.lr: is 0.1 now and was" in told


def test_secrets_of_the_earlier_run_are_named_or_typed_again(tmp_path, capsys):
    folder = run(
        tmp_path / "a", overrides=["seed=5", "+workload.data.api_key='***'", "+workload.data.x={pwd: '***', b: 1}"]
    )
    assert expand([f"rerun={folder}"]) == ["seed=5", f"rerun={folder}"]
    assert "written down: workload.data.api_key, workload.data.x. Type them again." in capsys.readouterr().err
    typed = "+workload.data.x={pwd: mine, b: 1}"
    assert expand([f"rerun={folder}", typed])[:1] == ["seed=5"]
    assert "secrets are not written down: workload.data.api_key. Type them again." in capsys.readouterr().err
    assert typed in expand([f"resume={folder}", typed, "+workload.data.api_key=abc"])
    assert capsys.readouterr().err == ""


def test_a_file_may_lie_elsewhere():
    then = compose(["workload.data.path=/disk1/films/ratings.csv"]).resolved
    now = compose(["workload.data.path=data/ratings.csv"])
    (line,) = check_unchanged(now, RunRecord("r", config=then))
    assert line == "workload.data.path is data/ratings.csv now and was /disk1/films/ratings.csv: taken for the same."
    told = message(check_unchanged, compose(["workload.data.path=/disk1/films/new.csv"]), RunRecord("r", config=then))
    assert "workload.data.path: is /disk1/films/new.csv now and was /disk1/films/ratings.csv" in told


def test_auto_does_not_pass_over_a_damaged_record(runs):
    older, newer = run(runs / "2026-01-01_00-00-00_aaaa"), run(runs / "2026-01-02_00-00-00_aaaa")
    (newer / "run.json").write_text("{")
    told = message(auto, runs)
    assert f"resume=auto: {newer}: {newer / 'run.json'} is damaged: " in told
    assert "Name another run, or move that file away." in told
    (newer / "run.json").unlink()  # its checkpoint is a way out
    good = newer / "checkpoints" / "last.ckpt"
    assert locate(good) == Target(good, False, None)
    assert expand([f"resume={good}", "seed=5"]) == ["seed=5", f"resume={good}"]
    assert auto(runs) == older.name


def test_auto_names_a_run_whose_checkpoints_are_damaged(runs, capsys):
    older, newer = run(runs / "2026-01-01_00-00-00_aaaa"), run(runs / "2026-01-02_00-00-00_aaaa")
    damage(newer / "checkpoints" / "last.ckpt")
    assert auto(runs) == older.name
    assert f"{newer} has no checkpoint that can be read; going on with {older}." in capsys.readouterr().err


def test_auto_takes_the_newest_by_time_and_says_what_it_passes_over(runs, capsys):
    named, dated = run(runs / "my_name"), run(runs / "2026-01-02_00-00-00_aaaa")
    written = datetime(2026, 1, 1).timestamp()
    os.utime(named / "run.json", (written, written))
    assert auto(runs) == dated.name
    assert capsys.readouterr().err == ""
    os.utime(named / "run.json", (written + 3 * 86_400,) * 2)
    assert auto(runs) == "my_name"
    empty = run(runs / "2026-01-05_00-00-00_aaaa", checkpoints=())
    assert auto(runs) == "my_name"
    told = f"resume=auto: {empty} has no checkpoint that can be read; going on with {named}."
    assert told in capsys.readouterr().err


def test_a_run_of_another_machine_that_may_be_dead_is_gone_on_with_elsewhere(tmp_path):
    folder = run(tmp_path / "run", status="running", host_name="there")
    assert "If it was killed there, name one of its checkpoints" in message(locate, folder)
    assert not locate(folder / "checkpoints" / "last.ckpt").in_place
