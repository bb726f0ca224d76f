"""The pages under docs/ against the code that they describe."""

import dataclasses
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.every.test_pages import PAGES as TYPED_ELSEWHERE
from tests.kit.few import few
from wellfed import contract, errors, record
from wellfed.cli.main import COMMANDS
from wellfed.config.compose import compose
from wellfed.data.loader_parts import loader_of, without_loaders
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.explain.diagnosis.finding import word_of
from wellfed.observe.loggers import journal
from wellfed.observe.telemetry import metrics
from wellfed.sample_rng import SampleRng
from wellfed.train.memory import features as feature_rows
from wellfed.train.step.train_step import parameter_groups

ROOT = Path(__file__).parents[2]
WINGS = {
    path.stem
    for path in (ROOT / "src" / "wellfed").iterdir()
    if (path.is_dir() and path.name != "__pycache__") or (path.suffix == ".py" and path.stem != "__init__")
}
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "findings", ROOT / "docs" / "recipes", ROOT / "benchmarks")
    for path in folder.glob("*.md")
)

CONTRACT = tuple(
    f"docs/{name}.md" for name in ("workloads", "data_loaders", "streams", "features", "evaluation", "callbacks")
)
"""Pages that describe what a workload offers."""


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(name: str, head: str) -> dict[str, str]:
    """The tables of a page whose first column is headed so: first cell -> the others."""
    found = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n?)+)", page(name), flags=re.MULTILINE)
    assert found, f"{name} has no table of {head}"
    cells = [line.strip("| ").split(" | ", 1) for rows in found for line in rows.splitlines()]
    return {row[0].strip(): row[1] for row in cells}


def names(cells: Any) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def picture() -> list[list[str]]:
    """The lines of the layers' picture, highest first."""
    blocks = re.findall(r"^```\n(.*?)^```$", page("docs/architecture.md"), flags=re.MULTILINE | re.DOTALL)
    (layers,) = [block for block in blocks if block.startswith("__main__")]
    return [re.findall(r"\w+", line) for line in layers.splitlines()]


def test_every_wing_is_in_the_picture_and_in_the_table():
    assert len(WINGS) > 10
    drawn = [wing for line in picture() for wing in line]
    described = names(table("docs/architecture.md", "wing"))
    assert sorted(drawn) == sorted(WINGS)
    assert described == drawn


