"""``dcp_plugin.export``: a checkpoint, or a part of one, in the format of another tool.

The stages of an export: open the checkpoint, select and rename keys, lay out the files of the format
(:mod:`dcp_plugin.tools.formats`), stream the tensors into the files, and publish the output under its name. If there
are several ranks, each writes some of the files.

The output appears complete, or not at all. On a disk, it is written to the workspace of saves
(:mod:`dcp_plugin.core.media.disk.commit`), and renamed when all files are durable. The next save in the same folder
deletes the files of a crashed export. In an object store, each object appears when it is complete. An export that fails
deletes the objects that it has written, and no others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch

from dcp_plugin.core.errors import CheckpointError, SaveFailed, as_html, one_line, size, some
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.media import medium_of, refuse_real_run
from dcp_plugin.core.media.copies import Output, exists, has_appeared, output_at
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.ranks.collectives import Call, Ranks, together
from dcp_plugin.core.ranks.groups import of_default_group
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.types import public_class
from dcp_plugin.tools.formats import Layout, Selected, hugging_face, safetensors_files, torch_files
from dcp_plugin.tools.formats.dcp_files import DcpCheckpoint
from dcp_plugin.tools.stream import Counter, Globs, Progress, Stream, renamed, select, texts

Format = Literal["hf", "safetensors", "torch", "lightning", "dcp"]

_FORMATS: dict[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "lightning"
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_TIMEOUT = 1800.0
_PATIENCE = 300.0
"""Seconds that a rank waits for the others to call. A script that exports on rank 0 alone fails, and does not hang."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class ExportReport:
    """The result of an export."""

    path: Where
    """The path of the output."""
    format: str
    files: list[str]
    """The names of the files in the output; of a single file, its name."""
    tensors: int
    values: int
    nbytes: int
    """Bytes of the tensors in the output."""
    left_out: list[str] = field(default_factory=list)
    """Keys of the checkpoint that the output does not have."""
    notes: list[str] = field(default_factory=list)
    """Notes for readers of the output, a line each."""
    seconds: float = 0.0

    _repr_html_ = as_html

    def __str__(self) -> str:
        left_out = f"; left out {len(self.left_out)} keys ({some(self.left_out, 3)})" if self.left_out else ""
        notes = "".join(f"\n{one_line(note)}" for note in self.notes)
        rate = size(self.nbytes / max(self.seconds, 1e-9))
        return (
            f"{self.path}: {self.format}, {self.tensors} tensors and {self.values} values in {len(self.files)} "
            f"file(s), {size(self.nbytes)} in {self.seconds:.1f} s ({rate}/s){left_out}{notes}"
        )


