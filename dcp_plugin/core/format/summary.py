"""``dcp_plugin.json``: the facts that a person needs about a checkpoint before opening it.

The rule: a reader reads one format version. A checkpoint of any other version is refused (:class:`OtherFormat`), and
never taken for a damaged one.

The last key, ``sha256``, is the hash of all bytes before its line, and its value must be followed by fixed characters.
No byte of the file changes unnoticed: a changed ``time`` would make ``keep_last`` delete the newest checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointUnreadable, SaveFailed, damage_in
from dcp_plugin.core.format import INDEX, MOST_JSON, SUMMARY, json_object
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.types import VERSION

FORMAT_VERSION = 5
"""Format version of this file. Raise it for a change to any file of a checkpoint: saves and deletions read no other."""
INDEX_VERSION = 4
"""Format version of the index file."""
_WITHOUT_HASH = (1, 2)
"""Format versions of summaries without ``sha256``, which end with ``format_version``."""
_HASH, _END = b',\n  "sha256": "', b'"\n}\n'
MAX_SIZE = MOST_JSON
"""Largest size in bytes. A reader needs at most one byte more to detect a larger file."""
_MOST_NUMBER = 1 << 63
MOST_METRICS, _LONGEST_METRIC = 1000, 256
"""Most metrics of one checkpoint, and most characters in the name of a metric."""
_NOT_FINITE = ("nan", "inf", "-inf")
"""Values for which JSON has no numbers, as ``str`` writes them."""
_MOST_FLOAT = sys.float_info.max


class OtherFormat(CheckpointUnreadable):
    """Error for a checkpoint that another version of this package saved in a format that this version does not read."""

    @classmethod
    def check(cls, label: str, version: int, readable: int, saved_by: object = None) -> None:
        """Check that the file ``label`` has the format version that this version of the package reads.

        Raises:
            OtherFormat: It has another version.
        """
        if version == readable:
            return
        written = f" of dcp-plugin {saved_by}" if isinstance(saved_by, str) else ""
        newer = " Upgrade: pip install --upgrade dcp-plugin." if version > readable else ""
        raise OtherFormat(
            f"{label} is of format version {version}{written}, and this version of dcp_plugin ({VERSION}) reads "
            f"version {readable}. Nothing is damaged. Stock's torch.distributed.checkpoint.load reads the checkpoint."
            f"{newer}"
        )


@dataclass(frozen=True)
class Base:
    """Checkpoint with the parameters that another checkpoint leaves out, because they were loaded from it.

    ``path`` is its path at the time of the load, and ``fingerprint`` identifies its content.
    """

    path: Where
    fingerprint: str

    @classmethod
    def of_summary(cls, entry: dict[str, Any], checkpoint: object) -> Base:
        """Return the base in a summary. Raises CheckpointCorrupt, which names the checkpoint, if it has none."""
        if not all(isinstance(entry.get(name), str) for name in ("path", "fingerprint")):
            raise CheckpointCorrupt(
                f"{checkpoint}/{SUMMARY} does not name the base with the values that the checkpoint leaves out"
            )
        try:
            return cls(as_path(entry["path"]), entry["fingerprint"])
        except ValueError as error:
            raise CheckpointCorrupt(f"{checkpoint}/{SUMMARY} has an invalid path of the base: {error}") from error

    def to_summary(self) -> dict[str, str]:
        return {"path": str(self.path), "fingerprint": self.fingerprint}


MOST_DIFFERING = 20


@dataclass(frozen=True)
class Summary:
    """Content of ``dcp_plugin.json``.

    - ``index_sha256``, ``metadata_sha256``: hashes of the other two files of the same save
    - ``save_id``: equal to that in the ``storage_meta`` of ``.metadata``
    - ``kinds``: ``module`` or ``optimizer`` by the name in the saved state. A load under other names finds the only
      object of a kind by it.
    - ``optimizers``: class of each optimizer by name
    - ``attached``: extra files of the save
    - ``reused``: the ``bytes`` and ``items`` that were linked from the checkpoint ``from`` instead of written
    - ``base``: checkpoint (:class:`Base`) with the parameters that this one leaves out
    - ``exclude``: globs of keys that were not saved
    - ``metrics``: numbers that belong to the checkpoint, such as its validation loss; also NaN and infinity
    - ``launch``: the launch (torchrun's, SLURM's) and the rank that published the checkpoint
    - ``differing``: keys of parameters or optimizer state that differed between ranks, with the ranks, at this save or
      an earlier one of the run; the first :data:`MOST_DIFFERING`
    """

    step: int | None
    time: float
    world_size: int
    tensors: int
    values: int
    payload_bytes: int
    index_sha256: str
    metadata_sha256: str
    save_id: str
    kinds: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, str] = field(default_factory=dict)
    layouts: list[str] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    reused: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    exclude: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    differing: dict[str, list[int]] = field(default_factory=dict)
    format: str = "dcp_plugin"
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """Return the bytes of the file. Raises SaveFailed if it would be larger than a reader accepts."""
        metrics = {name: value if isfinite(value) else str(value) for name, value in self.metrics.items()}
        data = with_hash(asdict(self) | {"metrics": metrics})
        if len(data) > MAX_SIZE:
            raise SaveFailed(
                f"the summary would have {len(data)} bytes, more than the limit of {MAX_SIZE}: the state has too many "
                f"modules or layouts"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, label: str) -> Summary:
        """Return the summary in a file, which messages call ``label``.

        Raises:
            CheckpointCorrupt: The file is no summary.
            OtherFormat: The file is a summary of another version.
        """
        try:
            entries = json_object(data)
            _check_hash(data, entries)
            if entries["format"] != "dcp_plugin":
                raise ValueError("not a summary of dcp_plugin")
            saved_by = entries.get("versions", {}).get("dcp_plugin")
            OtherFormat.check(label, entries["format_version"], FORMAT_VERSION, saved_by)
            own_fields = {name: entries[name] for name in cls.__dataclass_fields__ if name in entries}
            summary = cls(**own_fields | {"metrics": decode_metrics(entries.get("metrics", {}))})
            # Each conversion raises for a value of another type.
            float(summary.time), int(summary.world_size), int(summary.step or 0), dict(summary.versions)
            bound = (summary.index_sha256, summary.metadata_sha256, summary.save_id)
            if not all(
                isinstance(text, str) for text in (*bound, *summary.kinds.values(), *summary.optimizers.values())
            ):
                raise ValueError("fingerprints, the save's id, kinds and classes must be text")
            int(summary.reused.get("bytes", 0)), int(summary.reused.get("items", 0))
            numbers = [summary.time, summary.step or 0, summary.world_size, summary.payload_bytes]
            if not all(type(number) in (int, float) and abs(number) < _MOST_NUMBER for number in numbers):
                raise ValueError("times, steps and counts must be numbers")
            if not all(type(rank) is int for ranks in summary.differing.values() for rank in ranks):
                raise ValueError("differing must have numbers of ranks")
            if not all(isinstance(glob, str) for glob in summary.exclude) or not isinstance(summary.base, dict):
                raise ValueError("exclude must be a list of text, and base an object")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{label} is damaged: {error}") from error
        return summary


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers by name, as a summary holds them.

    Args:
        metrics: Numbers, or objects that hold one: a tensor or an array of one element.

    Raises:
        SaveFailed: A value is no number (the message names it), a name is too long, or there are too many metrics.
    """
    if len(metrics) > MOST_METRICS:
        raise SaveFailed(f"{len(metrics)} metrics are given, but a checkpoint takes at most {MOST_METRICS}")
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or len(name) > _LONGEST_METRIC:
            raise SaveFailed(f"a metric's name must be text of at most {_LONGEST_METRIC} characters, not {name!r:.300}")
        try:
            numbers[name] = float(value if hasattr(value, "__float__") else value.__index__())
        except Exception as error:
            raise SaveFailed(
                f"the metric {name!r} is a {type(value).__name__}, not a number ({error}). Give numbers, or tensors "
                f"of one element."
            ) from error
    return numbers


