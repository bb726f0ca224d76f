"""No value that the configuration masks is anywhere in what a run or a sweep leaves behind."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.commands import record_of, run
from tests.kit.wandb_files import stored
from wellfed.process import MAY_FORK

DATA = "+workload.data"
TYPED = (
    f"{DATA}.api_key=PLANTED-01-abc",
    f"{DATA}.hfToken='PLANTED-02 with, \"quotes\"'",
    '++workload.data.pwd="PLANTED-03-it\'s"',
    f"{DATA}.x={{apiKey: PLANTED-04-abc, name: kept}}",
    f"{DATA}.y=[{{bearer: PLANTED-05-abc}}, {{nested: {{accessKey: PLANTED-06-abc}}}}]",
    f"{DATA}.auth={{user: PLANTED-07-abc, pins: [8080808, PLANTED-09-abc]}}",
    f"{DATA}.token=1010101010",
    f"{DATA}.dsn=PLANTED-11-abc",
    f"{DATA}.database='postgres://bob:PLANTED-12-abc@db/x'",
    f"{DATA}.bucket='https://h/b?sv=1&sig=PLANTED-13-abc'",
    f"{DATA}.header='Bearer ${{workload.data.api_key}}'",
    f"{DATA}.login=${{oc.env:MY_API_TOKEN}}",
    f"{DATA}.passphrase='PLANTED-15-gr\xfc\xdfe'",
    f"{DATA}.max_tokens=512",
    "logger.group='https://u:PLANTED-16-abc@h/g'",
    "logger.tags=['https://u:PLANTED-17-abc@h/t']",
)
VARIABLE = "PLANTED-14-abc"
NUMBERS = (b"8080808", b"1010101010")


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A checkout with a password in its remote and an uncommitted secret, and a workload that spreads its own."""
    shutil.copy(Path(__file__).with_name("leaky.py"), tmp_path)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    (folder / "leaky.yaml").write_text(
        "name: leaky\neffective_batch_size: 16\nmodel: {_target_: leaky.Model}\ndata: {_target_: leaky.datasets}\n"
        "optimizer: {_target_: torch.optim.SGD, lr: 0.1}\n"
    )
    (tmp_path / ".gitignore").write_text("logs\n")
    (tmp_path / "notes.yaml").write_text("api_key: none\n")
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=a"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    remote = ["remote", "add", "origin", "https://user:PLANTED-18-abc@example.com/a.git"]
    subprocess.run([*git, *remote], cwd=tmp_path, check=True)
    (tmp_path / "notes.yaml").write_text("api_key: PLANTED-19-abc\n")
    return tmp_path


def words(user: Path, *more: str) -> list[str]:
    place = ["--config-dir", str(user / "configs"), "workload=leaky"]
    return [*place, "telemetry.ceiling_steps=3", "trainer.accelerator=cpu", *TYPED, *more]


def leaks(folder: Path) -> list[str]:
    """Files, and wandb's own records, that hold any of the values."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and (b"PLANTED" in (content := path.read_bytes()) or any(map(content.count, NUMBERS))):
            at = max(content.find(b"PLANTED"), *map(content.find, NUMBERS))
            found.append(f"{path.relative_to(folder)}: {content[max(0, at - 60) : at + 30]!r}")
    for path in folder.rglob("*.wandb"):
        text = json.dumps(stored(path.parent).entries)
        if "PLANTED" in text or any(number.decode() in text for number in NUMBERS):
            at = text.find("PLANTED")
            found.append(f"{path.name}: {text[max(0, at - 200) : at + 30]}")
    return found


@pytest.mark.slow
def test_a_run_that_fails_leaves_no_secret(user: Path) -> None:
    more = ["logger=[wandb,csv]", "logger.mode=offline", "trainer.max_epochs=3", "workload.data.fails=true"]
    typed = [text.replace("workload.data.fails", "+workload.data.fails") for text in more]
    done = run("train.py", *words(user, *typed), cwd=user, PYTHONPATH=str(user), MY_API_TOKEN=VARIABLE)
    assert (user / "logs").exists(), done.text
    (folder,) = (user / "logs" / "leaky" / "runs").iterdir()
    assert done.code == 1, done.text
    record = record_of(folder)
    assert record["error"]["message"].count("***") >= 3
    data = record["config"]["workload"]["data"]
    assert (data["max_tokens"], data["x"]["name"], data["token"]) == (512, "kept", "***")
    assert list(folder.rglob("*.wandb"))
    assert "logged in with" in (folder / "train.log").read_text()
    assert leaks(user / "logs") == []


@pytest.mark.guests
@pytest.mark.parametrize("fails", [False, True])
def test_tensorboard_and_mlflow_get_no_secret(user: Path, fails: bool) -> None:
    more = ["logger=[tensorboard,mlflow]", "trainer.max_epochs=2", f"+workload.data.fails={str(fails).lower()}"]
    given = {"MY_API_TOKEN": VARIABLE, "MLFLOW_TRACKING_URI": ""}  # mlflow sets it in a process that uses it
    done = run("train.py", *words(user, *more), cwd=user, PYTHONPATH=str(user), **given)
    assert done.code == int(fails), done.text
    events = list((user / "logs").rglob("events.out.tfevents.*"))
    (parameters,) = (user / "logs" / "mlruns").rglob("params")
    assert events
    assert (parameters / "workload" / "data" / "token").read_text() == "***"
    assert (parameters / "workload" / "data" / "max_tokens").read_text() == "512"
    assert leaks(user / "logs") == []
    assert not (user / "mlruns").exists()


@pytest.mark.slow
@pytest.mark.skipif(not MAY_FORK, reason="forks")
def test_a_sweep_and_its_failed_trials_leave_no_secret(user: Path) -> None:
    axes = ["sweep=quick", "loader=baseline,balanced", "+workload.data.fails=true,false"]
    axes += ["+workload.data.secret=PLANTED-20-abc", "sweep.trial_steps=20"]
    typed = words(user, "-m", *axes, "logger=wandb", "logger.mode=offline")
    done = run("train.py", *typed, cwd=user, PYTHONPATH=str(user), MY_API_TOKEN=VARIABLE)
    (folder,) = (user / "logs" / "leaky" / "sweeps").iterdir()
    assert (folder / "leaderboard.csv").exists(), done.text
    assert any("OSError: logged in with" in path.read_text() for path in folder.glob("*/run.json"))
    assert leaks(user / "logs") == []