def export(
    path: PathLike,
    out: PathLike,
    format: Format | None = None,  # noqa: A002 - the name is public
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    config: PathLike | None = None,
    ranks: int = 1,
    allow_pickle: tuple[str, ...] = (),
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a checkpoint in another format. Collective if there is a process group: each rank writes some of the files.

    The tensors are streamed, so that memory does not grow with the checkpoint. ``out`` appears when it is complete.

    Args:
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        out: The output: a directory for ``"hf"`` and ``"dcp"``, a file for ``"torch"`` and ``"lightning"``. For
            ``"safetensors"`` a file if its name ends with ``.safetensors``, else a directory. It must not exist.
        format: ``"hf"``: a folder for ``from_pretrained`` of transformers: weights in safetensors files, with the
            configuration and the tokenizer from the checkpoint's directory or from ``config``. ``"safetensors"``: the
            tensors of the module, or those that ``include`` selects. ``"torch"``: one file for ``torch.load``, with
            the nesting of the saved state. ``"lightning"``: a ``.ckpt`` for stock Lightning. ``"dcp"``: a checkpoint
            of this package, which stock ``torch.distributed.checkpoint`` reads. By default that of the suffix of
            ``out`` (``.safetensors``, ``.pt``, ``.pth``, ``.bin``, ``.ckpt``), and ``"hf"`` for any other name.
        include: Globs of keys; if empty, the keys that the format is made for.
        exclude: Globs of keys to leave out.
        rename: Prefixes of keys -> prefixes in the output: ``{"model.": ""}``. For ``"hf"`` and ``"safetensors"``, all
            other keys lose the name of their module if the output has the tensors of one module alone.
        dtype: The dtype that floating-point tensors are converted to: ``"bfloat16"``, ``"bf16"`` or a dtype of torch.
        max_shard_size: The most bytes of a file, or a text such as ``"5GB"``, for ``"hf"`` (default 5 GB) and for
            directories of ``"safetensors"``.
        config: For ``"hf"``: a folder with the model's ``config.json``, and the tokenizer, if the checkpoint has none.
        ranks: For ``"dcp"``: the number of ranks that the checkpoint is laid out for.
        allow_pickle: Globs of keys whose values may be loaded by executing code from the checkpoint.
        io_threads: Threads that read.
        storage_options: Options of the stores of URLs, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes that this rank has written, and its bytes in all.

    Returns:
        The files, counts and notes of the output.

    Raises:
        SaveFailed: ``out`` exists, or cannot be written.
        CheckpointMismatch: A pattern matches nothing, or the format cannot hold the selected keys.
        UnsafeCheckpoint: A value cannot be loaded without executing code.
        CheckpointError: The checkpoint cannot be opened, or its bytes do not match their checksums.
        RankFailure: Some ranks do not call it within five minutes; ``dcp-plugin export`` needs no other ranks.

    Example:
        >>> import torch, dcp_plugin
        >>> model = torch.nn.Linear(2, 3)
        >>> dcp_plugin.save({"model": model, "optim": torch.optim.AdamW(model.parameters())}, "run/step-1")
        >>> dcp_plugin.export("run/step-1", "model.safetensors", format="safetensors").tensors
        2
        >>> from safetensors.torch import load_file
        >>> sorted(load_file("model.safetensors"))
        ['bias', 'weight']
    """
    began = time.monotonic()
    if format is None:
        format = _FORMATS.get(as_path(out, storage_options).suffix, "hf")  # noqa: A001
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} is none of {', '.join(get_args(Format))}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    to_dtype = _dtype(dtype)
    named = bool(texts(include)) or rename is not None
    most, target = _size(max_shard_size), as_path(out, storage_options)
    with together(Call("call export", f"exports {path}", ["export"])):
        group = of_default_group(_TIMEOUT, _PATIENCE)
    try:
        with CheckpointReader(path, io_threads=io_threads, storage_options=storage_options) as reader:
            names = group.agree("select keys", lambda: _names(reader, format, include, exclude, rename))
            selected = Selected(reader, names, to_dtype)
            config = config and as_path(config, storage_options)
            lay_out = partial(_laid_out, selected, target, format, most, config, ranks, allow_pickle, named)
            output = group.agree("lay out the files", lay_out)
            files = _written(output, target, group, progress)
            written = output.selected.names
            if reader.open().absent:
                output.notes.append(f"{reader.open().absent}. The output does not have them.")
            if format == "safetensors":
                front = next((key.removesuffix(name) for key, name in written.items() if key.endswith(name)), "")
                output.notes.append(f"Keys have their names in the checkpoint{front and f' without {front!r}'}.")
            left_out = [key for key in reader.index if key not in names and key not in written]
    finally:
        group.close()
    tensors = len(output.selected.tensors)
    return ExportReport(
        path=target,
        format=format,
        files=files,
        tensors=tensors,
        values=len(written) - tensors,
        nbytes=output.nbytes,
        left_out=left_out,
        notes=output.notes,
        seconds=time.monotonic() - began,
    )


def _dtype(named: str | torch.dtype | None) -> torch.dtype | None:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    dtype = getattr(torch, short.get(named, named).removeprefix("torch."), None) if isinstance(named, str) else named
    if named is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={named!r} is no floating-point dtype of torch")
    return dtype


def _size(text: int | str | None) -> int | None:
    """Return the bytes of a size such as ``"5GB"``."""
    if text is None or isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"max_shard_size={text!r}: it is a number of bytes, or text such as '5GB' or '512MiB'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size is not None and size < 1:
        raise ValueError(f"max_shard_size must be at least one byte, got {text!r}")
    return size


def _names(
    reader: CheckpointReader,
    made_as: Format,
    include: Globs,
    exclude: Globs,
    rename: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the selected keys -> their names in the output.

    For safetensors without ``include`` these are the tensors of the modules. If all are of one module, keys that
    ``rename`` does not name lose the name of the module.
    """
    index = reader.index
    chosen = select(index, include, exclude, reader.path)
    index.require_bounded(chosen)
    if made_as in ("hf", "safetensors"):
        chosen = [key for key in chosen if isinstance(index[key], StoredTensor)]
        if not texts(include):
            of_modules = [key for key in chosen if reader.kinds.get(key.partition(".")[0]) == "module"]
            chosen = of_modules or chosen
        names = {key.partition(".")[0] for key in chosen}
        if len(names) == 1 and reader.kinds.get(*names) == "module":
            others = [key for key in chosen if not key.startswith(tuple(rename or ()))]
            rename = {**({f"{names.pop()}.": ""} if others else {}), **(rename or {})}
    return renamed(chosen, rename or {}, reader.path)


class _Files:
    """An output of files with the names that another tool expects."""

    def __init__(self, layout: Layout, output: Output) -> None:
        self.selected, self.notes = layout.selected, layout.notes
        self._layout, self._output = layout, output
        self.begin, self.discard = output.begin, output.discard

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for file in self._layout.files for part in file.parts)

    def write(self, directory: Where, group: Ranks, progress: Progress | None) -> None:
        """Write this rank's files, and make them durable."""
        files = self._layout.files[group.rank :: group.size]
        count = Counter(sum(file.size for file in files), progress)
        for file in files:
            with self._output.create(directory, file.name, file.size, count.add) as new_file:
                file.write(new_file, Stream(self.selected.reader, file.parts))
        self._output.medium.flush(directory)

    def publish(self, directory: Where, written: list[None]) -> list[str]:
        """Write the last, small files, and publish the output under its name. Return the names of all files."""
        self._output.publish(directory, self._layout.last)
        return [*(file.name for file in self._layout.files), *self._layout.last]