def test_every_file_that_the_architecture_names_is_there():
    named = re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|html\.j2))?)`", page("docs/architecture.md"))
    places = [place for place in named if place.partition("/")[0] not in ("logs", "src", "tests", "configs", "docs")]
    assert len(places) > 30
    assert [place for place in places if not (ROOT / "src" / "wellfed" / place).exists()] == []


def contracts(kind: str) -> list[dict[str, Any]]:
    linter = tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]
    return [entry for entry in linter["contracts"] if entry["type"] == kind]


def test_the_picture_is_what_import_linter_holds():
    (layers,) = contracts("layers")
    held = [re.findall(r"\w+", line) for line in layers["layers"]]
    assert held == picture()
    assert layers["exhaustive"]


def test_the_doors_are_what_import_linter_holds():
    doors = {
        tuple(names([library])): names([where]) for library, where in table("docs/architecture.md", "library").items()
    }
    held = {tuple(entry["protected_modules"]): entry["allowed_importers"] for entry in contracts("protected")}
    del doors[("pynvml",)]  # loaded by name, which import-linter can't see: tests/every/test_doors.py
    assert doors == held


def test_every_key_of_the_record_is_described():
    keys = names(table("docs/record.md", "key"))
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(record.RunRecord))


def test_every_status_and_kind_of_error_is_described():
    described = table("docs/record.md", "key")
    assert names([described["`status`"]]) == list(get_args(record.Status))
    assert set(get_args(errors.ErrorKind)) <= set(names([described["`error`"]]))


def test_every_event_is_described_and_written_somewhere():
    """mypy refuses any other kind in the code."""
    kinds = get_args(record.EventKind)
    assert set(kinds) == set(names(table("docs/record.md", "event")))
    code = "".join(path.read_text() for path in (ROOT / "src" / "wellfed").rglob("*.py") if path.name != "record.py")
    assert [kind for kind in kinds if f'"{kind}"' not in code] == []


def test_every_column_is_described():
    tables = page("docs/record.md").split("| column |")[1:]
    described = [re.findall(r"^\| `(\w+)` \|", rows, flags=re.MULTILINE) for rows in tables]
    own = [name for name in metrics.COLUMNS if name not in {metric.name for metric in metrics.METRICS}]
    assert described == [list(journal.STEP_COLUMNS), own, list(journal.METRIC_COLUMNS)]


def test_every_figure_that_is_watched_is_described():
    rows = table("docs/telemetry.md", "name")
    assert list(rows) == [f"`{metric.name}`" for metric in metrics.METRICS]
    ends = {"%": "_pct", "GiB": "_gib", "MB/s": "_mb_s", "W": "_w", "J": "_j", "°C": "_c", "MHz": "_mhz"}
    for metric in metrics.METRICS:
        unit, rate, source, meaning = rows[f"`{metric.name}`"].rstrip(" |").split(" | ")
        assert (rate, metric.name.endswith(ends.get(unit, "_limited"))) == (metric.rate, True)
        assert source
        assert meaning


def test_every_part_of_the_contract_is_described():
    text = "".join(map(page, CONTRACT))
    for kind in (contract.LossOutput, contract.Datasets, contract.Features):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"
    methods = {name for name in vars(contract.Evaluation) if not name.startswith("_")}
    for name in ("fetch", "on_device", "weight", "split", "reset", "update", "compute", "artifacts"):
        assert re.search(rf"\b{name}\(", text), name
    assert {"reset", "update", "compute", "artifacts"} <= methods


@pytest.fixture
def examples() -> dict[str, Any]:
    """Returns what the code blocks of the pages on the contract define."""
    blocks = re.findall(r"^```python\n(.*?)^```$", "".join(map(page, CONTRACT)), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    space: dict[str, Any] = {}
    for block in blocks:
        exec(block, space)
    return space


def test_the_parameter_groups_of_the_page_are_all_parameters(examples: dict[str, Any]):
    model = examples["Regressor"]()
    groups = parameter_groups(model)
    assert {id(each) for group in groups for each in group["params"]} == {id(each) for each in model.parameters()}
    assert [group["lr"] for group in torch.optim.AdamW(groups, lr=0.1).param_groups] == [1e-4, 0.1, 0.1]


def test_the_stream_of_the_page_is_shared_and_gone_on_with(examples: dict[str, Any], tmp_path: Path):
    paths = [tmp_path / f"{number}.pt" for number in range(3)]
    for number, path in enumerate(paths):
        torch.save(torch.arange(10 * number, 10 * number + 5), path)
    for settings in (LoaderSettings(), LoaderSettings("processes", 2, 2)):
        first, second = (train_loader(examples["Files"](paths), settings, batch_size=4, seed=1) for _ in range(2))
        seen = [delivery.batch for _, delivery in zip(range(2), first, strict=False)]
        second.load_state_dict(first.state_dict())
        seen += [delivery.batch for delivery in second]
        first.close()
        second.close()
        assert sorted(torch.cat(seen).tolist()) == [*range(5), *range(10, 15), *range(20, 25)]


def test_the_dataset_of_the_page_is_right(examples: dict[str, Any]):
    data = examples["Tracks"](torch.ones(5, 3, dtype=torch.uint8), torch.tensor([1, 2, 3, 2, 1]))
    assert isinstance(data, contract.TrainData)
    batch = data.fetch(torch.tensor([2, 3]), SampleRng(1, 0, 0))
    assert data.weight(batch) == 5
    whole = data.on_device(batch, SampleRng(1, 0, 0))["values"]
    part = data.on_device(data.fetch(torch.tensor([3]), SampleRng(1, 0, 7)), SampleRng(1, 0, 7))["values"]
    assert torch.equal(whole[1:], part)  # the draw belongs to the index, not to the batch
    assert not torch.equal(whole[0], whole[1])


def test_the_windows_of_the_page_are_the_same_in_all_modes(examples: dict[str, Any]):
    data = examples["datasets"](num_days=300)
    assert isinstance(data.train, contract.TrainData)
    rng, indices = SampleRng(1, 0, 0), torch.tensor([3, 0, len(data.val) - 1])
    whole = torch.stack([data.val[int(index)]["window"] for index in indices])
    assert whole[1, 0] == data.features.store()[data.val.first]
    of_data = feature_rows.of_data(data.features)
    for mode in contract.FEATURE_MODES:
        split, source = data.val.for_features(mode), feature_rows.hold(of_data, mode, torch.device("cpu"))
        fetched = split.fetch(indices, rng)
        assert set(fetched) == ({"row"} if mode == "cache" else {"row", "window"})
        batch = split.on_device(fetched, rng, source)
        assert torch.equal(torch.column_stack([batch["history"], batch["target"]]), whole)
        assert torch.equal(source.rows(fetched["row"]), whole)


def test_the_table_of_the_page_is_parsed_once(examples: dict[str, Any], tmp_path: Path):
    path = tmp_path / "numbers.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    first = examples["parsed"](path, tmp_path / "cache")
    again = examples["parsed"](path, tmp_path / "cache")
    assert first.tolist() == again.tolist() == [[1, 2], [3, 4]]
    assert len([folder for folder in (tmp_path / "cache" / "tables").iterdir() if folder.is_dir()]) == 1


def test_the_loaders_of_the_page_are_taken_apart(examples: dict[str, Any]):
    data = without_loaders(contract.Datasets(**examples["loaders"](batch_size=8)), seed=1)
    train = loader_of(data, "train")
    assert train is not None
    assert (train.batch_size, train.problem, train.sampled is not None) == (8, "", True)


def test_the_evaluation_of_the_page_is_additive(examples: dict[str, Any]):
    inputs, labels = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    model, evaluation = torch.nn.Identity(), examples["Accuracy"]()
    results = []
    for cut in (10, 4):
        evaluation.reset()
        for part in zip(inputs.split(cut), labels.split(cut), strict=True):
            evaluation.update(model, part)
        results.append(evaluation.compute())
    assert results[0] == results[1] == {"accuracy": int((inputs.argmax(1) == labels).sum()) / 10}


EXAMPLES = ("docs/first_workload.md", "docs/tutorial.md", "docs/recipes/")
"""Pages that tests/every/test_readme.py and test_recipes.py follow."""
LAUNCHERS_OF_EXTRAS = ("hydra/launcher=submitit_", "hydra/launcher=ray", "hydra.launcher.")
"""Overrides that only an extra of pyproject.toml can compose."""
WORDS_OF_FIT = ("target_util_pct=",)
"""What `python -m wellfed fit` takes beside overrides."""


def typed_commands(text: str) -> list[list[str]]:
    """Returns the commands of a page as words: lines of its blocks, continued ones joined, and code within sentences.

    Only calls of Python or make count. Code of a sentence with a ``<place>`` or ``...`` to fill in is no command.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences)]
    lines += [
        span for span in spans if re.search(r"src/|^(python -m )?wellfed ", span) and not re.search(r"<|\.\.\.", span)
    ]
    caller = r"(srun |torchrun |\.venv/bin/)?(--\S+ )*(python3? (-m wellfed|src/)|src/\w+\.py |wellfed )|make "
    return [shlex.split(line, comments=True) for line in lines if re.match(caller, line)]


def single_runs(overrides: list[str]) -> Iterator[list[str]]:
    """Yields overrides of single runs in which each value of each axis of a multirun occurs."""
    known = [re.sub(r"\$\w+", "1", text) for text in overrides if not text.startswith(LAUNCHERS_OF_EXTRAS)]
    axes = [
        [f"{parsed.input_line.partition('=')[0]}={value}" for value in values_of(parsed)]
        if parsed.is_sweep_override()
        else [parsed.input_line]
        for parsed in OverridesParser.create().parse_overrides(known)
    ]
    first = [values[0] for values in axes]
    yield first
    for place, values in enumerate(axes):
        yield from ([*first[:place], value, *first[place + 1 :]] for value in values[1:])


def values_of(parsed: Any) -> list[str]:
    """Returns the values of an axis, or the bounds of an interval."""
    if parsed.is_interval_sweep():
        return [str(parsed.value().start), str(parsed.value().end)]
    return list(parsed.sweep_string_iterator())


def hold(words: list[str]) -> None:
    """Fails where the command is none, or would be refused for its configuration."""
    if words[0] == "make":
        makefiles = page("Makefile") + page("{{cookiecutter.project_slug}}/Makefile")  # a project has some of its own
        targets = re.findall(r"^([a-z][\w-]*):", makefiles, flags=re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == [], words
        return
    if words[0] == "wellfed":
        is_entry = words[1] in ("train", "tune", "evaluate")
        words = ["python", *([f"src/{words[1]}.py"] if is_entry else ["-m", *words[:2]]), *words[2:]]
    script = next((word for word in words if word.startswith("src/")), None)
    if script is not None:
        assert (ROOT / script).is_file(), words
        given = words[words.index(script) + 1 :]
        assert {word for word in given if word.startswith("-")} <= {"-m", "--help", "--cfg", "--force", "--plan"}, words
        overrides = [word for word in given if "=" in word]
        for point in single_runs(overrides) if overrides else ():
            if "workload=mine" not in point:  # the workload of the example
                composes(Path(script).stem, *point)
        return
    module = words[words.index("-m") + 1]
    if module != "wellfed":
        assert importlib.util.find_spec(module), words
        return
    command, *given = words[words.index("-m") + 2 :]
    assert command in {known.name for known in COMMANDS}, words
    for point in single_runs([word for word in given if "=" in word and not word.startswith(WORDS_OF_FIT)]):
        if "workload=mine" not in point:  # the workload of the example
            composes("train", *point)


@cache
def composes(config_name: str, *overrides: str) -> None:
    """Fails where it does not; many pages show the same command."""
    compose(overrides, config_name)


@pytest.mark.parametrize(
    "name", [name for name in PAGES if not name.startswith((*EXAMPLES, *TYPED_ELSEWHERE))]
)  # whose blocks are run
def test_commands_of_a_page_can_be_typed(name: str):
    for words in typed_commands(page(name)):
        hold(words)


def test_commands_are_found():
    found = {name: typed_commands(page(name)) for name in PAGES}
    assert ["python", "-m", "wellfed", "plan", "gpu=8gb", "workload=recsys"] in found["docs/8gb.md"]
    assert any(words[0] == "torchrun" for words in found["docs/slurm_and_ray.md"])
    assert any(words[0] == "srun" for words in found["docs/slurm_and_ray.md"])
    assert ["python", "src/train.py", "resume=auto"] in found["docs/faq.md"]
    assert ["make", "check"] in found["CONTRIBUTING.md"]
    assert sum(map(len, found.values())) > 40


@pytest.mark.parametrize(
    "command",
    few(
        [
            "python src/train.py gpu=9gb",
            "python src/train.py loader.num_worker=2",
            "python src/train.py -m loader=baseline,blanced",
            "python src/train.py --quick",
            "python src/trian.py",
            "torchrun --nproc-per-node=2 src/train.py trainer=dpp",
            "srun python src/train.py sed=$SLURM_ARRAY_TASK_ID",
            "python -m wellfed dotcor",
            "python -m wellfed fit workload=resys target_util_pct=85",
            "python -m wellfed.config.refrence > docs/configuration.md",
            "make tset",
        ],
        5,
    ),
)
def test_a_command_that_is_wrong_is_caught(command: str):
    (words,) = typed_commands(f"```bash\n{command}\n```\n")
    with pytest.raises((AssertionError, errors.ConfigError)):
        hold(words)


def test_links_lead_somewhere():
    targets = [(name, target) for name in PAGES for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page(name))]
    local = [(name, target) for name, target in targets if not target.startswith("https://")]
    assert [(name, target) for name, target in local if not ((ROOT / name).parent / target).exists()] == []


def test_the_changelog_has_a_place_for_the_next_line():
    assert re.search(r"^## \[Unreleased\]\n", page("CHANGELOG.md"), flags=re.MULTILINE)
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/workloads.md"} <= set(PAGES)


_FAMILIES = ROOT / "src/wellfed/explain/diagnosis/rules"
RULES = {
    name: path.stem
    for path in _FAMILIES.glob("*_rules.py")
    for name in re.findall(r'\b[Ff]inding\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
}
"""Ids of findings, with the files of their rules."""


def test_every_rule_has_its_page_and_no_other_page_is_there():
    assert len(RULES) > 30
    assert {path.stem for path in (ROOT / "docs" / "findings").iterdir()} == {*RULES, "index"}


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_page_of_a_finding_asks_a_question_and_answers_it(name: str):
    text = page(f"docs/findings/{name}.md")
    assert re.match(rf"# [^\n]+\?\n\n`{name}`\n\n## What it means\n", text)
    heads = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert heads == ["What it means", "How it is decided", "What to type", "Example", "See also"]
    assert f"\n- {name} (" in text  # the text of the finding


def test_the_table_of_findings_links_to_every_page_once():
    found = [re.fullmatch(r"\[`(\w+)`\]\((\S+)\.md\)", cell) for cell in table("docs/findings/index.md", "id")]
    assert sorted(cell.groups() for cell in found if cell) == sorted((rule, rule) for rule in RULES)
    assert None not in found


FOLLOWED = {
    row["finding"] for row in json.loads(page("benchmarks/records/2026-11-27_advice_followed_cpu.json"))["results"]
}
"""Findings whose pages show a planted run before and after the advice."""
MEASURED = sorted(name for name in RULES if "\n| before |" in page(f"docs/findings/{name}.md") and name not in FOLLOWED)
"""Findings whose pages show a run of a workload before and after the override."""
READ_ONLY = {
    *("healthy", "unknown", "machine_was_slower", "busy_machine", "slow_start", "host_memory_full", "data_parallel"),
    "slow_handover",
}
"""Findings whose advice no recorded run follows: their pages say what to read from the example."""


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_example_of_a_page_is_a_run_before_and_after_or_says_what_to_read(name: str):
    (shown,) = re.findall(r"^## Example\n(.*?)^## See also", page(f"docs/findings/{name}.md"), re.MULTILINE | re.DOTALL)
    assert ("\n| before |" in shown) is (name not in READ_ONLY)
    assert ("\nWhat to read: " in shown) is (name in READ_ONLY)


@pytest.mark.parametrize("name", MEASURED)
def test_a_page_shows_the_rates_of_its_record_before_and_after(name: str):
    text = page(f"docs/findings/{name}.md")
    (path,) = re.findall(r"\.\./\.\./(benchmarks/records/\w+(?:-\w+)*_before_after_\w+\.json)", text)
    kept = [step for step in json.loads(page(path))["results"] if step["by"] == "findings" and step["kept"]]
    place = next(place for place, step in enumerate(kept) if step["why"] == name)
    before, after = kept[place - 1 : place + 1]
    assert name in before["findings"]
    typed = " ".join(word for word in after["typed"] if word not in before["typed"])
    for label, step in (("before", before), (f"`{typed}`", after)):
        (cells,) = re.findall(
            rf"^\| {re.escape(label)} \| ([\d,]+) \w+/s \|(?: (\d+) % \|)?$", text, flags=re.MULTILINE
        )
        busy = step["util_pct_mean"]
        assert cells == (f"{step['samples_per_s']:,.0f}", "" if busy is None else f"{busy:.0f}")


def test_the_verdicts_of_the_page_are_those_of_the_screen():
    rows = table("docs/findings/index.md", "verdict")
    *worded, _ = rows
    for verdict in worded:
        for finding in re.findall(r"\[(\w+)\]", rows[verdict]):
            assert word_of({"id": finding, "severity": "high"}).upper() == verdict
    named = set(re.findall(r"\[(\w+)\]", "".join(rows.values())))
    others = {
        name for name in RULES if word_of({"id": name, "severity": "high"}) == name.replace("_", " ").capitalize()
    }
    assert named | others == set(RULES)


def test_the_site_groups_the_pages_of_findings_as_the_rules_are():
    (findings,) = [entry["Findings"] for entry in yaml.safe_load(page("mkdocs.yml"))["nav"] if "Findings" in entry]
    assert findings[0] == {"All findings": "findings/index.md"}
    groups = [next(iter(entry.values())) for entry in findings[1:]]
    shown = [{name: path for entry in group for name, path in entry.items()} for group in groups]
    folders = [{RULES[name] for name in group} for group in shown]
    assert all(len(of_group) == 1 for of_group in folders)
    assert len(set().union(*folders)) == len(groups)
    assert {name: path for group in shown for name, path in group.items()} == {
        name: f"findings/{name}.md" for name in RULES
    }
