"""What is written as yaml is read back as it was, by OmegaConf as by others."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from wellfed.config.compose import compose, to_yaml

TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30).filter(lambda text: "${" not in text)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = TEXTS.filter(bool)
NODES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, NODES, max_size=3))
def test_every_tree_is_read_back(tree: dict[str, object]) -> None:
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(tree))) == tree


@pytest.mark.parametrize(
    "text",
    ["1e5", "1E-3", "nan", "inf", ".5", "1_000", "0x1f", "0o7", "1:30", "2026-01-01", "~", "null", "y", "Off", "${a}"],
)
def test_a_text_stays_a_text(text: str) -> None:
    written = to_yaml({"a": text})
    assert OmegaConf.to_container(OmegaConf.create(written)) == {"a": text}
    assert yaml.safe_load(written) == {"a": text}


def test_the_files_of_a_run_say_what_omegaconf_writes() -> None:
    tree = OmegaConf.to_container(OmegaConf.create(compose(["workload=recsys"]).yaml()))
    assert yaml.safe_load(to_yaml(tree)) == yaml.safe_load(OmegaConf.to_yaml(tree))
    assert list(yaml.safe_load(to_yaml(tree))) == list(tree)


def test_a_name_that_is_no_utf8_is_written_too() -> None:
    name = b"/tmp/l\xe9".decode(errors="surrogateescape")
    assert yaml.safe_load(to_yaml({"a": name, "b": "é"})) == {"a": name, "b": "é"}
