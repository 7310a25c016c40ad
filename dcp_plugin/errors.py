"""The exceptions of this package: each names the checkpoint, the key or the rank, and the way out.

All derive from :class:`CheckpointError`, itself an ``Exception`` (torch's own ``CheckpointException`` derives from
``BaseException`` and slips through ``except Exception``). A failure on one rank is raised on every rank as the same
class; its message then starts with the ranks it came from.

The last line of a traceback says where the class is explained. It is a note (PEP 678) and no part of ``str(error)``:
messages are compared, are put into other messages, go through one line of a logger, and travel between ranks.

What bytes of a checkpoint make Python, numpy or torch raise becomes one of them in :func:`damage_in`, and nowhere else.

At the end is text for messages: lists cut to a readable length, and the name that a misspelled one may stand for.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NEWLINE = re.compile(r"\n(?!  )")

EXPLAINED = "https://dcp-plugin.readthedocs.io/en/latest/troubleshooting.html"


def printable(text: str) -> str:
    """Escape control characters but newline and tab, and the controls of bidirectional text, as JSON does.

    A checkpoint chooses the names in it. Names become parts of messages, and would steer the terminal.
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Escape what :func:`printable` does, and newlines and tabs: a name may not add a line to a table or a list."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class PrintableRecords(logging.Filter):
    """Escapes the messages of a logger, but not those of its children."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (escaped := printable(message)) != message:
            record.msg, record.args = escaped, ()
        return True


logging.getLogger("dcp_plugin").addFilter(PrintableRecords())


class CheckpointError(Exception):
    """Base class of everything this package raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_message(arg) if isinstance(arg, str) else arg for arg in args))
        super().add_note(self._where_explained())

    def add_note(self, note: str, /) -> None:
        """Add a note to what a traceback shows, before the line that says where the class is explained."""
        super().add_note(note)
        last = self._where_explained()
        self.__notes__ = [one for one in self.__notes__ if one != last] + [last]

    @classmethod
    def _where_explained(cls) -> str:
        """For a class of others that derives from one of these, that one."""
        ours = next(one for one in cls.__mro__ if one.__module__ == __name__)
        return f"See {EXPLAINED}#{ours.__name__.lower()}"


def _message(text: str) -> str:
    """Escape a message. Only lists of ours go on in another line, which is indented; their items are one line each."""
    return _NEWLINE.sub(r"\\n", printable(text))


class CheckpointNotFound(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at the path, or none that was committed.

    A ``FileNotFoundError`` too, as what most stock tools raise for that, and a ``ValueError``, as what Accelerate and
    the Trainer of transformers raise.
    """


class CheckpointIncomplete(CheckpointError, ValueError):
    """The directory looks like a checkpoint, but its save was never committed.

    A ``ValueError`` too, as what the Trainer of transformers raises for that.
    """


class CheckpointCorrupt(CheckpointError):
    """The bytes are not those that were saved: truncated, overwritten, out of bounds, or a checksum differs."""


class CheckpointUnreadable(CheckpointCorrupt):
    """The checkpoint cannot be read, and its bytes may be intact: the file system failed (an I/O error, a lost mount),
    or a newer version of this package has saved it.

    A ``CheckpointCorrupt`` too: what was loaded into may be half filled. But nothing is known to be damaged.
    """


class CheckpointMismatch(CheckpointError, RuntimeError):
    """The checkpoint and the target do not fit: missing or unexpected keys, other shapes, unknown parameters.

    A ``RuntimeError`` too, as what ``nn.Module.load_state_dict`` raises for that.
    """


class NotInCheckpoint(CheckpointMismatch, KeyError):
    """What was asked for by its name is not in the checkpoint. A ``KeyError`` too, as what Fabric raises for that."""

    __str__ = Exception.__str__  # KeyError shows a message in quotes, as if it were a key


class UnsafeCheckpoint(CheckpointError):
    """A value needs pickled code to be executed, and ``allow_pickle`` does not have its key.

    Or tensors take far more memory than the files of the checkpoint hold, and have no target that the caller allocated.
    """


class SaveFailed(CheckpointError):
    """A save did not become a checkpoint. What was at its path before is untouched."""


class NoSharedMemory(SaveFailed):
    """The memory that a keeper would share with the training cannot be had. The save goes another way where it can."""


class DurabilityUnknown(CheckpointError):
    """The new checkpoint is at its path and can be loaded, but the last sync failed.

    Only a loss of power would tell: then what was at the path before may be back. :class:`SaveFailed` always means that
    the path is as it was.
    """


class RankFailure(CheckpointError):
    """Another rank died, hung or left while the ranks had to agree on something."""


_NO_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG}
"""Errors that mean damage. Opening a named pipe, a socket or a device of a checkpoint raises ``EINVAL``; a damaged
index names files that cannot exist (``ENAMETOOLONG``)."""


def unreadable(what: str, error: OSError) -> CheckpointError:
    """Return the error to raise if a file of a checkpoint cannot be read. A file that is absent, or is no regular file,
    is damage; any other error may pass. Where there is not even a bucket, there is no checkpoint."""
    is_damage = isinstance(error, FileNotFoundError) or error.errno in _NO_FILE
    kind: type[CheckpointError] = CheckpointCorrupt if is_damage else CheckpointUnreadable
    if error.errno == errno.ENODEV:
        kind = CheckpointNotFound
    return kind(f"{what}: {error.strerror or error}")


@contextmanager
def damage_in(where: object) -> Iterator[None]:
    """Around what reads a checkpoint: whatever its bytes lead to is raised as :class:`CheckpointCorrupt`.

    Args:
        where: What the message calls the checkpoint, or a file of it.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(f"{where} cannot be read", error) from error
    except MemoryError as error:
        raise CheckpointCorrupt(f"{where} needs more memory than there is, or is damaged") from error
    except Exception as error:
        raise CheckpointCorrupt(
            f"{where} is damaged or truncated: {type(error).__name__}: {str(error)[:_MOST_TEXT]}"
        ) from error


MAX_CANDIDATES = 20_000
"""Keys that are searched for a suggestion: a checkpoint may have a million, and an error has to come at once."""

_MAX_LINES = 20
_MOST_TEXT = 500


def some(items: list[str], limit: int = 8, separator: str = ", ") -> str:
    """The first items for a message, and how many more there are."""
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(map(one_line, items[:limit])) + more


def first(lines: list[str]) -> list[str]:
    """The first lines for an error, and how many more there are."""
    more = len(lines) - _MAX_LINES
    return [*map(one_line, lines[:_MAX_LINES]), *([f"and {more} more like this"] if more > 0 else [])]


def nearest(key: str, stored: Iterable[str]) -> str:
    """A hint at the stored key that a missing one may be a misspelling of; empty if none is similar."""
    near = difflib.get_close_matches(key, list(islice(stored, MAX_CANDIDATES)), n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""
