"""Pictures take the colours of the page, are told in words, and are the same whenever they are drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from wellfed.explain.pages.picture import ACCENT, BAD, INK, SERIES, picture


def drawn(told: str = "two curves") -> str:
    with picture(4, 2) as found:
        axes = found.figure.add_subplot()
        for place, colour in enumerate((INK, ACCENT, BAD, *SERIES)):
            axes.plot([0, 1], [0, place], color=colour)
        axes.set_title("a < b")
        found.told = told
    return str(found.svg)


def test_its_colours_are_those_of_the_page() -> None:
    svg = drawn()
    assert {"currentColor", "var(--accent)", "var(--bad)", "var(--one)", "var(--four)"} <= set(
        re.findall(r"currentColor|var\(--\w+\)", svg)
    )
    assert not re.search("#0[0-9a-f]0", svg.replace('"#', " "))


def test_it_is_well_formed_and_as_wide_as_its_place() -> None:
    root = ElementTree.fromstring(drawn('<b> & "quoted"'))
    assert root.attrib["aria-label"] == '<b> & "quoted"'
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & root.attrib.keys()


def test_the_same_figures_give_the_same_picture() -> None:
    assert drawn() == drawn()
