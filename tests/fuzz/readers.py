"""Every reader of files that a user, a crash or a stranger may have damaged, with a sound file of each kind."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from lightning.pytorch.callbacks import EarlyStopping
from PIL import Image

from tests.data.shards.test_tar_members import packed
from tests.every.test_overrides import overrides
from tests.fuzz.damage import damaged
from tests.kit import made, tiny
from tests.kit.footprints import footprint
from tests.kit.made_run import made_run
from tests.study.board.test_search_board import write_search
from tests.study.test_tune_file import FILE as TUNED
from tests.test_damaged_files import GPUS, WHOLE, read_all, shown
from tests.workloads.speech.recordings import tone, wav
from wellfed.cli.commands.cache import main as list_cache
from wellfed.config.compose import compose
from wellfed.data.prepared import MANIFEST, digest, prepared
from wellfed.data.shards.shard_index import find_shards, index_shards
from wellfed.data.shards.shard_reader import ShardReader
from wellfed.errors import ConfigError, DataError
from wellfed.explain.diagnosis.curves.recorded_curves import read_curves
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.observe.loggers.journal import Journal
from wellfed.plan.predict import cache as footprints
from wellfed.record import RunRecord
from wellfed.run.folder.checkpoint_file import is_readable, load_checkpoint, load_to_resume, step_of
from wellfed.run.folder.resume import expand, find_latest
from wellfed.run.stages import _progress_at
from wellfed.study.board import publish
from wellfed.study.board.files import to_csv, to_html, to_markdown
from wellfed.study.learning_curve import read_curve, reported_metrics
from wellfed.study.points.space import Choices, Numbers
from wellfed.study.ranking.ranking import board_of
from wellfed.study.study_files import TuneFile
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.checkpoints import checkpoint_trailer
from wellfed.train.memory import remembered_sizes
from workloads.forecast.read_csv import read_csv
from workloads.hyperspectral.array_files import read_arrays
from workloads.recsys.movielens import read_movielens
from workloads.restoration.decoding import DamagedImage, decode, quiet_pillow, size_of
from workloads.speech import sound_files
from workloads.speech.wav_layout import DamagedClip, wav_layout

RUN = "logs/recsys/runs/2026-01-01_00-00-00_beef"


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file."""

    name: str
    file: str
    """The file to damage, relative to the folder."""
    write: Callable[[Path], Any]
    """Writes a sound file, and files beside it that the reader needs, into an empty folder."""
    read: Callable[[Path], Any]
    """Reads the files of the folder."""
    refusals: tuple[type[Exception], ...] = (ConfigError, DataError)
    """Errors that callers report to the user as a message."""
    inputs: Callable[[bytes], SearchStrategy[bytes]] = damaged
    """Returns the inputs to try for a sound file."""


# -- run folders -------------------------------------------------------------------------------------------------------


def _write_run(folder: Path) -> None:
    run = folder / RUN
    run.mkdir(parents=True)
    found = made_run(run, steps=60, **WHOLE)
    found.gpus = GPUS
    found.write(run)
    (folder / "other").mkdir()
    made_run(folder / "other", steps=20).write(folder / "other")
    torch.save({"global_step": 3, "state_dict": {}}, run / "x.ckpt")


class NoRecord(Exception):
    """Raised for a record that `RunRecord.read` refuses. Rules and pages may raise no ValueError."""


def _read_run(folder: Path) -> None:
    run = folder / RUN
    try:
        RunRecord.read(run)
    except ValueError as error:
        raise NoRecord from error
    read_all(run, Evidence.read(folder / "other"))
    read_curve(run, "loss")
    reported_metrics(run)


def _read_as_latest(folder: Path) -> None:
    find_latest(compose([f"paths.log_dir={folder / 'logs'}"]).config)


def _read_tables(folder: Path) -> None:
    _read_run(folder)
    journal = Journal(RunRecord.read(folder / "other"), folder / RUN)
    journal.samples_written()
    journal.validations_written()
    journal.cut_after(10)
    list(publish._telemetry(folder / RUN / "telemetry.csv"))


def _read_record(folder: Path) -> None:
    _read_run(folder)
    _read_as_latest(folder)