def _laid_out(
    selected: Selected,
    out: Where,
    made_as: Format,
    most: int | None,
    config: PathLike | None,
    ranks: int,
    allow_pickle: tuple[str, ...],
    named: bool,
) -> _Files | DcpCheckpoint:
    """Return the output, of which nothing is written yet.

    Args:
        named: The caller selects keys or names, with ``include`` or ``rename``.
    """
    if made_as == "dcp":
        return DcpCheckpoint(selected, ranks, out)
    if made_as == "hf":
        return _Files(hugging_face.layout(selected, config, most, named), output_at(out, is_file=False))
    if made_as == "safetensors":
        is_file = out.name.endswith(".safetensors")
        stem = out.name.removesuffix(".safetensors") if is_file else "model"
        return _Files(safetensors_files.layout(selected, stem, None if is_file else most), output_at(out, is_file))
    lay_out = torch_files.layout if made_as == "torch" else torch_files.lightning_layout
    return _Files(lay_out(selected, out.name, allow_pickle), output_at(out, is_file=True))


def _written(output: _Files | DcpCheckpoint, out: Where, group: Ranks, progress: Progress | None) -> list[str]:
    """Write and publish the output. Return the names of its files.

    Raises:
        SaveFailed: The path exists, was taken meanwhile, or cannot be written.
    """

    def begin() -> Where:
        refuse_real_run(out.parent, medium_of(out))
        if exists(out):
            raise SaveFailed(f"{out} exists. Name another one, or delete it first.")
        return output.begin()

    def write() -> Any:
        with _named_failures(out):
            return output.write(directory, group, progress)

    def publish(written: list[Any]) -> list[str]:
        with _named_failures(out):
            if has_appeared(out):
                raise SaveFailed(f"{out} has come while it was written. Nothing was replaced.")
            return output.publish(directory, written)

    directory = group.from_zero(f"begin {out}", begin)
    try:
        return group.combine(f"write {out}", write, publish)
    except BaseException:
        output.discard()
        raise


@contextmanager
def _named_failures(out: Where) -> Iterator[None]:
    """Raise an error of the file system or the store as a SaveFailed that names ``out``."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise SaveFailed(f"cannot write {out}: {error}. {medium_of(out).advice}") from error
