"""The location of a checkpoint: a path of a file system, or the URL of an object store.

:func:`as_path` converts every path from the user. Both kinds of its result have the same names (``parent``, ``name``,
``/``). A medium provides access to the location (:mod:`dcp_plugin.core.media`).
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import ItemsView, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard

PathLike = str | os.PathLike[str]
StorageOptions = Mapping[str, Any]

_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+):/+(?P<rest>.*)", re.DOTALL)
"""Pattern of a URL, including a URL in which ``pathlib`` has merged the slashes. A scheme of one letter is a drive."""

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "http", "https", "memory")
"""Schemes of object stores. ``s3a`` and ``gcs`` are other names of the first two; a ``file://`` URL is a path."""
_OTHER_NAMES = {"s3a": "s3", "gcs": "gs", "azure": "az", "adl": "abfs"}


class StoreOptions:
    """Options for access to a store, which may include secrets, in plain dicts and lists.

    No secret is stored or logged. ``repr`` has only the names of options. A pickle has no options, except the pickle
    with which a process is started. The class is no ``Mapping``, so that no state dict is made of it.

    Example:
        >>> StoreOptions({"region": "eu-west-1"})["region"]
        'eu-west-1'
        >>> StoreOptions({"region": "eu-west-1", "secret_access_key": "abc"})
        {'region': …, 'secret_access_key': …}
    """

    __slots__ = ("_options",)

    def __init__(self, options: StorageOptions | StoreOptions) -> None:
        self._options: dict[str, Any] = _in_plain_containers(dict(options))

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def keys(self) -> KeysView[str]:
        return self._options.keys()

    def items(self) -> ItemsView[str, Any]:
        return self._options.items()

    def values(self) -> ValuesView[Any]:
        return self._options.values()

    def __len__(self) -> int:
        return len(self._options)

    def __eq__(self, other: object) -> bool:
        return self._options == (other._options if isinstance(other, StoreOptions) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: …' for name in self._options)}}}"

    def __deepcopy__(self, memo: object) -> StoreOptions:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        starts_a_process = get_spawning_popen() is not None
        return StoreOptions, (self._options if starts_a_process else {},)


def _in_plain_containers(value: Any) -> Any:
    """Replace Hydra's containers, which obstore does not accept, by dicts and lists."""
    if isinstance(value, Mapping):
        return {str(name): _in_plain_containers(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_in_plain_containers(item) for item in value]
    return value


class ObjectPath(str):
    """The URL of an object or of a prefix of objects: a ``str`` with the attributes of ``pathlib`` paths.

    Two paths are equal if their texts are equal. ``options`` has the access to the store (credentials, endpoint). It is
    not part of the text, and is never pickled or shown.

    Example:
        >>> path = ObjectPath("s3://bucket/run") / "step-1"
        >>> path, path.name, path.parent.name, path.key
        ('s3://bucket/run/step-1', 'step-1', 'run', 'run/step-1')
    """

    __slots__ = ("options",)
    options: StoreOptions | None

    def __new__(cls, url: str, options: StoreOptions | None = None) -> ObjectPath:
        path = super().__new__(cls, url)
        path.options = options
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPath, (str(self),)

    @property
    def scheme(self) -> str:
        return self.partition("://")[0]

    @property
    def store(self) -> str:
        """Scheme and bucket: ``s3://bucket``."""
        scheme, _, location = self.partition("://")
        return f"{scheme}://{location.partition('/')[0]}"

    @property
    def key(self) -> str:
        """The name in the bucket; empty for the bucket itself."""
        return self.partition("://")[2].partition("/")[2]

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return self._with_key(self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[ObjectPath]:
        above, path = [], self
        while path.key:
            path = path.parent
            above.append(path)
        return above

    def __truediv__(self, below: str) -> ObjectPath:
        # The leading "/" keeps ".." inside of the bucket.
        joined = posixpath.normpath(posixpath.join("/", self.key, below)).lstrip("/")
        return self._with_key(joined)

    def _with_key(self, key: str) -> ObjectPath:
        return ObjectPath(f"{self.store}/{key}" if key else self.store, self.options)


Where = Path | ObjectPath


def as_path(path: PathLike, options: StorageOptions | None = None) -> Where:
    """Convert a path to an absolute path, with links kept, or to a URL.

    Args:
        options: Options for access to the store of a URL.

    Raises:
        TypeError: ``path`` has a type other than text or ``os.PathLike``.
        ValueError: ``path`` is a URL, but not of an object store.
    """
    if isinstance(path, ObjectPath) and options is None:
        return path
    text = text_of(path)
    if is_url(text):
        return ObjectPath(text, StoreOptions(options) if options else None)
    return absolute(text)


def absolute(path: PathLike) -> Path:
    """Return the absolute form of a path of the file system.

    Links stay, so that the path is the same on all nodes. The exception is a link before ``..``, which is resolved as
    the kernel does it: ``link/../run`` is next to the target of ``link``.
    """
    parts = Path(os.getcwd(), path).parts
    if ".." not in parts:
        return Path(os.path.abspath(path))
    after = len(parts) - parts[::-1].index("..")  # the number of parts up to the last ".."
    return Path(os.path.realpath(Path(*parts[:after])), *parts[after:])


PROVED = "DCP_PLUGIN_PROVE"
"""Variable of the environment with the folder of the run of ``dcp-plugin prove`` that has started this process."""
KILLED_AFTER = "DCP_PLUGIN_PROVE_KILLED_AFTER"
"""Variable of the environment with the number of saves after which ``prove`` has the training killed; may be empty."""


def folder_of_proof() -> Path | None:
    """Return the folder of the run of ``dcp-plugin prove`` that has started this process; None without one."""
    return Path(folder) if (folder := os.environ.get(PROVED)) else None


def is_path(value: Any) -> bool:
    """Return whether :func:`as_path` accepts a value."""
    try:
        as_path(value)
    except (TypeError, ValueError):
        return False
    return True


def is_url(path: PathLike) -> bool:
    """Return whether a result of :func:`as_path` or :func:`text_of` is a URL."""
    return isinstance(path, str) and path.partition("://")[0] in SCHEMES


def text_of(path: PathLike) -> str:
    """Return the text of a path with ``~`` expanded, or a URL in normal form. A ``file://`` URL becomes its path.

    Raises:
        TypeError, ValueError: See :func:`as_path`.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        none = "None (dcp_plugin.latest() returns None if it finds no checkpoint)"
        type_name = none if path is None else type(path).__name__
        raise TypeError(f"a path must be a str or a pathlib.Path, not {type_name}") from error
    if ":/" not in text:
        return os.path.expanduser(text)
    # Code that makes a path absolute, as ModelCheckpoint does, puts the working directory in front of the URL.
    below = text.removeprefix(os.path.join(os.getcwd(), ""))
    match = _URL.fullmatch(below)
    if match is None:
        if "://" in text:
            raise ValueError(f"{text} contains a URL, but is not a URL itself. Give only the URL.")
        return os.path.expanduser(text)
    scheme = match["scheme"].lower()
    scheme = _OTHER_NAMES.get(scheme, scheme)
    if scheme == "file":
        return below[len("file:") :].removeprefix("//")
    if scheme not in SCHEMES:
        raise ValueError(
            f"{text} is a URL of an unknown kind. Checkpoints are in a directory, or at one of "
            f"{', '.join(f'{name}://' for name in SCHEMES)}. (For a directory with such a name, put ./ before it.)"
        )
    return _normal(scheme, match["rest"], text)


def _normal(scheme: str, location: str, url: str) -> str:
    if scheme in ("http", "https") or "?" not in location:
        bucket, _, key = location.partition("/")
    else:
        raise ValueError(f"{url.partition('?')[0]}?… has a query. Give the part after the ? as storage_options.")
    if not bucket and scheme != "memory":
        raise ValueError(f"{url} names no bucket. A URL has the form {scheme}://BUCKET/PATH")
    if "@" in bucket and scheme not in ("abfs", "abfss"):
        raise ValueError(
            f"{scheme}://…@{bucket.rpartition('@')[2]} contains credentials, which every message would show. Give "
            f"them in the environment or as storage_options."
        )
    if control := re.search(r"[\x00-\x1f\x7f]", key):
        raise ValueError(f"{url!r} has {control[0]!r} in it, which no key of a store may have. Leave it out.")
    key = posixpath.normpath(f"/{key}").lstrip("/") if key.strip("/") else ""
    return f"{scheme}://{bucket}/{key}" if key else f"{scheme}://{bucket}"


def as_local(path: PathLike, name: str, instead: str) -> str:
    """Return the text of a path, which must be on a file system.

    Args:
        name: Name of the file or directory, for the message.
        instead: Advice for the message.

    Raises:
        ValueError: ``path`` is a URL.
    """
    text = text_of(path)
    if is_url(text):
        raise ValueError(f"{name} must be on a file system, but {text} is a URL. {instead}")
    return text


def local_path(path: PathLike, name: str, instead: str) -> Path:
    """Return the absolute path with links kept. Arguments and errors are those of :func:`as_local`."""
    return absolute(as_local(path, name, instead))


def on_file_system(path: PathLike) -> Path | None:
    """Return a path that code outside of a medium can open itself; None for a URL, which only a medium opens.

    Args:
        path: A result of :func:`as_path` or :func:`text_of`.
    """
    return None if is_url(path) else Path(path)


def place_of(path: PathLike) -> Literal["disk", "store"]:
    """Return the word for the medium of a path in reports."""
    return "store" if is_url(path) else "disk"


def links_in(folder: Where) -> dict[Path, Path]:
    """Return the symbolic links directly in a folder and their targets. An unreadable folder and a store have none."""
    if isinstance(folder, Path):
        with suppress(OSError), os.scandir(folder) as entries:
            return {Path(entry.path): Path(os.path.realpath(entry.path)) for entry in entries if entry.is_symlink()}
    return {}


def options_of(path: Where) -> dict[str, Any]:
    """Return the options for access to the store of a path, in a plain dict that can be pickled; empty for a disk."""
    return dict(path.options.items()) if isinstance(path, ObjectPath) and path.options else {}


def with_options(path: Where, options: Mapping[str, Any]) -> Where:
    """Return a path with the options for access to its store (:func:`options_of`)."""
    return ObjectPath(path, StoreOptions(options)) if isinstance(path, ObjectPath) else path


def resolved(path: Where) -> Where:
    """Resolve all links of a path, so that all names of a location give equal results. Return a URL unchanged."""
    return path if isinstance(path, ObjectPath) else Path(os.path.realpath(path))


def is_link(path: Where) -> TypeGuard[Path]:
    """Return whether a path is a symbolic link. A store has none."""
    return isinstance(path, Path) and path.is_symlink()


def public(path: Where | None) -> Path | str | None:
    """Return a path in the form for users: a plain ``str`` for a URL."""
    return str(path) if isinstance(path, ObjectPath) else path


def name_below(root: Where, path: Where) -> str:
    """Return the name of a path below ``root``, with ``/`` between folders."""
    if isinstance(root, ObjectPath) and isinstance(path, ObjectPath):
        return path.key.removeprefix(root.key).lstrip("/")
    return Path(path).relative_to(str(root)).as_posix()
