"""Paths as overrides: Hydra reads back what was meant."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kit.examples import examples
from wellfed.config.quoting import assigned, key_value, quoted, unquoted

PARSER = OverridesParser.create()


def read_by_hydra(override):
    value = PARSER.parse_override(override).value()
    return getattr(value, "text", value)


PATHS = st.text(st.sampled_from("ab1e.0/_-+ '\"\\=,()[]{}:~@%é#*?|$&!\ttruenifX\n"), min_size=1) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
)


@examples(50)
@given(PATHS)
@example("runs/a=b (2)/it's \\'here\\")
@example("1e3")
@example("2024_01")
@example("true")
@example("~/data")
def test_hydra_reads_back_any_path_that_we_assign(path):
    override = assigned("resume", path)
    if path.lower() != "null":  # which means none, also without quotes
        assert read_by_hydra(override) == path
    assert unquoted(key_value(override)[1]) == path


@examples(37)
@given(PATHS)
def test_a_path_typed_plainly_is_read_as_typed(path):
    if path[0] in "'\"" or "${" in path or path.lower() == "null":
        return  # quoted for Hydra, an interpolation, nothing: the user's own
    path = path.replace(r"\=", "=")  # escaped for Hydra
    assert read_by_hydra(quoted(f"workload.data.path={path}")) == path
    assert quoted(quoted(f"workload.data.path={path}")) == quoted(f"workload.data.path={path}")


def test_marks_of_the_key_stay():
    assert quoted(r"resume=a/epoch\=3.ckpt") == quoted("resume=a/epoch=3.ckpt") == "resume='a/epoch=3.ckpt'"
    assert quoted("+paths.cache_dir=a b") == "+paths.cache_dir='a b'"
    assert quoted("++hydra.run.dir=a=b") == "++hydra.run.dir='a=b'"
