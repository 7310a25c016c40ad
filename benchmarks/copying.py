"""How fast is ``dcp_plugin.copy``? Against ``cp -r`` on a disk, and against bare obstore between a disk and a bucket.

Ours compares every byte with its checksum on the way, and syncs what it writes; ``cp -r`` does neither. So there is a
second one that does both with other tools: ``cp -r``, ``sync``, and a pass over the copy. *raw obstore* puts each file
by its own multipart upload, several at once, and gets each in one stream. The store is the server of this benchmark,
in memory. The first copy of a cold source reads from the device.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from obstore.store import S3Store

import dcp_plugin
from benchmarks import _buckets, _options
from benchmarks._harness import Report, Samples, build, forget, interleaved, remove
from benchmarks._options import parser, scratch
from benchmarks._peer import OURS, Peer

SMALLEST = _options.SMALLEST
_AT_ONCE = 4
_RAW = _buckets.RAW
Ways = dict[str, Callable[[], None]]


def _peers(ways: Ways) -> list[Peer]:
    """A copy neither saves nor loads a state; all that is asked of these peers is their names."""

    def nothing(*_: object) -> None:
        pass

    return [Peer(name, nothing, nothing) for name in ways]


def _measure(ways: Ways, repeats: int, before: Callable[[], None]) -> Samples:
    return interleaved(_peers(ways), repeats, lambda peer: before(), lambda peer: ways[peer.name]())


def _cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def _cp_and_look(source: Path, target: Path) -> None:
    _cp(source, target)
    for path in target.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256")


def _disk(source: Path, root: Path, repeats: int, cold: bool) -> Samples:
    target = root / "copy"

    def before() -> None:
        remove(target)
        if cold:
            forget(source)

    ways: Ways = {
        OURS: lambda: _ours(source, target),
        "cp -r": lambda: _cp(source, target),
        "cp -r, fsync, sha256": lambda: _cp_and_look(source, target),
    }
    return _measure(ways, repeats, before)


def _ours(source: Path | str, target: Path | str) -> None:
    report = dcp_plugin.copy(source, target)
    assert len(report.copied) == 1 and not report.unverified


def _store() -> S3Store:
    return S3Store(_buckets.BUCKET, client_options={"allow_http": True}, virtual_hosted_style_request=False)


def _put(source: Path) -> None:
    store = _store()

    def put(path: Path) -> None:
        with open(path, "rb") as file:
            obstore.put(store, f"raw/{path.name}", file, chunk_size=_buckets.PART, max_concurrency=4)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(put, source.iterdir()))


def _get(target: Path) -> None:
    store = _store()
    target.mkdir()

    def get(meta: obstore.ObjectMeta) -> None:
        with open(target / meta["path"].rpartition("/")[2], "wb") as file:
            for chunk in obstore.get(store, meta["path"]).stream(min_chunk_size=_buckets.PART):
                file.write(chunk)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(get, [meta for page in obstore.list(store, "raw/") for meta in page]))


def _bucket(source: Path, root: Path, repeats: int) -> dict[str, Samples]:
    there, target = _buckets.url(Path("ours")), root / "back"
    up: Ways = {OURS: lambda: _ours(source, there), _RAW: lambda: _put(source)}
    down: Ways = {OURS: lambda: _ours(there, target), _RAW: lambda: _get(target)}
    samples = {"up": _measure(up, repeats, lambda: _buckets.remove(Path("ours")))}
    _buckets.remove(Path("ours"))
    _ours(source, there)
    return samples | {"down": _measure(down, repeats, lambda: remove(target))}


def _measure_all(report: Report, options: argparse.Namespace, where: Path, root: Path) -> None:
    source = root / "step-1"
    dcp_plugin.save({"model": build("mixed", options.mib)}, source)
    in_memory = Path("/dev/shm") in root.resolve().parents
    for cold in (False,) if in_memory else (False, True):
        title = f"disk to disk, {where}, {'cold' if cold else 'warm'}"
        report.table(title, _disk(source, root, options.repeats, cold))
    for way, samples in _bucket(source, root, options.repeats).items():
        report.table(f"{where}, {'to' if way == 'up' else 'from'} a bucket", samples)


def main() -> None:
    options = parser("copying", __doc__).parse_args()
    report = Report("copying", options)
    with _buckets.served("loopback") as endpoint:
        _buckets.use(endpoint)
        for where in options.where:
            with scratch(where) as root:
                _measure_all(report, options, where, root)
    report.close()


if __name__ == "__main__":
    main()
