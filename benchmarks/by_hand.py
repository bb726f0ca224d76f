"""Trains the recommender as a person would without wellfed: Lightning composed by Hydra, or a search by Optuna.

    python benchmarks/by_hand.py one_step
    python benchmarks/by_hand.py optuna [--trials 12] [--steps 20] [--evaluates]

`startup.py` and `sweep.py` time these commands as peers. Data, model and metric are those of `workload=recsys` without
texts; batches come from torch's DataLoader over samples. The search trains all trials in this process.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from workloads.recsys.data import build
from workloads.recsys.evaluation import metrics_of_ranks, rank_of_target
from workloads.recsys.interactions import leave_last_out
from workloads.recsys.model import TwoTowerRecommender
from workloads.recsys.synthetic import synthetic_interactions

ROOT = Path(__file__).resolve().parents[1]
INTERACTIONS = synthetic_interactions(0.1, 0)
DATA = build(INTERACTIONS, is_embedded=True)
BATCH = 256


class Triplets(Dataset[dict[str, torch.Tensor]]):
    """Training interactions, each with a random item."""

    def __init__(self) -> None:
        split = leave_last_out(INTERACTIONS, None)
        self.users, self.items = torch.from_numpy(split.users), torch.from_numpy(split.items)

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        negative = torch.randint(DATA.model_args["num_items"], ())
        return {"user": self.users[index], "pos": self.items[index], "neg": negative}


def model_of(dim: int = 64) -> TwoTowerRecommender:
    return TwoTowerRecommender(**DATA.model_args, dim=dim, text="none")


@torch.no_grad()
def ndcg(model: TwoTowerRecommender, split: Any) -> float:
    """NDCG@10 over the whole catalogue."""
    ranks = []
    for indices in torch.arange(len(split)).split(512):
        batch = split.fetch(indices)
        scores_BI = model.user_vectors(batch["user"]) @ model.item_embedding.weight.T + model.item_bias.weight.T
        ranks.append(rank_of_target(scores_BI, batch["target"], batch["seen"]))
    return float(metrics_of_ranks(torch.cat(ranks).double().numpy())["ndcg_at_10"].mean())


def one_step() -> None:
    """One optimizer step by Lightning with its defaults, a CSV logger and a checkpoint; then validation and test."""
    import hydra
    import lightning.pytorch as pl
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from wellfed.config.schema import RunConfig

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss(batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    ConfigStore.instance().store(name="run_schema", node=RunConfig)

    @hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="train")
    def main(config: Any) -> None:
        pl.seed_everything(config.seed)
        lit = Lit()
        folder = HydraConfig.get().runtime.output_dir
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, logger=CSVLogger(folder), callbacks=[ModelCheckpoint(dirpath=folder)]
        )
        trainer.fit(lit, DataLoader(Triplets(), batch_size=2048, shuffle=True))
        print(ndcg(lit.model, DATA.val), ndcg(lit.model, DATA.test))

    sys.argv[1:] = sys.argv[2:]
    main()


def optuna_search(trials: int, steps: int, *, evaluates: bool) -> None:
    """A search over learning rates; the value of a trial is its NDCG@10, or its loss if nothing is evaluated."""
    import optuna

    def trained(trial: optuna.Trial) -> float:
        model = model_of()
        lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        loss = torch.tensor(0.0)
        for batch in itertools.islice(DataLoader(Triplets(), batch_size=BATCH, shuffle=True), steps):
            optimizer.zero_grad()
            loss = model.loss(batch).loss
            loss.backward()
            optimizer.step()
        return sum(ndcg(model, split) for split in (DATA.val, DATA.test)) if evaluates else -loss.item()

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(trained, n_trials=trials)
    print(study.best_trial.params)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one_step"]:
        one_step()
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("what", choices=["one_step", "optuna"])
        parser.add_argument("--trials", type=int, default=12)
        parser.add_argument("--steps", type=int, default=20)
        parser.add_argument("--evaluates", action="store_true", help="rank the catalogue after each training")
        asked = parser.parse_args()
        optuna_search(asked.trials, asked.steps, evaluates=asked.evaluates)
