"""Starts the entry scripts: reads the command line, composes and checks, then calls the job."""

from __future__ import annotations

import os
import re
import string
import sys
import textwrap
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

import wellfed.process  # noqa: F401  reads them before torch may narrow them
from wellfed.command_line import command, typed_arguments
from wellfed.config.compose import Composed, compose, compose_raw, composed_from
from wellfed.config.faults.find_faults import find_faults
from wellfed.config.hydra_internals import Hydra, command_line_parser, searched_files, show
from wellfed.config.hydra_session import COMPOSE_ERRORS, folders_of, open_hydra, read_flags
from wellfed.config.knobs import in_order
from wellfed.config.quoting import is_null, key_value
from wellfed.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_RUN, EXIT_OK, ConfigError, Fault, WellfedError
from wellfed.process import STOPS, exit_code_of, without_collections
from wellfed.units import show_text

Job = Callable[[Composed[Any]], int]
Expand = Callable[[list[str], Callable[[Sequence[str]], Composed[Any]]], list[str]]
_WIDTH = 120
"""Characters per line of ``--help``."""


def main(
    config_name: str,
    job: Job,
    argv: list[str] | None = None,
    expand: Expand | None = None,
    not_many: str = "",
) -> int:
    """Runs ``job`` with the configuration of the command line and returns the exit code.

    A faulty configuration prints one message on stderr and returns 2, before torch is imported or a file written.
    HYDRA_FULL_ERROR=1 adds the traceback. Hydra's flags keep their meaning. With ``-m`` the code is 0 if any job
    returned 0, else 1.

    Args:
        config_name: primary config; ``--config-name`` replaces it.
        job: called once, or once a point with ``-m``. It imports torch and the rest of the engine itself.
        argv: command line; None = this process's.
        expand: rewrites the overrides of a single run before they are composed (resume, rerun, paths). Its second
            argument composes overrides with the folders of this command line.
        not_many: why ``-m`` is refused, and what to type instead; empty = ``-m`` is allowed.
    """
    args = command_line_parser().parse_intermixed_args(typed_arguments() if argv is None else argv)
    if args.config_name is not None:
        config_name = args.config_name
    asks_help = args.help or args.hydra_help
    only_shows = asks_help or args.info or args.shell_completion
    try:
        if args.experimental_rerun is not None:
            raise ConfigError.of("--experimental-rerun", "is not offered.", "Write rerun=<run folder>.")
        if sum(map(bool, (args.run, args.cfg, args.multirun, args.info, args.shell_completion))) > 1:
            flags = "--run, --cfg, --multirun, --info, --shell-completion"
            raise ConfigError.of("command line", f"only one of {flags} at a time.", "Leave the others out.")
        if args.multirun and not_many and not asks_help:
            raise ConfigError.of("-m", not_many, "")
        if args.multirun and not asks_help:
            return _multirun(args, config_name, job)
        if expand and not only_shows:
            typed = partial(compose, config_name=config_name, **folders_of(args))
            _take(args, expand(args.overrides, typed))
            config_name = args.config_name or config_name
        if only_shows or args.cfg or args.resolve:
            _show(args, config_name)
            return EXIT_OK
        composed = _compose(args, config_name)
    except WellfedError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return job(composed)


def _compose(args: Namespace, config_name: str) -> Composed[Any]:
    with without_collections():
        composed = compose(args.overrides, config_name, **folders_of(args))
    is_rank_of_trial = os.environ.get("LOCAL_RANK", "0") != "0"  # started by Lightning with this command line
    many = [f"{group}={composed.choices[group]}" for group in ("sweep", "search") if group in composed.choices]
    if many and not is_rank_of_trial:
        way_out = f"Add -m: {command('train')} -m {many[0]}"
        raise ConfigError.of(many[0], "is for many runs, and this is one.", way_out)
    return composed


