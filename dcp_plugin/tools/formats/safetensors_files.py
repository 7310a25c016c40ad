"""safetensors: one file, or several files of a bounded size with an index from tensors to files.

The format: https://github.com/huggingface/safetensors#format. The index is that of Hugging Face's ``save_pretrained``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.foreign.safetensors import DTYPES, MOST_HEADER
from dcp_plugin.core.media import PAGE, NewFile
from dcp_plugin.tools.formats import Layout, Selected
from dcp_plugin.tools.stream import Part, Stream

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_LARGE = 1 << 20
"""Bytes of tensors from which on the tensors of a file begin at a page, so that they are written without a copy."""
_METADATA = "__metadata__"


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file: the length of the header, the header, and the tensors."""

    name: str
    parts: list[Part]
    header: bytes

    @classmethod
    def of(cls, name: str, named: Sequence[tuple[str, Part]], path: object) -> SafetensorsFile:
        """Lay out a file of these tensors. Tensors with the largest elements are first, so that all are aligned."""
        in_order = sorted(named, key=lambda pair: -pair[1].dtype.itemsize)
        header: dict[str, object] = {_METADATA: {"format": "pt"}}
        at = 0
        for key, part in in_order:
            if key == _METADATA:
                raise CheckpointMismatch(
                    f"{path}: {part.key} would be called {key}, which safetensors reserves for metadata. Leave "
                    f"it out, or rename it."
                )
            if part.dtype not in _NAMES:
                raise CheckpointMismatch(
                    f"{path}: {part.key} is {part.dtype}, which safetensors has no name for. Leave it out, or export "
                    f"as torch."
                )
            header[key] = {
                "dtype": _NAMES[part.dtype], "shape": list(part.sizes), "data_offsets": [at, at + part.nbytes]
            }  # fmt: skip
            at += part.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        begins_at = PAGE if at >= _LARGE else _ALIGNMENT
        text += b" " * (-(8 + len(text)) % begins_at)
        if len(text) > MOST_HEADER:
            raise CheckpointMismatch(f"{path} has too many keys for one safetensors file: give max_shard_size")
        return cls(name, [part for _, part in in_order], len(text).to_bytes(8, "little") + text)

    @property
    def size(self) -> int:
        return len(self.header) + sum(part.nbytes for part in self.parts)

    def write(self, file: NewFile, stream: Stream) -> None:
        file.write(self.header)
        for piece in stream:
            file.write(piece.data)


def layout(selected: Selected, stem: str, most: int | None) -> Layout:
    """Lay out the files of all selected tensors; one file if they have at most ``most`` bytes.

    Args:
        stem: The stem of the file names: ``<stem>.safetensors``, or ``<stem>-00001-of-00003.safetensors``.

    Raises:
        CheckpointMismatch: No tensor is selected, or the format does not have a dtype, a name or as many keys.
    """
    path = selected.reader.path
    named = [(selected.names[key], selected.part(key)) for key in selected.tensors]
    if not named:
        raise CheckpointMismatch(f"{path}: no tensor is selected, and a safetensors file has only tensors")
    shards = _shards(named, most)
    if len(shards) == 1:
        return Layout(selected, [SafetensorsFile.of(f"{stem}.safetensors", shards[0], path)])
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        files.append(SafetensorsFile.of(name, shard, path))
        weight_map.update(dict.fromkeys([key for key, _ in shard], name))
    total = sum(part.nbytes for _, part in named)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Layout(selected, [*files], {f"{stem}.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"})


def _shards(named: list[tuple[str, Part]], most: int | None) -> list[list[tuple[str, Part]]]:
    """Split the tensors, in order, into files of at most ``most`` bytes. A larger tensor has a file to itself."""
    shards: list[list[tuple[str, Part]]] = [[]]
    filled = 0
    for key, part in named:
        if shards[-1] and most is not None and filled + part.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append((key, part))
        filled += part.nbytes
    return shards
