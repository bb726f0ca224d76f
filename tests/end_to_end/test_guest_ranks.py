"""A LightningModule on several ranks: what each sees is what it sees under Lightning alone, also after a resume."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import only_folder, run, train_own

pytestmark = pytest.mark.slow
YAML = "name: ranks\nmodel: {_target_: ranks_module.Module}\ndata: {_target_: ranks_module.Data}\n"
TYPED = ("trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.checkpoint_every_steps=1")
TYPED += ("telemetry.ceiling_steps=0",)  # its steps are seen, too


def seen(folder: Path) -> list[list[str]]:
    return [(folder / f"{rank}").read_text().split() for rank in (0, 1)]


def test_two_ranks_see_what_they_see_under_lightning_and_go_on_with_it(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("ranks_module.py"), tmp_path)
    (tmp_path / "configs" / "workload").mkdir(parents=True)
    (tmp_path / "configs" / "workload" / "ranks.yaml").write_text(YAML)
    found = [tmp_path / name for name in ("alone", "here", "resumed")]
    for folder in found:
        folder.mkdir()
    done = run(tmp_path / "ranks_module.py", cwd=tmp_path, fresh=True, SEEN=str(found[0]))
    assert done.code == 0, done.text
    done = train_own(tmp_path, "ranks", *TYPED, "trainer.keep_last=9", cwd=found[1], SEEN=str(found[1]))
    assert done.code == 0, done.text
    checkpoints = only_folder(found[1], "ranks") / "checkpoints"
    assert seen(found[1]) == seen(found[0])
    weights = torch.load(checkpoints / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in torch.load(found[0] / "weights.pt", weights_only=True).items():
        assert torch.equal(weights[name], value), name
    at = f"resume={checkpoints / 'last-2.ckpt'}"
    done = train_own(tmp_path, "ranks", *TYPED, at, cwd=found[2], SEEN=str(found[2]))
    assert done.code == 0, done.text
    assert seen(found[2]) == [lines[4:] for lines in seen(found[1])]
    assert seen(found[1])[0] != seen(found[1])[1]