_OF_CODE = (
    '+callbacks.x={_target_:torch.utils.collect_env.run,command:"true"}',
    "+callbacks.x._target_=torch.utils.collect_env.run",
    "workload.model._target_=torch.utils.collect_env.run",
    "+callbacks.x=${oc.create:${oc.decode:'{_target_:torch.utils.collect_env.run}'}}",
    '+callbacks={x:"${oc.decode:${logger.group}}"}',
    "logger.group='{_target_:torch.utils.collect_env.run}'",
    "config.allow_targets=[os,torch,workloads]",
    "experiment@config=x",
    "hydra.searchpath=[x]",
    "experiment=../../x",
)


@st.composite
def _override_of_code(draw: st.DrawFn) -> str:
    """Draws an override that names code, with up to two signs put in or cut out."""
    text = draw(st.sampled_from(_OF_CODE))
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["\\", " ", "'", '"', "$", "{", "}", ".", "/", "@", "+"])) + text[at:]
    return text


def _recorded(whole: bytes) -> SearchStrategy[bytes]:
    """Returns records with drawn overrides."""
    record = json.loads(whole)
    typed = st.lists(_override_of_code() | overrides(), min_size=1, max_size=2)
    return typed.map(lambda texts: json.dumps({**record, "overrides": texts}).encode())


