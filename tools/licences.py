"""Compares the licences of the installed packages with those that may be used. Exit code 1 after another one, or none.

python tools/licences.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

ALLOWED = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public|HPND|Historical Permission|Zlib|"
    r"Unlicense|CC0|Public Domain|LGPL|Lesser General Public|Unicode|NVIDIA)",
    re.IGNORECASE,
)
"""Licences under which a program may use a package, whatever its own licence. LGPL: as an imported package."""
REFUSED = re.compile(r"\b(AGPL|GPL|Affero|General Public License|Non-?Commercial|SSPL|BUSL)", re.IGNORECASE)
"""Licences that would bind the program, or limit its use."""
EXCEPTIONS = {
    "cookiecutter": "BSD-3-Clause, by its file LICENSE",
    "text-unidecode": "the Artistic License, one of its two",
    "cuda-toolkit": "names no licence; it holds no code, and requires packages of NVIDIA that name theirs",
    "nvitop": "for benchmarks alone: compared with the monitor",
}
"""Packages that may be used all the same, and why. No run needs those for benchmarks."""
_PROPRIETARY = "Other/Proprietary License"
"""Classifier that names no licence. The text beside it may."""


def licence_of(package: Distribution) -> str:
    """Returns the licence that a package names: its expression, else its classifiers, else a line of its text."""
    data = package.metadata
    if expression := data.get("License-Expression"):
        return str(expression)
    named = [
        line.rpartition("::")[2].strip()
        for line in data.get_all("Classifier") or ()
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    text = (data.get("License") or "").strip().splitlines()
    if text and named in ([], [_PROPRIETARY]):
        return text[0][:80]
    return ", ".join(named)


def is_allowed(licence: str) -> bool:
    """Returns whether a licence may be used. Of several joined by OR one must be allowed, else all."""
    return any(
        bool(ALLOWED.search(choice)) and not REFUSED.search(re.sub(r"(?i)lesser general public license", "", choice))
        for choice in re.split(r"\bOR\b", licence)
    )


def refused(packages: Iterable[Distribution]) -> list[str]:
    """Returns a line for each package whose licence is not allowed, or not named."""
    found = {package.metadata["Name"]: licence_of(package) for package in packages if package.metadata["Name"]}
    return [f"{name}: {found[name] or 'names no licence'}" for name in sorted(found, key=str.lower)
            if not is_allowed(found[name]) and name.lower() not in EXCEPTIONS]  # fmt: skip


def main() -> int:
    """Prints the packages that are refused; returns the exit code."""
    packages = list(distributions())
    bad = refused(packages)
    print("\n".join([*bad, f"{len(packages) - len(bad)} of {len(packages)} packages have a licence that is allowed."]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
