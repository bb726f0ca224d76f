import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from wellfed.config.option_names import in_ascii, is_read_as_value


@pytest.mark.parametrize("word", ["on", "Off", "NO", "yes", "true", "null", "nan", "inf", "y", "n"])
def test_what_is_read_as_a_value_is_no_name(word: str):
    typed = OverridesParser.create().parse_override(f"workload={word}").value()
    in_a_file = yaml.safe_load(f"name: {word}")["name"]
    assert not isinstance(typed, str) or not isinstance(in_a_file, str) or word in "yn"  # yaml 1.1 knows y and n
    assert is_read_as_value(word)


@pytest.mark.parametrize("word", ["mine", "none", "once", "nano", "online"])
def test_other_words_are_names(word: str):
    assert OverridesParser.create().parse_override(f"workload={word}").value() == word
    assert yaml.safe_load(f"name: {word}")["name"] == word
    assert not is_read_as_value(word)


@pytest.mark.parametrize(
    ("text", "expected"), [("Réseau 4 GPU!", "Reseau_4_GPU"), ("größer", "groer"), ("日本", ""), ("a--b__", "a_b")]
)
def test_in_ascii(text: str, expected: str):
    assert in_ascii(text) == expected
