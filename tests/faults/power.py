"""The states that a loss of power may leave, built from the recorded calls of a save.

The model: a disk keeps what was synced, and of what was not, any part. The contents of a file are durable when the file
was synced, the names in a directory when the directory was. A rename is one change of both its directories, as in every
journal, and durable with either. So a state is a moment of the recording, all that was durable by then, and any choice
of what was pending. This is the block-cache model of ALICE (Pillai et al., OSDI 2014), without the promises that single
file systems make beyond it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_EXCHANGE = 2


@dataclass(eq=False)
class Node:
    """A file, a directory or a link, as it was when it was made, or when the recording began."""

    data: bytes | None = None
    entries: dict[str, Node] | None = None
    target: str = ""


@dataclass(eq=False)
class Change:
    """One change of a disk. The sync of any node in ``of`` makes it durable."""

    of: tuple[Node, ...]
    names: tuple[tuple[Node, str, Node | None], ...] = ()
    """Directory, name, and what the name stands for from then on."""
    write: tuple[int, bytes] | None = None
    size: int | None = None
    said: str = ""


class Disk:
    """What the nodes are after some changes."""

    def __init__(self, root: Node, changes: Collection[Change] = ()) -> None:
        self.root = root
        self._entries: dict[Node, dict[str, Node]] = {}
        self._data: dict[Node, bytearray] = {}
        for change in changes:
            self.apply(change)

    def entries(self, node: Node) -> dict[str, Node]:
        if node not in self._entries:
            self._entries[node] = dict(node.entries or {})
        return self._entries[node]

    def data(self, node: Node) -> bytearray:
        if node not in self._data:
            self._data[node] = bytearray(node.data or b"")
        return self._data[node]

    def apply(self, change: Change) -> None:
        for directory, name, node in change.names:
            if node is None:
                self.entries(directory).pop(name, None)
            else:
                self.entries(directory)[name] = node
        data = self.data(change.of[0]) if change.write or change.size is not None else bytearray()
        if change.write:
            offset, written = change.write
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + len(written)] = written
        if change.size is not None:
            del data[change.size :]
            data.extend(bytes(change.size - len(data)))

    def put_at(self, path: Path) -> None:
        """Make a real directory of it."""
        self._put(self.root, path)

    def _put(self, node: Node, path: Path) -> None:
        if node.entries is not None:
            path.mkdir()
            for name, child in self.entries(node).items():
                self._put(child, path / name)
        elif node.target:
            path.symlink_to(node.target)
        else:
            path.write_bytes(self.data(node))

    def fingerprint(self) -> object:
        """Equal for equal trees."""
        return self._fingerprint(self.root)

    def _fingerprint(self, node: Node) -> object:
        if node.entries is not None:
            return tuple(sorted((name, self._fingerprint(child)) for name, child in self.entries(node).items()))
        return node.target or hash(bytes(self.data(node)))


@dataclass
class Recording:
    """Changes in order, and after how many of them which were durable."""

    root: Node
    changes: list[Change] = field(default_factory=list)
    moments: list[tuple[int, frozenset[int]]] = field(default_factory=list)

    def states(self) -> Iterator[tuple[str, Disk, bool]]:
        """Every state that is told apart: at each moment nothing and everything of what was pending, all but one and
        one alone of it, and four random choices.

        Yields:
            Words that say which, the state, and whether the process had come to its end by then.
        """
        seen: set[object] = set()
        chance = random.Random(0)
        for moment, (count, durable) in enumerate(self.moments, start=1):
            finished = moment == len(self.moments)
            pending = [at for at in range(count) if at not in durable]
            kept = [frozenset[int](), frozenset(pending)]
            kept += [frozenset([one]) for one in pending] + [frozenset(pending) - {one} for one in pending]
            kept += [frozenset(at for at in pending if chance.random() < 0.5) for _ in range(4)]
            for chosen in dict.fromkeys(kept):
                disk = Disk(self.root, [self.changes[at] for at in range(count) if at in durable or at in chosen])
                if (mark := (disk.fingerprint(), finished)) not in seen:
                    seen.add(mark)
                    lost = [self.changes[at].said for at in pending if at not in chosen]
                    yield f"after {count} of {len(self.changes)} changes, lost: {lost}", disk, finished


def tree(path: Path) -> Node:
    """What is at a path now."""
    if path.is_symlink():
        return Node(target=os.readlink(path))
    if path.is_dir():
        return Node(entries={child.name: tree(child) for child in path.iterdir()})
    return Node(data=path.read_bytes())


def recording(begun: Node, root: Path, log: Path) -> Recording:
    """The recording of a process that found ``begun`` at ``root``."""
    told = Recording(begun)
    now = Disk(begun)
    data, used = Path(f"{log}.data").read_bytes(), 0
    synced: set[int] = set()

    def parent_of(path: str) -> tuple[Node, str]:
        node, parts = begun, Path(path).relative_to(root).parts
        for part in parts[:-1]:
            node = now.entries(node)[part]
        return node, parts[-1]

    def node_at(path: str) -> Node:
        if Path(path) == root:
            return begun
        directory, name = parent_of(path)
        return now.entries(directory)[name]

    for line in log.read_text().splitlines():
        call, one, other, first, second = line.split("\t")
        a, b = int(first), int(second)
        where = " ".join(
            filter(None, [call, *(os.path.relpath(p, root) for p in (one, other) if p.startswith(str(root)))])
        )
        if call == "sync":
            node = node_at(one)
            synced |= {at for at, change in enumerate(told.changes) if node in change.of}
        else:
            if call in ("create", "mkdir", "remove"):
                directory, name = parent_of(one)
                made = {"create": Node(data=b""), "mkdir": Node(entries={}), "remove": None}[call]
                change = Change((directory,), ((directory, name, made),), said=where)
            elif call in ("link", "symlink"):
                directory, name = parent_of(other)
                made = node_at(one) if call == "link" else Node(target=one)
                change = Change((directory,), ((directory, name, made),), said=where)
            elif call == "rename":
                (from_dir, from_name), (to_dir, to_name) = parent_of(one), parent_of(other)
                replaced = node_at(other) if a == _EXCHANGE else None
                names = ((from_dir, from_name, replaced), (to_dir, to_name, node_at(one)))
                change = Change((from_dir, to_dir), names, said=where)
            elif call == "write":
                change = Change((node_at(one),), write=(a, data[used : used + b]), said=where)
                used += b
            else:
                size = a if call == "truncate" else max(a + b, len(now.data(node_at(one))))
                change = Change((node_at(one),), size=size, said=where)
            told.changes.append(change)
            now.apply(change)
        told.moments.append((len(told.changes), frozenset(synced)))
    return told
