"""Values that a run has taken from its data stay those of the run, whatever becomes of the data."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import record_of, run
from tests.workloads.speech.recordings import tone, voices, wav
from wellfed import load_model


@pytest.mark.slow
def test_a_run_is_resumed_evaluated_and_loaded_with_its_own_values(tmp_path: Path):
    """Though the folder has got more clips since, most of which are of another rate and length."""
    place = voices(tmp_path / "wavs")
    words = ["workload=speech", f"workload.data.path={place}", "gpu=cpu", "logger=none", "telemetry=none"]
    words += ["workload.data.passes=1", "workload.model.base_channels=4", "hydra.run.dir=run"]
    done = run("train.py", *words, "trainer.max_epochs=1", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "all 24 clips have it" in (tmp_path / "run" / "run.json").read_text()
    for clip in range(40):
        (place / "no" / f"more{clip}.wav").write_bytes(wav(tone(200 + clip, 2.0, 16_000), 16_000))
    evaluated = run("evaluate.py", "checkpoint=run/checkpoints/last.ckpt", "accelerator=cpu", cwd=tmp_path)
    assert evaluated.code == 0, evaluated.text
    resumed = run("train.py", "resume=run", "trainer.max_epochs=2", cwd=tmp_path)
    assert resumed.code == 0, resumed.text
    record = record_of(tmp_path / "run")
    assert (record["status"], record["epochs"]) == ("ok", 2)
    assert {"workload.data.sample_rate=8000", "workload.data.clip_seconds=1.2"} <= set(record["overrides"])
    assert load_model(tmp_path / "run").first.in_channels == 80