def _show(args: Namespace, config_name: str) -> None:
    """Runs flags that only print something, such as ``--cfg``."""
    hydra = open_hydra(**folders_of(args), job_name=config_name)
    if args.help:
        print(help_text(hydra, config_name, args.overrides))
        return
    if args.cfg:
        composed = _compose(args, config_name)
        if args.cfg == "job" and not args.package:
            print(composed.yaml(resolve=args.resolve), end="")
            return
    elif args.resolve:
        raise ConfigError.of("--resolve", "is for --cfg.", "Add --cfg job.")
    try:
        show(hydra, args, config_name)
    except COMPOSE_ERRORS as error:
        compose_raw(hydra, config_name, args.overrides)  # all faults, not Hydra's first
        raise ConfigError.of("command line", f"{error}.", "See --hydra-help.") from error


def help_text(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    """Returns the text of ``--help`` in half the time of Hydra's own, which copies all configs for each group.

    ``$APP_CONFIG_GROUPS`` in the template becomes one line per group, with ``*`` at the chosen option.
    """
    cfg = compose_raw(hydra, config_name, overrides)
    HydraConfig.instance().set_config(cfg)
    repo, lines = searched_files(hydra.config_loader, config_name, []), []
    for group, chosen in reversed(cfg.hydra.runtime.choices.items()):  # Hydra lists them in reverse
        options = [f"{option}*" if option == chosen else option for option in in_order(repo.get_group_options(group))]
        if options and not group.startswith("hydra"):
            lines += textwrap.wrap(f"  {group:<12}{', '.join(options)}", _WIDTH, subsequent_indent=" " * 14)
    text = string.Template(cfg.hydra.help.template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines)).rstrip()
    return re.sub(r"\bpython (?:src/(\w+)\.py|-m wellfed (\w+))\b", lambda found: command(found[1] or found[2]), text)


class _JobInterrupted(SystemExit):
    """Raised when a signal stopped a job, to stop the jobs after it. Hydra would hold back an Exception."""


def _multirun(args: Namespace, config_name: str, job: Job) -> int:
    # `resume` and `rerun` stand for another command line, which replaces them before composing.
    pairs = [key_value(text) for text in args.overrides]
    if faults := [
        Fault(f"{name}={value}", "is about one run, and -m starts many.", f"Leave out -m, or leave out {name}.")
        for name, value in pairs
        if name in ("resume", "rerun") and not is_null(value)
    ]:
        raise ConfigError(faults)
    codes: list[int] = []

    def one_job(cfg: DictConfig) -> int:
        hydra: Any = HydraConfig.get()
        try:
            code = job(composed_from(cfg, hydra, run_dir=hydra.runtime.output_dir))
        except WellfedError as error:
            code = _refuse(error)
        codes.append(code)
        if code in map(exit_code_of, STOPS):
            raise _JobInterrupted(code)
        return code

    hydra = open_hydra(**folders_of(args), job_name=config_name)
    GlobalHydra.instance().clear()
    GlobalHydra.instance().initialize(hydra)
    try:
        returned = hydra.multirun(config_name, one_job, [*args.overrides, "hydra.mode=MULTIRUN"])
    except _JobInterrupted as interrupted:
        return int(interrupted.code or 0)
    except COMPOSE_ERRORS as error:
        faults = find_faults(hydra.config_loader, config_name, args.overrides, error, multirun=True)
        raise ConfigError(faults) from error
    finally:
        GlobalHydra.instance().clear()
    if isinstance(returned, int):  # a sweep returns a code of its own
        return returned
    # Launchers that run jobs in other processes return their exit codes as values.
    values = [one._return_value for one in _flat(returned) if isinstance(one, JobReturn)]
    codes += [value for value in values if isinstance(value, int)]
    return EXIT_OK if EXIT_OK in codes else EXIT_FAILED


def _flat(returned: Any) -> list[Any]:
    is_list = isinstance(returned, (list, tuple))
    return [one for item in returned for one in _flat(item)] if is_list else [returned]


def _refuse(error: WellfedError) -> int:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    else:
        print(show_text(str(error)), file=sys.stderr)
    return EXIT_NOTHING_RUN


def _take(args: Namespace, words: Sequence[str]) -> None:
    """Replaces the overrides of a command line. Flags of an earlier run apply where none is typed."""
    earlier = read_flags(words)
    for name in ("config_path", "config_name", "config_dir"):
        setattr(args, name, getattr(args, name) or getattr(earlier, name))
    args.overrides = earlier.overrides
