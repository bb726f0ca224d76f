"""Names the version of the code that trials run, by which rows of a ledger can be compared."""

from __future__ import annotations

from wellfed import project
from wellfed.record.provenance import engine_state, engine_version, git_state


def study_code() -> str:
    """Returns the project's commit with a digest of uncommitted changes, the engine, and a digest of Python files.

    The engine's version is left out where it is part of the project's checkout. The last digest covers files that git
    does not track.
    """
    git, engine = git_state(project.root()), engine_state()
    named = []
    if git is not None:
        named.append(f"{git['commit'][:10]}{'+' if git['digest'] else ''}{git['digest'][:6]}")
    if git is None or not engine["within_project"]:
        named.append(engine_version(engine))
    return f"{', '.join(named)}, sources {project.source_digest()[:6]}"
