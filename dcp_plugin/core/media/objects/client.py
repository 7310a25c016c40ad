"""Clients of object stores of all clouds: objects, listings and conditional requests.

obstore provides all stores except ``memory://``, which is fsspec's, so that frameworks see the same objects. A client
raises the refusal of a store as ``OSError``; its text names the URL, and never a credential.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dcp_plugin.core.media.medium import ignore, scatter
from dcp_plugin.core.media.objects import s3
from dcp_plugin.core.media.objects.refusals import error_text, refusal, secrets_in, texts_in
from dcp_plugin.core.paths import ObjectPath

PART = 8 << 20
"""Bytes of a part of an upload, and of a range of a large read."""
IN_FLIGHT = 256 << 20
"""Upper limit of the bytes of one rank that are on the way to a store."""
STREAMS = 16
"""Ranges that one rank requests at the same time: a single request gets less than 100 MB/s of a store."""
GAP = 1 << 20
"""Bytes that arrive in the time that another request takes."""
MOST_COPIED = 5 << 30
"""Bytes that S3 copies in one request."""
_MOST_PARTS = 9_000  # S3 takes 10 000 in an upload
_MOST_DELETED = 1_000
_ATTEMPTS = 5
_INIT_BACKOFF, _MAX_BACKOFF = timedelta(milliseconds=100), timedelta(seconds=15)
_REFUSED_KEY = "Encountered object with invalid path"
"""Error of obstore for a listing with a key that is no path: an empty part, ``.``, ``..``, a control character."""
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_NOT_ASKED_AGAIN = "list response body"
"""Error of obstore for a listing that broke off. obstore repeats all requests but this."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the store's clock."""
    tag: str
    """The ETag of the object, which changes with the contents."""


def key_of(path: ObjectPath, name: str) -> str:
    """Return the key of a name below a path."""
    return f"{path.key}/{name}" if path.key else name


class Changed(Exception):
    """A condition of a request was not met: the object was created, deleted or changed."""


class NoConditions(Exception):
    """The store does not know conditional requests."""


class ObjectWriter(AbstractContextManager["ObjectWriter", None]):
    """An object under construction: an upload in parts, or one request if it is small. It appears, durable, at the end
    of the ``with`` block. If the block fails, the upload is aborted.

    Args:
        writer: A writer of obstore, or of the same shape. An exit with an error aborts the upload.
        asked: Makes a block in which errors of the store become OSError.
    """

    def __init__(self, writer: Any, asked: Callable[[], Any], wrote: Callable[[int], None]) -> None:
        self._writer, self._asked, self._wrote = writer, asked, wrote
        self._done = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with self._asked():
                    self._writer.close()
        except BaseException as failure:
            kind, error = type(failure), failure
            raise
        finally:
            if kind is not None:
                with suppress(Exception):
                    self._writer.__exit__(kind, error, None)

    def tell(self) -> int:
        return self._done

    def takes_in_place(self, address: int) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview, kept: bool = False) -> None:
        if len(data):
            with self._asked():
                self._writer.write(memoryview(data).cast("B") if kept else bytes(data))
            self._done += len(data)
            self._wrote(len(data))


_clients: dict[tuple[str, str, int], ObstoreClient] = {}
_lock = threading.Lock()


def client_of(path: ObjectPath) -> Client:
    """Return the client of the bucket of a URL: the same one for all URLs with the same options in a process.

    Raises:
        ValueError: obstore is not installed, or does not take the options.
    """
    if path.scheme == "memory":
        return MemoryClient(path.store.partition("://")[2])
    identity = (path.store, repr(sorted((path.options or {}).items(), key=str)) + _environment(), os.getpid())
    with _lock:
        if identity not in _clients:
            _clients[identity] = ObstoreClient(path)
        return _clients[identity]


_first_used_in: list[int] = []


def _refuse_in_fork(url: str) -> None:
    """Refuse a forked child: it has no copies of obstore's threads, and would wait for ever.

    Raises:
        OSError: This process was forked by one that has used a store.
    """
    if not _first_used_in:
        _first_used_in.append(os.getpid())
    if _first_used_in[0] != os.getpid():
        raise OSError(
            errno.ENOTSUP,
            "this process was forked by one that had used an object store, and its threads are not here. Start "
            'processes with the method "spawn" or "forkserver"',
            url,
        )


def _environment() -> str:
    """Return the variables that a client is made from. They may change between two uses."""
    clouds = ("AWS_", "GOOGLE_", "AZURE_")
    return repr(sorted((name, text) for name, text in os.environ.items() if name.startswith(clouds)))


