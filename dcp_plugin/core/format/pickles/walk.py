"""Walk from the inert nodes of a pickle to values, within a budget.

A few bytes of a pickle can name a list many times, which names another list many times, and so on. Code that saves,
compares or prints the value takes each of these paths. The walk therefore counts a node once for each path that leads
to it, and refuses a value with more paths than the pickle has bytes.

The walk is a depth-first search without recursion, because Python ends a deep recursion. Each node becomes a value
once: two references to an object stay references to one object.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from types import MemberDescriptorType
from typing import Any

import torch

from dcp_plugin.core.errors import UnsafeCheckpoint
from dcp_plugin.core.format.pickles.nodes import Name, Node

DEPTH = 1000
"""Most containers in each other. Python cannot save deeper ones."""
FEW = 100_000
"""Nodes that any pickle may have. A pickle with more bytes may have as many nodes as bytes."""
_ALIKE = 100
"""Most keys of a dictionary, or elements of a set, with the same hash. An attacker can make numbers collide, and a
dictionary takes quadratic time for these."""
LEAVES = frozenset({str, int, float, bool, type(None)})
_FREE = 1 << 26
_COPIES = 40
"""Factor of the memory allowance: copies may take 64 MiB, and 40 times the size of the pickle."""


def allowance(nbytes: int) -> int:
    """Return the bytes of memory that ``nbytes`` of a file may expand to."""
    return _FREE + _COPIES * nbytes


class Refused(Exception):
    """Error for a global that only executing code would restore. The message is its name."""


class _Frame:
    """Node whose children are being walked."""

    __slots__ = ("height", "left", "made", "node", "rest", "target")

    def __init__(self, node: Sequence[Any], left: int) -> None:
        self.node = node
        is_known = type(node) is Node and (node[0] is None or type(node[0]) is Name)
        self.rest: Iterator[Any] = iter(node)
        self.made = [next(self.rest)] if is_known else []
        """Values of the children so far. The kind of a node stays as it is."""
        self.target: Any = {} if is_known and node[0] is None else None
        """Value of the node, if it is made before the values of its children, which may refer to it."""
        self.left, self.height = left, 1


class Walk:
    """Walk from nodes to values. A subclass makes what calls and storages become.

    Args:
        nbytes: Bytes of the pickle.
        notes: List to which a line is added for each object that becomes a plain value.
    """

    def __init__(self, nbytes: int, notes: list[str] | None = None) -> None:
        self.notes = [] if notes is None else notes
        # ``left`` counts down by one per node and path. The size of a node is the difference between two states of it.
        self.left = self._most = max(FEW, nbytes)
        self._memory = allowance(nbytes)
        self._seen: dict[int, _Frame | tuple[Any, int, int]] = {}
        """The walked nodes, by ``id``: their values, sizes and heights; or the frame of a node that is not complete."""
        self.never_hashed: set[type] = set()
        """Classes whose objects would run their methods as keys, or in a set."""

    def of(self, root: Any) -> Any:
        """Return the value of a node.

        Raises:
            UnsafeCheckpoint: The value exceeds the budget.
            Exception: The node is no value.
        """
        frames = [frame := _Frame((root,), self.left)]
        while True:
            for child in frame.rest:
                self.left -= 1
                kind = type(child)
                if kind is Name:
                    frame.made.append(self.named(child))
                elif kind not in (tuple, list, Node):
                    frame.made.append(child)
                elif kind is not Node and LEAVES.issuperset(map(type, child)):  # a shape, or a list of numbers
                    self.left -= len(child)
                    frame.made.append(child)
                    frame.height = max(frame.height, 2)
                    self._check(frame.height)  # each further path to it takes the time of its length again
                elif (seen := self._seen.get(id(child))) is None:
                    frame = self._seen[id(child)] = _Frame(child, self.left)
                    frames.append(frame)
                    break
                elif isinstance(seen, _Frame):
                    frame.made.append(self._unfinished(seen))
                else:  # walked before: all its parts count again, and its value is shared
                    value, size, height = seen
                    self.left -= size
                    frame.made.append(value)
                    frame.height = max(frame.height, height + 1)
            else:  # all children have values
                frames.pop()
                if not frames:
                    self._check(frame.height)
                    return frame.made[0]
                value = self._value_of(frame)
                if isinstance(value, torch.Tensor):  # one part: its arguments are no parts of the value
                    self.left = frame.left
                self._seen[id(frame.node)] = value, frame.left - self.left, frame.height
                height, frame = frame.height, frames[-1]
                frame.made.append(value)
                frame.height = max(frame.height, height + 1)
            self._check(len(frames) + frame.height)

    def _check(self, depth: int) -> None:
        if self.left < 0 or depth > DEPTH + 2:
            raise UnsafeCheckpoint(
                f"its values have more than {self._most} parts, counted once for each path that leads to them, or more "
                f"than {DEPTH} containers in each other"
            )

    def _value_of(self, frame: _Frame) -> Any:
        node, made = frame.node, frame.made
        if type(node) is tuple:
            if all(map(operator.is_, node, made)):
                return node
            if frame.target is not None:
                raise ValueError("its pickle has a tuple with itself in it")
            return tuple(made)
        if type(node) is list:
            node[:] = made
            return node
        if node[0] is None:
            self.put(frame.target, made[1::2], made[2::2])
            return frame.target
        if type(node[0]) is not Name:
            return self.persistent_load(made[0]) if len(made) == 1 else self.called_object(made[0])
        name, args, is_new, *items = made
        state = (items.pop(),) if len(items) % 2 else ()
        target = self.called(name, args, is_new) if frame.target is None else frame.target
        return self.filled(target, name, args, items, state)

    def _unfinished(self, frame: _Frame) -> Any:
        """Return the value of a node that one of its own children refers to."""
        if frame.target is None:
            frame.target = self.called(*frame.made[:3]) if type(frame.node) is Node else frame.node
        if frame.target is None:
            raise ValueError("its pickle has an object that refers to itself before it is made")
        return frame.target

    def put(self, target: MutableMapping[Any, Any], keys: list[Any], values: list[Any]) -> None:
        """Put items into a dictionary."""
        if len(keys) != len(values):
            raise ValueError("its pickle fills a dictionary with a key that has no value")
        self.check_hashes(keys)
        target.update(zip(keys, values, strict=True))
        if "__setstate__" in target:  # it could become the method of an object that is filled with these items
            raise ValueError("its pickle has the key __setstate__")

    def check_hashes(self, keys: list[Any]) -> None:
        """Check that hashing the keys takes linear time, and runs no method of a user's class."""
        todo = list(keys) if self.never_hashed else []
        while todo:
            key = todo.pop()
            if type(key) in self.never_hashed:
                raise ValueError(f"its pickle has a {type(key).__qualname__} as a key or in a set")
            todo += tuple.__iter__(key) if isinstance(key, tuple) else ()
        if len(keys) > _ALIKE and max(Counter(map(hash, keys)).values()) > _ALIKE:
            raise UnsafeCheckpoint(f"more than {_ALIKE} keys of a dictionary or a set have the same hash")

    def spend(self, parts: Any, nbytes: int = 0) -> None:
        """Count texts and bytes among the parts, and ``nbytes``, as copied. Raise UnsafeCheckpoint above the limit."""
        self._memory -= max(0, nbytes) + sum(len(part) for part in parts if isinstance(part, (str, bytes)))
        if self._memory < 0:
            raise UnsafeCheckpoint("its pickle refers to large objects too often")

    def named(self, name: Name) -> Any:
        """Return the value of a global that is not called."""
        raise ValueError(f"its pickle has {name.of} as a value")

    def persistent_load(self, identifier: Any) -> Any:
        """Return a storage."""
        raise ValueError(f"its pickle has the storage {identifier!r:.99}")

    def called_object(self, target: Any) -> Any:
        """Return the result of a call of an object that is no global, such as a class within another class."""
        raise ValueError("its pickle calls an object that is not a global")

    def called(self, name: Name, args: Any, is_new: bool) -> Any:
        """Return the object that a call makes, before it is filled; None if it needs its state first."""

    def filled(self, target: Any, name: Name, args: Any, items: list[Any], state: tuple[Any, ...]) -> Any:
        """Return the object with its items, key and value in turn, and its state, a tuple of one or none."""


def require_kinds(of: str, args: Any, kinds: Sequence[Any] | None) -> None:
    """Check the arguments of a call by their types. The last ones may be absent; ``kinds`` is None for any arguments.

    Raises:
        ValueError: The arguments are others.
    """
    are_known = type(args) is tuple and (kinds is None or len(args) <= len(kinds))
    if not are_known or not all(map(isinstance, args, kinds or ())):
        raise ValueError(f"its pickle calls {of} with other arguments than torch.save writes")


def fill(target: Any, state: Any) -> None:
    """Set the attributes of an object, without a call of its class."""
    # A class with __slots__ has a pair as its state. A slot is set by its own descriptor, never by a property.
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(target).update({str(name): value for name, value in attributes.items()})
    for name, value in (slots or {}).items():
        descriptor = next((vars(base)[name] for base in type(target).__mro__ if name in vars(base)), None)
        if not isinstance(descriptor, MemberDescriptorType):
            raise Refused(f"{type(target).__qualname__}.{name}")
        descriptor.__set__(target, value)
