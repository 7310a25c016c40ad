"""The exceptions of this package. Each message names the checkpoint, the key or the rank, and the remedy.

All classes derive from :class:`CheckpointError`, which is an ``Exception``. (torch's ``CheckpointException`` derives
from ``BaseException``, so ``except Exception`` does not catch it.) A failure on one rank is raised on every rank as the
same class, and its message starts with the ranks that failed.

The last line of a traceback names the command and the address that explain the class. It is a note (PEP 678) and not
part of ``str(error)``, because messages are compared, are put into other messages, are logged in one line, and travel
between ranks.

Damaged bytes of a checkpoint make Python, numpy or torch raise. :func:`damage_in` alone turns these exceptions into
exceptions of this package.

The end of the module has helpers for messages: sizes, lists cut to a readable length, suggestions for misspelled
names, and reports as HTML.
"""

from __future__ import annotations

import difflib
import errno
import functools
import logging
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from safetensors import SafetensorError

from dcp_plugin.core.types import public_class

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NEWLINE = re.compile(r"\n(?!  )")

EXPLAINED = "https://dcp-plugin.readthedocs.io/en/latest/troubleshooting.html"


def printable(text: str) -> str:
    """Escape control characters except newline and tab, and the controls of bidirectional text, as JSON does.

    The author of a checkpoint chooses its names. Names become parts of messages, and could control the terminal.
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Escape newlines and tabs in addition to :func:`printable`, so that a name cannot add a line to a table or
    list."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def logger_of(name: str) -> logging.Logger:
    """Return a logger whose messages are printable and whose calls never raise. Messages of its children are unchanged.

    A handler of the user may fail, or its stream may be closed. A log line must not fail a save or a load.
    """
    logger = logging.getLogger(name)
    handle = logger.handle

    def handle_if_possible(record: logging.LogRecord) -> None:
        with suppress(Exception):
            message = record.getMessage()
            if (escaped := printable(message)) != message:
                record.msg, record.args = escaped, ()
            handle(record)

    logger.handle = handle_if_possible  # type: ignore[method-assign]
    return logger


logger = logger_of("dcp_plugin")


@functools.cache  # searches and saves find the same problem repeatedly
def warn_once(text: str) -> None:
    """Log a warning, once in each process."""
    logger.warning("%s", text)


def warn(message: str, stacklevel: int = 2) -> None:
    """Warn as :func:`warnings.warn` does. Raise only if a filter of the user makes the warning an error."""
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning:
        raise
    except Exception:  # a closed standard error
        pass


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal. The standard streams may be None, closed, or objects of the user."""
    with suppress(Exception):
        return bool(stream.isatty())
    return False


@public_class()
class CheckpointError(Exception):
    """Base class of all exceptions that this package raises on purpose."""

    def __init__(self, *args: object) -> None:
        # A newline before an indented line stays, since messages of this package list items so.
        super().__init__(*(_NEWLINE.sub(r"\\n", printable(arg)) if isinstance(arg, str) else arg for arg in args))
        # The class, or its nearest base class here: the documentation has no subclasses of users.
        public = next(base.__name__ for base in type(self).__mro__ if globals().get(base.__name__) is base)
        super().add_note(f"See `dcp-plugin explain {public}`, or {EXPLAINED}#{public.lower()}")

    def add_note(self, note: str, /) -> None:
        """Add a note to the traceback. The line with the address of the explanation stays the last one."""
        super().add_note(note)
        self.__notes__[-2:] = self.__notes__[:-3:-1]


