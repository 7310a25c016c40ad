"""Writing one object of a save, front to back, in parts that are on their way while the next is made."""

from __future__ import annotations

from collections.abc import Callable

from dcp_plugin.media.objects.client import Client, Upload


class ObjectWriter:
    """A file under construction: a multipart upload, or one request if it is small. It appears, durable, at the end of
    the ``with`` block; if that fails, the upload is aborted."""

    def __init__(self, client: Client, key: str, size: int, in_flight: int, wrote: Callable[[int], None]) -> None:
        self._client, self._key, self._size, self._in_flight, self._wrote = client, key, size, in_flight, wrote
        self._upload: Upload | None = None
        self._done = 0

    def __enter__(self) -> ObjectWriter:
        self._upload = self._client.upload(self._key, self._size, self._in_flight)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._upload is not None
        upload, self._upload = self._upload, None
        if kind is not None:
            upload.abort()
            return
        try:
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def tell(self) -> int:
        return self._done

    def takes_in_place(self, address: int) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview, kept: bool = False) -> None:
        assert self._upload is not None, "it is written within its block"
        if len(data):
            self._upload.write(memoryview(data).cast("B") if kept else bytes(data))
            self._done += len(data)
            self._wrote(len(data))