def _options_of(path: ObjectPath) -> dict[str, Any]:
    """Return the options of a client: those of the user, and defaults for the rest.

    Raises:
        ValueError: An option has a value of a wrong type. obstore refuses unknown names later.
    """
    user_options = dict(path.options or {})
    # These replace the variables of the environment, so they repeat AWS_ALLOW_HTTP.
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    client = {"timeout": timedelta(minutes=5), "connect_timeout": timedelta(seconds=10), "allow_http": allow_http}
    client |= _table(user_options, "client_options")
    retries = {"max_retries": 100, "retry_timeout": timedelta(minutes=3), **_table(user_options, "retry_config")}
    if unknown := retries.keys() - _RETRIES:
        raise ValueError(f"retry_config has no {min(unknown)!r}. It has {', '.join(sorted(_RETRIES))}.")
    for name, value in user_options.items():
        if not isinstance(value, (str, bool)) and name != "credential_provider":
            raise ValueError(f"{name} must be text, not of type {type(value).__name__}")
    if path.scheme == "s3":
        user_options = s3.further_options(user_options) | user_options
        own = {name.lower().removeprefix("aws_"): value for name, value in user_options.items()}
        endpoint = next((own[name] for name in s3.ENDPOINT if name in own), "")
        if endpoint and not _ENDPOINT.match(endpoint):
            raise ValueError(f"the endpoint {endpoint!r} must be a URL that starts with http:// or https://")
        if endpoint.startswith("http://"):
            client["allow_http"] = True
        if not own.keys() & {"checksum_algorithm", "unsigned_payload"}:
            # The signature has the SHA-256 of each part, so the store checks that anyway. AWS has a faster checksum.
            user_options |= {"checksum_algorithm": "SHA256"} if endpoint else _CHECKED_BY_CRC
    return {**user_options, "client_options": client, "retry_config": retries}


def _table(options: dict[str, Any], name: str) -> dict[str, Any]:
    table = options.pop(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a dict, not of type {type(table).__name__}")
    return table


_UNTIL_ANSWERED = timedelta(seconds=8)
"""Time for which a request is repeated while the store has never answered this process: its address may be mistyped.
An attempt to connect takes up to 10 s. A call makes up to two requests."""
_HASTY_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2}
_RETRIES = {"max_retries", "retry_timeout", "backoff"}
_ENDPOINT = re.compile(r"https?://[^/\s]")
_CHECKED_BY_CRC = {"checksum_algorithm": "crc64nvme", "unsigned_payload": True}


