"""Lets knobs that are lengths of time be typed as ``90s``, ``5min`` or ``2h``; their values stay numbers.

A knob is one by its name: ``_s`` holds seconds, ``_minutes`` minutes. A number without a unit is in that of the knob.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, FloatNode, IntegerNode, OmegaConf, ValueNode

from wellfed.config.knobs import entries
from wellfed.units import seconds_of


def read_times(schema: DictConfig, schema_type: type) -> None:
    """Makes the nodes of such knobs read times. They do so wherever values come from: files, overrides, axes."""
    for name, knob in entries(schema_type).items():
        if knob.unit_s is None:
            continue
        group, _, key = name.rpartition(".")
        owner = OmegaConf.select(schema, group)
        if owner is not None:
            node = _TimeInt() if knob.type is int else _TimeFloat()
            node.take_over(owner._get_node(key), knob.unit_s)
            owner.__dict__["_content"][key] = node


class _Time(ValueNode):
    """A number in a unit of time."""

    _unit_s: float

    def take_over(self, node: ValueNode, unit_s: float) -> None:
        """Takes the place of a node: its value, name, parent and type."""
        node._deepcopy_impl(self, {})
        self.__dict__["_unit_s"] = unit_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make: Any = type(self)
        copied = make()
        copied.take_over(self, self._unit_s)
        return copied

    def _number(self, value: Any) -> Any:
        """Returns a time as a number in this knob's unit; anything else as it is, for the node's own check."""
        if not isinstance(value, str) or not value.rstrip()[-1:].isalpha():
            return value
        try:
            number = seconds_of(value) / self._unit_s
        except ValueError:
            return value
        return int(number) if number.is_integer() else number


class _TimeFloat(_Time, FloatNode):
    def _validate_and_convert_impl(self, value: Any) -> float:
        return super()._validate_and_convert_impl(self._number(value))


class _TimeInt(_Time, IntegerNode):
    def _validate_and_convert_impl(self, value: Any) -> int:
        return super()._validate_and_convert_impl(self._number(value))
