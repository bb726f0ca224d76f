"""Each threshold has a name of its own."""

import ast
from collections import Counter
from pathlib import Path

from wellfed.explain.diagnosis import thresholds


def test_no_name_is_given_twice():
    tree = ast.parse(Path(thresholds.__file__).read_text(encoding="utf-8"))
    names = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    assert names
    assert [name for name, number in names.items() if number > 1] == []
