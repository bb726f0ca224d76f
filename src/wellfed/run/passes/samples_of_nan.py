"""Names the training samples behind a non-finite loss."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from wellfed.data.non_finite_samples import NonFiniteSample
from wellfed.data.streams.stream_loader import StreamLoader
from wellfed.run.passes.learner import Learner
from wellfed.train.step.non_finite import NonFiniteLoss

_LOG = logging.getLogger(__name__)
_MOST_EXAMINED = 200
"""Maximum number of batches examined after a non-finite loss."""


def name_sample(learner: Learner, loader: Any, error: NonFiniteLoss, state: dict[str, Any]) -> None:
    """Makes the error name the sample with a non-finite value, if one of the latest batches has one."""
    trainer, config = learner.config.trainer, learner.config
    steps = 2 * max(trainer.log_every_steps, trainer.checkpoint_every_steps or 0)
    found = _non_finite_sample(loader, state, steps=min(steps, _MOST_EXAMINED))
    if found is None:
        return
    learner.books.bad_sample = asdict(found)
    skip = f"loader.skip_ids=[{','.join(map(str, [*config.loader.skip_ids, found.sample]))}]"
    error.args = (
        f"{type(learner.objects.data.train).__name__}: training sample {found.sample} holds {found.value} (epoch "
        f"{found.epoch}, batch {found.batch}), so the loss is no finite number.",
    )
    error.__notes__ = [f"Repair it, or set {skip}; trainer.on_nan=skip leaves out its whole step."]


def _non_finite_sample(loader: Any, state: dict[str, Any], **which: int) -> NonFiniteSample | None:
    """Returns the sample; None for a stream, whose samples have no numbers."""
    if isinstance(loader, StreamLoader):
        return None
    try:
        return loader.non_finite_sample(state, **which)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  the run has ended for another reason, which is reported
        _LOG.info("the batches could not be examined: %r", error)
        return None