def _targets(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {str(value["_target_"])} if "_target_" in value else set()
        return own.union(*map(_targets, value.values()))
    return set[str]().union(*map(_targets, value)) if isinstance(value, list) else set()


def _read_replayed(folder: Path) -> None:
    """Resumes a run, whose record may then name no code that the files of ``configs/`` do not name."""
    resolved = compose(expand([f"resume={folder / RUN}"])).resolved
    files = Path(__file__).parents[2].joinpath("configs").glob("**/*.yaml")
    known = {name for path in files for name in re.findall(r"_target_: ([\w.]+)", path.read_text())}
    assert _targets(resolved) <= known
    assert resolved["config"] == compose().resolved["config"]


def _write_checkpoint(folder: Path, *, has_trailer: bool) -> None:
    state = {
        "global_step": 3,
        "state_dict": {"w": torch.arange(64.0), "b": torch.zeros(3, dtype=torch.bfloat16)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "loops": {"fit_loop": {"state_dict": {}, "epoch": (1, "x", None, True)}},
    }
    if has_trailer:
        checkpoint_trailer.write(folder / "last.ckpt", partial(torch.save, state), {"step": 3})
    else:
        torch.save(state, folder / "last.ckpt")


def _read_checkpoint(folder: Path) -> None:
    path = folder / "last.ckpt"
    is_readable(path)
    step_of(path)
    content = load_checkpoint(path)
    for value in content["state_dict"].values():
        if isinstance(value, torch.Tensor):
            value.clone()


_VALUES = (None, True, -1, 3, 10**30, float("nan"), "x", b"x", (), [], ["x"], [{}], {}, {"x": 3}, {"epoch": "x"})
"""Values of other types, or of the same type with other content."""
_DROPPED = object()


def _write_resumable(folder: Path) -> None:
    tiny.fit(tiny.module(), folder, [tiny.checkpoints(folder), _with_state()], max_steps=2)


def _with_state() -> EarlyStopping:
    """Returns a callback whose state is in checkpoints."""
    return EarlyStopping("loss", strict=False, check_on_train_epoch_end=True)


def _changed(whole: bytes) -> SearchStrategy[bytes]:
    """Returns checkpoints of which one key is dropped or has another value; also one of the dicts in it."""
    state = torch.load(io.BytesIO(whole), weights_only=True)
    inner = [(key, name) for key, value in state.items() if isinstance(value, dict) for name in value]
    places = st.sampled_from([*((key,) for key in state), *inner])

    def change(place: tuple[str, ...], value: Any) -> bytes:
        changed = copy.deepcopy(state)
        holder = changed[place[0]] if len(place) == 2 else changed
        if value is _DROPPED:
            del holder[place[-1]]
        else:
            holder[place[-1]] = value
        file = io.BytesIO()
        torch.save(changed, file)
        return file.getvalue()

    return st.builds(change, places, st.just(_DROPPED) | st.sampled_from(_VALUES) | st.just(torch.zeros(2)))


def _read_resumable(folder: Path) -> None:
    """Checks the checkpoint, finds its progress, and trains one more step from it."""
    path = folder / "last.ckpt"
    state = load_to_resume(path)
    _progress_at(state, SimpleNamespace(steps_per_epoch=3))
    module = tiny.module()
    if lit.misfits(module, state["state_dict"]):
        raise DataError("other weights")
    tiny.fit(module, folder, [_with_state()], path, max_steps=3)


# -- studies -----------------------------------------------------------------------------------------------------------


def _write_journal(folder: Path) -> None:
    study = _optuna(folder)
    for _ in range(3):
        asked = study.ask()
        study.report(asked.number, 1, 0.5)
        study.end(asked.number, "complete", 0.5)
    study.ask()


def _optuna(folder: Path) -> Any:
    from tests.study.points.test_optuna_study import study

    return study(folder)


def _read_journal(folder: Path) -> None:
    study = _optuna(folder)
    for asked in study.unfinished():
        study.give_up(asked)
    study.ask()


def _read_search(folder: Path) -> None:
    board = board_of(folder)
    assert to_csv(board)
    assert to_markdown(board)
    assert to_html(board, folder)
    assert board.to_dict()


class NoTune(Exception):
    """Raised for a file that `TuneFile.read` refuses. Its properties may raise no ValueError."""


def _write_grid(folder: Path) -> None:
    space = {"workload.model.dim": Choices(("32", "64")), "workload.model.depth": Numbers(1, 3, step=1)}
    write_search(folder, space=space, sampler="grid", ids=tuple(f"p{number}" for number in range(6)))


def _write_tune(folder: Path) -> None:
    steps = [{"overrides": ["seed=1", "loader=balanced"], "beside_seconds": 1.5}, {"overrides": []}]
    replace(TUNED, steps=steps).write(folder)


def _read_tune(folder: Path) -> None:
    try:
        earlier = TuneFile.read(folder)
    except ValueError as error:
        raise NoTune from error
    TUNED.differs_from(earlier)
    hash(frozenset(earlier.beside_seconds.items()))


# -- caches ------------------------------------------------------------------------------------------------------------


def _make_prepared(folder: Path) -> Path:
    return prepared(folder, "things", [], {}, lambda into: (into / "a.txt").write_text("content"))


def _read_prepared(folder: Path) -> None:
    list_cache(["list", "--cache-dir", str(folder), "--json"])
    assert (_make_prepared(folder) / "a.txt").read_text() == "content"


def _write_footprint(folder: Path) -> None:
    (folder / "footprint.json").write_text(json.dumps(footprint().to_dict()))


def _write_sizes(folder: Path) -> None:
    lowered = remembered_sizes.Lowered(8, 16, "2026-01-01", "run")
    remembered_sizes.remember(folder / "sizes.json", remembered_sizes.MICRO_BATCH, lowered)


# -- data --------------------------------------------------------------------------------------------------------------


def _write_shard(folder: Path) -> None:
    clips = [(f"c/{number}.{part}", content) for number in range(4) for part, content in
             (("wav", wav(tone(seconds=0.01))), ("cls", b"1"))]  # fmt: skip
    (folder / "shards").mkdir()
    (folder / "shards" / "0.tar").write_bytes(packed(clips))


def _read_shard(folder: Path) -> None:
    index = index_shards(find_shards(folder / "shards"), ("wav", "cls"), folder / "cache", max_damaged=100)
    if index.keys:
        ShardReader(index, "wav").read(np.arange(len(index.keys)))


def _write_series(folder: Path) -> None:
    rows = [f"2024-01-{day:02d},{name},{day / 7:.3f}" for name in ("a", "b") for day in range(1, 29)]
    (folder / "table.csv").write_text("\n".join(["date,series,value", *rows, ""]))


def _write_mat(folder: Path) -> None:
    from scipy.io import savemat

    savemat(folder / "scene.mat", {"X": np.arange(60.0).reshape(3, 4, 5), "names": ["a", "b"], "s": {"y": 1}})


def _write_image(folder: Path, name: str, **options: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name, **options)


def _read_image(folder: Path, name: str) -> None:
    with quiet_pillow():
        size_of(folder / name)
        decode(folder / name)


def _write_flac(folder: Path) -> None:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, tone(seconds=0.05), 16_000, format="FLAC")
    (folder / "x.flac").write_bytes(out.getvalue())


def _read_sound(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    if name.endswith(".wav"):
        wav_layout(lambda start, count: content[start : start + count], len(content))
    sound_files.decode(content)


def _write_ratings(folder: Path) -> None:
    rows = [(1, 10, 5, 100), (1, 20, 3, 101), (2, 30, 1, 50), (2, 10, 2, 60), (2, 20, 5, 70)]
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    (folder / "u.user").write_text("1|27|F|programmer|55455\n2|60|M|other|02138\n")
    flags = "|".join(["0"] * 18 + ["1"])
    (folder / "u.item").write_text("".join(f"{item}|A (1995)|01-Jan-1995||x|{flags}\n" for item in (10, 20, 30)))


def _write_option(folder: Path) -> None:
    source = Path(__file__).parents[2] / "configs" / "workload" / "speech.yaml"
    (folder / "workload").mkdir()
    (folder / "workload" / "own.yaml").write_bytes(source.read_bytes())


def _read_option(folder: Path) -> None:
    compose(["workload=own"], extra_dirs=[folder]).yaml()


def _typed(whole: bytes) -> SearchStrategy[bytes]:
    """Returns lists of overrides, as JSON."""
    del whole
    return st.lists(overrides(), min_size=1, max_size=3).map(lambda typed: json.dumps(typed).encode())


def _read_typed(folder: Path) -> None:
    compose(json.loads((folder / "typed.json").read_text())).yaml()


def _run(name: str, file: str, read: Callable[[Path], Any]) -> Reader:
    return Reader(name, f"{RUN}/{file}", _write_run, read, (ConfigError, DataError, NoRecord))


def _image(name: str, **options: Any) -> Reader:
    file = f"x.{name}"
    write, read = partial(_write_image, name=file, **options), partial(_read_image, name=file)
    return Reader(name, file, write, read, (DamagedImage,))


READERS = (
    _run("record", "run.json", _read_record),
    Reader("replayed", f"{RUN}/run.json", _write_run, _read_replayed, inputs=_recorded),
    _run("steps", "steps.csv", _read_tables),
    _run("metrics", "metrics.csv", _read_tables),
    _run("telemetry", "telemetry.csv", _read_tables),
    Reader("curves", f"{RUN}/telemetry.csv", _write_run, lambda folder: read_curves(folder / RUN / "telemetry.csv")),
    Reader("checkpoint", "last.ckpt", partial(_write_checkpoint, has_trailer=True), _read_checkpoint),
    Reader("foreign_checkpoint", "last.ckpt", partial(_write_checkpoint, has_trailer=False), _read_checkpoint),
    Reader("resumed_checkpoint", "last.ckpt", _write_resumable, _read_resumable, inputs=_changed),
    Reader("ledger", "ledger.jsonl", made.write, shown),
    Reader("sweep", "sweep.json", made.write, shown, (ConfigError, ValueError)),
    Reader("search", "search.json", write_search, _read_search),
    Reader("grid", "search.json", _write_grid, _read_search),
    Reader("tune", "tune.json", _write_tune, _read_tune, (NoTune,)),
    Reader("optuna", "optuna.journal", _write_journal, _read_journal),
    Reader("footprint", "footprint.json", _write_footprint, lambda folder: footprints.load(folder / "footprint.json")),
    Reader("prepared", f"things/{digest([], {})}/{MANIFEST}", _make_prepared, _read_prepared),
    Reader("sizes", "sizes.json", _write_sizes, lambda folder: remembered_sizes.recall(folder / "sizes.json"),
           (ValueError,)),
    Reader("shard", "shards/0.tar", _write_shard, _read_shard),
    Reader("series", "table.csv", _write_series, lambda folder: read_csv(folder / "table.csv")),
    Reader("npy", "scene.npy", lambda folder: np.save(folder / "scene.npy", np.arange(60.0).reshape(3, 4, 5)),
           lambda folder: read_arrays(folder / "scene.npy")),
    Reader("mat", "scene.mat", _write_mat, lambda folder: read_arrays(folder / "scene.mat")),
    _image("png"),
    _image("jpg"),
    _image("webp"),
    _image("tiff"),
    _image("bmp"),
    Reader("wav", "x.wav", lambda folder: (folder / "x.wav").write_bytes(wav(tone(seconds=0.05))),
           partial(_read_sound, name="x.wav"), (DamagedClip, DataError)),
    Reader("flac", "x.flac", _write_flac, partial(_read_sound, name="x.flac"), (DamagedClip, DataError)),
    *(Reader(f"ratings_{file[2:]}", file, _write_ratings, lambda folder: read_movielens(folder, 100))
      for file in ("u.data", "u.user", "u.item")),
    Reader("option", "workload/own.yaml", _write_option, _read_option),
    Reader("overrides", "typed.json", lambda folder: (folder / "typed.json").write_text("[]"), _read_typed,
           inputs=_typed),
)  # fmt: skip