def decode_metrics(entries: object) -> dict[str, float]:
    """Return the metrics in a summary's JSON. Raises ValueError for anything else."""
    if (
        not isinstance(entries, dict)
        or len(entries) > MOST_METRICS
        or any(len(name) > _LONGEST_METRIC for name in entries)
    ):
        raise ValueError("metrics must map names to numbers")
    metrics = {}
    for name, value in entries.items():
        if value not in _NOT_FINITE and (type(value) not in (int, float) or not abs(value) <= _MOST_FLOAT):
            raise ValueError(f"the metric {name!r:.80} is not a number")
        metrics[name] = float(value)
    return metrics


def with_hash(content: dict[str, Any]) -> bytes:
    """Return a file with this content and its own hash."""
    body = json.dumps(content, indent=2).encode().removesuffix(b"\n}")
    return body + _HASH + hashlib.sha256(body).hexdigest().encode() + _END


def _check_hash(data: bytes, entries: dict[str, Any]) -> None:
    """Check that no byte of a summary of this format has changed since it was written. Raises ValueError."""
    # Compared as bytes, not as JSON: an added space, or an added key behind the hash, must not go unnoticed.
    body, _, ending = data.rpartition(_HASH)
    if ending == hashlib.sha256(body).hexdigest().encode() + _END:
        return
    if entries["format_version"] not in _WITHOUT_HASH or [*entries][-1] != "format_version":
        raise ValueError(
            f"its last line is not the SHA-256 of the lines before it. If you edited the file, undo the edit. Without "
            f"the file and {INDEX}, the directory is a stock checkpoint"
        )


def fingerprint(index_bytes: bytes) -> str:
    return hashlib.sha256(index_bytes).hexdigest()


def sizes_listed(index: bytes, label: str) -> dict[str, int]:
    """Return the data files in the header of an index, and their sizes in bytes, without checking the rest.

    Args:
        label: The name of the file in messages.

    Raises:
        CheckpointCorrupt, OtherFormat: The file has no such header, or one of another version.
    """
    with damage_in(label):
        about = json.loads(index[8 : 8 + int.from_bytes(index[:8], "little")])["__metadata__"]
        check_index_version(about, label)
        return {str(name): int(size) for name, size in json.loads(about["files"]).items()}


def time_after(time: float) -> float:
    """Return the recorded time a millisecond after another one.

    Names in a store have times in full milliseconds (:mod:`~dcp_plugin.core.format.packed`). In one case of three, the
    plain sum of a time and 0.001 is just below the next millisecond. Its name would have the time of the earlier save.
    """
    return round(time + 0.001, 6)


def check_index_version(about: Mapping[str, str], label: str) -> None:
    """Check the metadata in the header of an index.

    Raises:
        CheckpointCorrupt: The metadata are of no index.
        OtherFormat: The metadata are of another version.
    """
    if about["format"] != "dcp_plugin":
        raise CheckpointCorrupt(f"{label} is of format {about['format']!r}, and no index of dcp_plugin")
    OtherFormat.check(label, int(about["format_version"]), INDEX_VERSION)