class ObstoreClient:
    """A bucket of S3, Google or Azure, or an HTTP server, through obstore. Methods raise OSError.

    The requests of ``further`` never do. It is None for a store other than S3, which makes no such requests.
    """

    def __init__(self, path: ObjectPath) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ValueError(
                f"{path.store} needs obstore, which is not installed: pip install 'dcp-plugin[objects]', or pip "
                f"install obstore into the environment of this job."
            ) from error
        self._obstore, self._url, self._secrets = obstore, path.store, secrets_in(dict(path.options or {}))
        try:
            options = _options_of(path)
            self._patient: Any = from_url(path.store, **options)
            self._retries = options["retry_config"]
            hasty = {**self._retries, "retry_timeout": _UNTIL_ANSWERED, "backoff": _HASTY_BACKOFF}
            is_given = "retry_config" in dict(path.options or {})
            self._hasty = self._patient if is_given else from_url(path.store, **options | {"retry_config": hasty})
            self._has_answered = False
            self.further = s3.FurtherRequests(path.store, self._patient.config) if path.scheme == "s3" else None
        except Exception as error:
            reason = error_text(error, texts_in(path.options))
            raise ValueError(
                f"{path.store} cannot be reached with these options: {reason}. storage_options has the names of "
                f"obstore (region, endpoint, access_key_id, …). Options that are not given come from the "
                f"environment."
            ) from None

    @property
    def _store(self) -> Any:
        """Return obstore's store, with the retries of the configuration after its first answer to this process."""
        return self._patient if self._has_answered else self._hasty

    def _asks_again(self, error: OSError, attempt: int, began: float) -> bool:
        """Pause before the next attempt of a request that obstore does not repeat; False if that was the last one."""
        backoff = self._retries.get("backoff", {})
        pause = backoff.get("init_backoff", _INIT_BACKOFF).total_seconds() * backoff.get("base", 2) ** attempt
        pause = min(pause, backoff.get("max_backoff", _MAX_BACKOFF).total_seconds())
        is_last = attempt + 1 >= max(_ATTEMPTS, self._retries["max_retries"])
        over = time.monotonic() - began + pause > self._retries["retry_timeout"].total_seconds()
        if error.errno in (errno.EACCES, errno.ENODEV) or is_last or over:
            return False
        time.sleep(pause)
        return True

    @contextmanager
    def _asked(self, key: str, conditional: bool = False) -> Iterator[None]:
        _refuse_in_fork(self._url)
        kinds = self._obstore.exceptions
        try:
            yield
            self._has_answered = True
        except (kinds.AlreadyExistsError, kinds.PreconditionError) as error:
            self._has_answered = True
            if conditional:
                raise Changed(error_text(error, self._secrets)) from None
            raise self._error(error, key) from None
        except kinds.NotSupportedError as error:
            raise NoConditions(error_text(error, self._secrets)) from None
        except (kinds.BaseError, OSError) as error:  # the latter from a writer
            self._has_answered = self._has_answered or isinstance(error, FileNotFoundError)
            raise self._error(error, key) from None

    def _error(self, error: Exception, key: str) -> OSError:
        """Return an error of the store as OSError, whose class follows from the number."""
        number, text = refusal(error, error_text(error, self._secrets))
        return OSError(number, text, f"{self._url}/{key}")

    def put(self, key: str, data: bytes) -> None:
        """Write a complete object in one request."""
        with self._asked(key):
            self._obstore.put(self._store, key, data, use_multipart=False)

    def put_if(self, key: str, data: bytes, tag: str | None) -> None:
        """Write an object if the object of that name has this tag, or if no object has the name and ``tag`` is None.

        Raises:
            Changed: Another object has the name.
            NoConditions: The store has no conditional requests.
        """
        mode: Any = "create" if tag is None else {"e_tag": tag}
        try:
            with self._asked(key, conditional=True):
                self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
        except OSError as error:
            if any(word in str(error) for word in ("NotImplemented", "not implemented", "501 Not")):
                raise NoConditions(str(error)) from None
            if isinstance(error, FileNotFoundError) and tag is not None and "NoSuchBucket" not in str(error):
                raise Changed(str(error)) from None  # S3 says so if there is no object
            raise

    def create(self, key: str, size: int, in_flight: int, wrote: Callable[[int], None] = ignore) -> ObjectWriter:
        """Begin to write an object of ``size`` bytes in parts, of which so many bytes may be on the way."""
        part = max(PART, -(-size // _MOST_PARTS >> 20) + 1 << 20 if size > PART * _MOST_PARTS else PART)
        with self._asked(key):
            most = max(1, in_flight // part)
            writer = self._obstore.open_writer(self._store, key, buffer_size=part, max_concurrency=most)
        return ObjectWriter(writer, lambda: self._asked(key), wrote)

    def head(self, key: str) -> ObjectInfo | None:
        """Return the information about an object; None if it does not exist."""
        try:
            with self._asked(key):
                return _info(self._obstore.head(self._store, key), key)
        except FileNotFoundError:
            return None

    def read(self, key: str, begin: int, memory: Sequence[memoryview], tag: str | None) -> int:
        """Fill the pieces of memory in turn from byte ``begin`` on, in one request. Return the number of bytes.

        Raises:
            Changed: The object has another tag.
        """
        total = sum(map(len, memory))
        if total == 0:
            return 0
        options: Any = {"range": (begin, begin + total), **({"if_match": tag} if tag else {})}
        with self._asked(key, conditional=True):
            result = self._obstore.get(self._store, key, options=options)
            first, _ = result.range
            if first != begin:
                raise OSError(errno.EIO, "the store has sent other bytes than those asked for", f"{self._url}/{key}")
            return scatter(result.stream(min_chunk_size=1 << 20), memory)

    def below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose keys start with ``prefix`` and a slash; the whole bucket if it is empty."""
        last = None
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with self._asked(prefix):
                    for page in self._obstore.list(self._store, prefix or None, offset=last, chunk_size=1000):
                        for meta in page:
                            last = meta["path"]
                            yield _info(meta, last)
                return
            except OSError as error:
                if self._refuses_a_key(error):
                    yield from (item for item in self._known(self._pages(prefix)) if last is None or item.key > last)
                    return
                if _NOT_ASKED_AGAIN not in str(error) or not self._asks_again(error, attempt, began):
                    raise

    def _refuses_a_key(self, error: OSError) -> bool:
        return self.further is not None and _REFUSED_KEY in str(error)

    def _pages(self, prefix: str, delimiter: str = "") -> Iterator[Any]:
        """Yield the pages of a listing that obstore refuses because of one key. Others put such keys; we never do."""
        assert self.further is not None, "other stores list such keys"
        try:
            yield from self.further.pages(prefix, delimiter)
        except ImportError:
            reason = "obstore cannot list a key with an empty part, a dot or a control character: pip install botocore"
            raise OSError(errno.EIO, reason, f"{self._url}/{prefix}") from None
        except Exception as error:
            raise self._error(error, prefix) from None

    @staticmethod
    def _known(pages: Iterable[Any]) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys are paths."""
        for page in pages:
            for item in page.get("Contents", ()):
                if _is_path(item["Key"]):
                    yield ObjectInfo(item["Key"], item["Size"], item["LastModified"].timestamp(), item["ETag"])

    def directly_below(self, prefix: str) -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects with no slash behind the prefix, and the parts before that slash of others."""
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with self._asked(prefix):
                    result = self._obstore.list_with_delimiter(self._store, prefix or None)
                break
            except OSError as error:
                if self._refuses_a_key(error):
                    pages = list(self._pages(prefix, "/"))
                    below = (
                        item["Prefix"].removesuffix("/") for page in pages for item in page.get("CommonPrefixes", ())
                    )
                    return list(self._known(pages)), list(filter(_is_path, below))
                if _NOT_ASKED_AGAIN not in str(error) or not self._asks_again(error, attempt, began):
                    raise
        return [_info(meta, meta["path"]) for meta in result["objects"]], list(result["common_prefixes"])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing one is no error."""
        all_keys = list(keys)
        for at in range(0, len(all_keys), _MOST_DELETED):
            self._delete(all_keys[at : at + _MOST_DELETED])

    def _delete(self, keys: list[str]) -> None:
        """Delete objects, again after a lost answer: obstore sends the request once, and another one does no harm."""
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with self._asked(keys[0]):
                    self._obstore.delete(self._store, keys)
                return
            except FileNotFoundError:  # where each is deleted by a request of its own, one that is gone may end it
                if len(keys) == 1:
                    return
                for key in keys:
                    self._delete([key])
                return
            except OSError as error:
                if not self._asks_again(error, attempt, began):
                    raise

    def copy(self, key: str, to: str) -> None:
        """Copy an object within the store."""
        with self._asked(key):
            self._obstore.copy(self._store, key, to)


def _is_path(key: str) -> bool:
    return not {"", ".", ".."} & set(key.split("/")) and not _CONTROL.search(key)


def _info(meta: Any, key: str) -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


class MemoryClient:
    """``memory://``, as fsspec has it: the objects of this process alone."""

    _lock = threading.RLock()
    further: s3.FurtherRequests | None = None

    def __init__(self, bucket: str) -> None:
        try:
            from fsspec.implementations.memory import MemoryFileSystem
        except ImportError as error:
            raise ValueError("memory:// needs fsspec: pip install fsspec") from error
        self._files: Any = MemoryFileSystem()
        self._root = f"/{bucket}/" if bucket else "/"

    def _info(self, path: str) -> ObjectInfo:
        file = self._files.store[path]
        changed = file.modified.timestamp()
        return ObjectInfo(path.removeprefix(self._root), file.getbuffer().nbytes, changed, f"{id(file)}-{changed}")

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._files.pipe_file(self._root + key, data)

    def put_if(self, key: str, data: bytes, tag: str | None) -> None:
        with self._lock:
            current = self.head(key)
            if (current.tag if current else None) != tag:
                raise Changed(f"{self._root}{key} is another one")
            self.put(key, data)

    def create(self, key: str, size: int, in_flight: int, wrote: Callable[[int], None] = ignore) -> ObjectWriter:
        return ObjectWriter(_MemoryWriter(self, key), nullcontext, wrote)

    def head(self, key: str) -> ObjectInfo | None:
        path = self._root + key
        return self._info(path) if path in self._files.store else None

    def read(self, key: str, begin: int, memory: Sequence[memoryview], tag: str | None) -> int:
        with self._lock:
            item = self.head(key)
            if item is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"memory:/{self._root}{key}")
            if tag and item.tag != tag:
                raise Changed(f"{key} is another one")
            end = begin + sum(map(len, memory))
            return scatter([self._files.cat_file(self._root + key, begin, end)], memory)

    def below(self, prefix: str) -> Iterator[ObjectInfo]:
        start = f"{self._root}{prefix}/" if prefix else self._root
        return iter([self._info(path) for path in sorted(self._files.store) if path.startswith(start)])

    def directly_below(self, prefix: str) -> tuple[list[ObjectInfo], list[str]]:
        below = f"{prefix}/" if prefix else ""
        objects, prefixes = [], set[str]()
        for item in self.below(prefix):
            name, slash, _ = item.key.removeprefix(below).partition("/")
            if slash:
                prefixes.add(below + name)
            else:
                objects.append(item)
        return objects, sorted(prefixes)

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._files.store.pop(self._root + key, None)

    def copy(self, key: str, to: str) -> None:
        with self._lock:
            self.put(to, self._files.cat_file(self._root + key))


class _MemoryWriter:
    """An object under construction, as obstore's writers are."""

    def __init__(self, client: MemoryClient, key: str) -> None:
        self._client, self._key, self._data = client, key, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def close(self) -> None:
        self._client.put(self._key, bytes(self._data))

    def __exit__(self, *error: object) -> None:
        self._data.clear()


Client = ObstoreClient | MemoryClient