@public_class()
class CheckpointNotFound(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at the path, or no committed one.

    Most stock tools raise ``FileNotFoundError`` in this case, and Accelerate and the Trainer of transformers raise
    ``ValueError``, so the class derives from both.
    """


@public_class()
class CheckpointIncomplete(CheckpointError, ValueError):
    """The directory looks like a checkpoint, but its save was never committed.

    The Trainer of transformers raises ``ValueError`` in this case, so the class derives from it.
    """


@public_class()
class CheckpointCorrupt(CheckpointError):
    """The bytes are not those that were saved: truncated, overwritten, out of bounds, or a checksum differs."""

    key = ""
    """Key of the tensor whose checksum differs, on the rank that has read it; empty otherwise."""


@public_class()
class CheckpointUnreadable(CheckpointCorrupt):
    """The checkpoint cannot be read, but its bytes may be intact. Either the file system failed (an I/O error, a lost
    mount), or another version of this package has saved it in a format that this one does not read.

    The class derives from ``CheckpointCorrupt`` because in both cases the targets of a load may be partly filled.
    """


@public_class()
class CheckpointMismatch(CheckpointError, RuntimeError):
    """The checkpoint and the target do not fit: missing or unexpected keys, other shapes, unknown parameters.

    ``nn.Module.load_state_dict`` raises ``RuntimeError`` in this case, so the class derives from it.
    """


class NotInCheckpoint(CheckpointMismatch, KeyError):
    """A key or object that was requested by name is not in the checkpoint.

    Fabric raises ``KeyError`` in this case, so the class derives from it.
    """

    __str__ = Exception.__str__  # KeyError would show the message in quotes, like a key


@public_class()
class UnsafeCheckpoint(CheckpointError):
    """A value requires the execution of pickled code, and ``allow_pickle`` does not have its key.

    Also raised for tensors that need far more memory than the checkpoint's files have bytes, unless the caller has
    allocated targets for them.
    """


def refuse_other_systems() -> None:
    """Raise CheckpointError on an operating system other than Linux, whose file system a save cannot rely on."""
    if sys.platform != "linux":
        raise CheckpointError(
            f"dcp_plugin saves, and loads into live objects, on Linux alone (on Windows: in WSL), and this system is "
            f"{sys.platform}."
        )


@public_class()
class SaveFailed(CheckpointError):
    """A save did not become a checkpoint. Anything at its path is unchanged."""


class NoSharedMemory(SaveFailed):
    """The memory that a keeper shares with the training cannot be allocated. The save uses another way if possible."""


@public_class()
class DurabilityUnknown(CheckpointError):
    """The new checkpoint is at its path and can be loaded, but the last sync failed.

    After a loss of power, the path may have its earlier contents again. :class:`SaveFailed`, by contrast, always means
    that the path is unchanged.
    """


@public_class()
class RankFailure(CheckpointError):
    """Another rank died, hung or left while the ranks had to agree."""


_NO_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG}
"""Error numbers that mean damage. This package raises ``EINVAL`` for a named pipe, a socket or a device in place of a
file. A damaged index may name files that cannot exist (``ENAMETOOLONG``)."""


def unreadable(failure: str, error: OSError) -> CheckpointError:
    """Return the error to raise if a file of a checkpoint cannot be read.

    A file that is absent or not a regular file is damage. A missing bucket means that there is no checkpoint. Any other
    error may be temporary.
    """
    is_damage = isinstance(error, FileNotFoundError) or error.errno in _NO_FILE
    kind: type[CheckpointError] = CheckpointCorrupt if is_damage else CheckpointUnreadable
    if error.errno == errno.ENODEV:
        kind = CheckpointNotFound
    return kind(f"{failure}: {error.strerror or error}")


_OF_DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, RuntimeError, TypeError),
    *(ValueError, pickle.PickleError, struct.error, zipfile.BadZipFile, SafetensorError),
)
"""Exceptions of Python, torch and readers of formats for bytes that are no checkpoint. Others are errors of code, such
as the ImportError of an import that Ctrl-C interrupts."""


@contextmanager
def damage_in(label: object) -> Iterator[None]:
    """Raise an exception of the block, which reads a checkpoint, as :class:`CheckpointCorrupt` or a similar error.

    Args:
        label: Name of the checkpoint or its file, for the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(f"{label} cannot be read", error) from error
    except MemoryError as error:
        raise CheckpointCorrupt(f"{label} needs more memory than is available, or is damaged") from error
    except _OF_DAMAGE as error:
        raise CheckpointCorrupt(
            f"{label} is damaged or truncated: {type(error).__name__}: {str(error)[:_MOST_TEXT]}"
        ) from error


MAX_CANDIDATES = 20_000
"""Largest number of keys to search for a suggestion. A checkpoint may have a million, and the error must appear at
once."""

_MAX_LINES = 10
_MOST_TEXT = 500


def some(items: Sequence[object], limit: int = 8, separator: str = ", ") -> str:
    """Return the first items as text for a message, and the number of further items."""
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(one_line(str(item)) for item in items[:limit]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first(lines: list[str]) -> list[str]:
    """Return the first lines for an error, and a line with the number of further lines."""
    more = len(lines) - _MAX_LINES
    return [*map(one_line, lines[:_MAX_LINES]), *([f"and {more} more like this"] if more > 0 else [])]


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit. Units are binary, like blocks, parts of uploads and memory."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def nearest(key: str, stored: Iterable[str]) -> str:
    """Return a hint with the stored key that a missing key may misspell; empty if no key is similar."""
    near = difflib.get_close_matches(key, list(islice(stored, MAX_CANDIDATES)), n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def as_html(report: Any) -> str:
    """Return a report for a notebook: its line, and a table with a row for each field. Long lists are cut."""
    from html import escape  # only notebooks need it

    rows = ""
    for name, value in vars(report).items():
        items = [f"{key}: {item}" for key, item in value.items()] if isinstance(value, dict) else value
        text = some(items, 10) if isinstance(items, (list, tuple)) else one_line(str(items))
        rows += f"<tr><th>{name}</th><td>{escape(text)}</td></tr>"
    return f"<p>{escape(one_line(str(report)))}</p><table>{rows}</table>"
