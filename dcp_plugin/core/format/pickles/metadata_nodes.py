"""Objects of a ``.metadata`` as the nodes of its pickle (:mod:`~dcp_plugin.core.format.pickles.nodes`).

A tensor has five objects there, and a checkpoint may have a million tensors. The attributes of many objects are
therefore read as columns, and no object is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_plugin.core.format.pickles.nodes import Name, Node

_MOST_FIELDS = 16
"""Most attributes of an object. Otherwise one dictionary of millions could be the state of each of millions of objects,
which takes quadratic time."""


def kind_of(node: Any) -> Any:
    """Return the object that stands for the class or function that a node calls; None for any other node."""
    return node[0].value if type(node) is Node and type(node[0]) is Name else None


def state_of(record: Any, kind: str) -> Any:
    """Return the state of an object; None if it has none. Raises ValueError for an object of another class."""
    if kind_of(record) != kind or len(record) not in (3, 4):
        raise ValueError(f"a record is not a {kind}")
    return record[3] if len(record) == 4 else None


def items_of(node: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of a dictionary. Raises ValueError for any other node."""
    first = 3 if kind_of(node) == "OrderedDict" else 1
    if type(node) is not Node or len(node) % 2 == 0 or (first == 1 and node[0] is not None):
        raise ValueError("an entry is not a dictionary")
    return node[first::2], node[first + 1 :: 2]


def fields(record: Any, kind: str) -> dict[str, Any]:
    """Return the attributes that an object was built with. Raises ValueError for an object of another class."""
    state = state_of(record, kind)
    names, values = ([], []) if state is None else items_of(state)
    if len(names) > _MOST_FIELDS or not all(type(name) is str for name in names):
        raise ValueError(f"a {kind} whose attributes have no names, or are too many")
    return dict(zip(names, values, strict=True))


def columns_of(records: Sequence[Any], kind: str, *names: str, maybe: str = "") -> list[list[Any]]:
    """Return attributes of many objects of a class, one list per attribute: :func:`fields` for millions.

    Args:
        maybe: Another attribute, which is None for an object without it.

    Raises:
        ValueError, KeyError: A record is no such object, or lacks an attribute.
    """
    columns: list[list[Any]] = [[] for _ in range(len(names) + bool(maybe))]
    name, field_names = None, [""]
    for record in records:
        # Nearly all objects have the class and the attributes of the object before them, in the same order. Then the
        # places of the attributes are known, and no dictionary is made.
        state = record[3] if type(record) is Node and len(record) == 4 and record[0] is name else None
        if type(state) is not Node or state[0] is not None or state[1 : 2 * _MOST_FIELDS + 2 : 2] != field_names:
            known = fields(record, kind)
            if not known.keys() >= set(names):
                raise KeyError(f"a {kind} without {names}")
            name, state = record[0], record[3]
            field_names = items_of(state)[0]
            wanted = (*names, maybe)[: len(columns)]
            at = [2 * field_names.index(field) + 2 if field in known else None for field in wanted]
        for column, place in zip(columns, at, strict=True):
            column.append(None if place is None else state[place])
    return columns
