"""All texts of findings in one file, read by eye: findings.snap.md. `make goldens` writes it anew."""

import gzip
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.explain.diagnosis import words
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.explain.diagnosis.script_words import in_script_words

SNAPSHOT = Path(__file__).with_name("findings.snap.md")
TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*/*.json.gz"))
IDS = {
    name
    for name in tomllib.loads(Path(words.__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    if name[0] != "_"
}
MADE = {
    "a run without clocks": evidence(time=None),
    "little waiting and a near ceiling": evidence(wait_ms=1.5, ceiling=1.06),
    "long ends of epochs": evidence(wall=walled(steps_s=8.0, epoch_end_s=2.0)),
    "a shared machine": evidence(
        wait_ms=30.0, cores=2.0, curves={-1: {"cpu_pct": np.full(9, 20.0), "others_cpu_pct": np.full(9, 180.0)}}
    ),
}
"""Cases of findings that no recorded run has."""


def cases(folder: Path) -> Iterator[tuple[str, Evidence]]:
    for path in TRACES:
        for name, text in json.loads(gzip.decompress(path.read_bytes()))["files"].items():
            (folder / name).write_text(text)
        yield f"{path.parent.name}/{path.name.removesuffix('.json.gz')}", Evidence.read(folder)
    yield from MADE.items()


def snapshot(folder: Path) -> str:
    """Each finding as the first case has it that has other words than those before, with numbers left out."""
    found: dict[str, dict[str, str]] = {}
    for name, given in cases(folder):
        for finding in run_rules(given):
            found.setdefault(finding.id, {}).setdefault(words_of(finding), lines(name, given, finding))
    parts = [f"## {name}\n\n" + "\n".join(texts.values()) for name, texts in sorted(found.items())]
    return "# Texts of all findings\n\nWritten by `make goldens`. Read what changed.\n\n" + "\n\n".join(parts) + "\n"


def words_of(finding: Finding) -> str:
    return re.sub(r"[\d.,]+ ?(ms|s|%|MiB|GiB|GB/s|MHz|min)?", "N", finding.text)


def lines(name: str, given: Evidence, finding: Finding) -> str:
    script = in_script_words(finding, given.record).text
    more = "" if script == finding.text else f"\n  - script: {script}"
    return f"- {name}: {finding.text}{more}"


DOCS = sorted(Path(__file__).parents[2].glob("docs/findings/*.md"))


def pattern(template: str) -> str:
    """Pattern of the texts that a template may give."""
    parts = re.split(r"(\[[^\[\]]*\])", template)
    texts = [".*?".join(map(re.escape, re.split(r"\{[^}]*\}", part.strip("[]")))) for part in parts]
    return "".join(f"(?:{text})?" if part[:1] == "[" else text for part, text in zip(parts, texts, strict=True))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_examples_in_the_docs_have_the_words_of_today(page: Path) -> None:
    tables = tomllib.loads(Path(words.__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    shown = "".join(
        re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    )
    for name, text in re.findall(r"^- (\w+) \(\w+\): (.*?)(?=^- |\Z)", shown, flags=re.MULTILINE | re.DOTALL):
        cases = [tables[name], *(case for case in tables[name].values() if isinstance(case, dict))]
        message = "|".join(pattern(case["message"]) for case in cases if "message" in case)
        advice = "|".join(pattern(case[key]) for case in cases for key in ("advice", "otherwise") if case.get(key))
        said = " ".join(text.split())
        assert re.fullmatch(f"(?:{message})(?: (?:{advice}))*(?: (?:Try: |Without it).*)?", said), said
        assert "(1.00 to" not in said


def test_the_texts_of_all_findings_are_those_that_were_read(tmp_path: Path) -> None:
    found = snapshot(tmp_path)
    if os.environ.get("WELLFED_UPDATE_GOLDEN") == "1":
        SNAPSHOT.write_text(found, encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", found, flags=re.MULTILINE)) == IDS
    assert found == SNAPSHOT.read_text(encoding="utf-8")
