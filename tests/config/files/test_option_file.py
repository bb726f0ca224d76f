import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from wellfed.config.files.option_file import (
    Value,
    check_name,
    comment_lines,
    in_ascii,
    is_read_as_value,
    write_files,
    yaml_lines,
)
from wellfed.errors import ConfigError


@pytest.mark.parametrize("name", ["on", "No", "4090", "", "a/b", "../x", "null", "a b", "x.yaml"])
def test_a_name_that_yaml_or_hydra_would_misread_is_refused(name):
    with pytest.raises(ConfigError, match="Write --write my_"):
        check_name(name, "--write")


@pytest.mark.parametrize("name", ["mine", "rtx4090", "my-card_2"])
def test_a_plain_name_will_do(name):
    check_name(name, "--write")


@pytest.mark.parametrize(
    ("name", "better"), [("é", "my_e"), ("größer", "my_groer"), ("日本", "my_plan"), ("a b", "my_a_b")]
)
def test_the_name_that_is_proposed_will_do(name, better):
    with pytest.raises(ConfigError, match=f"Write --write {better}\\.$"):
        check_name(name, "--write")
    check_name(better, "--write")


def test_the_flag_is_the_one_that_was_typed():
    with pytest.raises(ConfigError, match=r"--name 4090: .* Write --name my_4090\."):
        check_name("4090", "--name")


def test_lines_read_back_as_the_values_and_say_why():
    tree = {"a": Value([1, 2], "two\nlines"), "b": {"c": Value(None, "not known"), "d": Value("on", "a text")}}
    text = "\n".join([*comment_lines("head\n\nand tail"), *yaml_lines(tree)])
    assert yaml.safe_load(text) == {"a": [1, 2], "b": {"c": None, "d": "on"}}
    assert text.startswith("# head\n#\n# and tail\n# two lines\na: [1, 2]\nb:\n  # not known\n  c: null")


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "memory").write_text("")
    with pytest.raises(ConfigError, match=r"asked: .*memory.* can't be written"):
        write_files({tmp_path / "memory" / "a.yaml": "x"}, "asked")


@pytest.mark.parametrize("word", ["on", "Off", "NO", "yes", "true", "null", "nan", "inf", "y", "n"])
def test_what_is_read_as_a_value_is_no_name(word: str):
    typed = OverridesParser.create().parse_override(f"workload={word}").value()
    in_a_file = yaml.safe_load(f"name: {word}")["name"]
    assert not isinstance(typed, str) or not isinstance(in_a_file, str) or word in "yn"  # yaml 1.1 knows y and n
    assert is_read_as_value(word)


@pytest.mark.parametrize(
    ("text", "expected"), [("Réseau 4 GPU!", "Reseau_4_GPU"), ("größer", "groer"), ("日本", ""), ("a--b__", "a_b")]
)
def test_in_ascii(text: str, expected: str):
    assert in_ascii(text) == expected


def test_what_another_process_has_written_is_not_replaced_unless_it_may_be(tmp_path):
    path = tmp_path / "loader" / "a.yaml"
    write_files({path: "first"}, "--name a")
    with pytest.raises(ConfigError, match=r"--name a: .*loader/a\.yaml: there already\. Take another name\."):
        write_files({path: "second", tmp_path / "b": ""}, "--name a")
    assert path.read_text() == "first"
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"a.yaml"}
    write_files({path: "second"}, "--name a", replaces=True)
    assert path.read_text() == "second"
