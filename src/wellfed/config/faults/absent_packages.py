"""Tells of packages that a configuration needs and that are not installed; imports none of them."""

from __future__ import annotations

from collections.abc import Iterator

from wellfed.config.schema import RunConfig, SearchSampler
from wellfed.errors import Fault
from wellfed.extras import absence, install, is_installed

LOGGERS = ("tensorboard", "mlflow")
"""Knobs of the group logger that need the package, and the extra, of their name."""


def absent_packages(config: RunConfig) -> Iterator[Fault]:
    """A fault for each that is not there."""
    for name in LOGGERS:
        if getattr(config.logger, name) and not is_installed(name):
            way_out = f"Install it: {install(name)}; or leave out logger={name}."
            yield Fault(f"logger.{name}=true", absence(name)[0], way_out)
    sampler = config.search.sampler
    if sampler is not SearchSampler.grid and not is_installed("optuna"):
        way_out = f"Install it: {install('search')}; or name a grid of values, with search=grid."
        yield Fault(f"search.sampler={sampler.name}", absence("optuna")[0], way_out)
