"""Faults between a process that saves and an object store: killed at each request, and at moments by chance.

What has to hold afterwards is what :mod:`tests.faults.oracle` says, and besides: stock's ``FsspecReader`` reads the
same, and after one more save nothing of the dead is in the bucket, nor any upload that was begun.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException

from dcp_plugin.core.format import METADATA
from dcp_plugin.core.format.packed import end_of, token_in
from dcp_plugin.core.paths import as_path
from dcp_plugin.core.runs import figures
from tests.faults.campaign import Campaign, Parts
from tests.faults.network import Call
from tests.faults.oracle import Facts, find, wrong
from tests.faults.proxy import Hangup, Proxy, where
from tests.faults.scenes import NEW, SCENES, Scene, number_in, prepare, resume, save, state_of
from tests.faults.victims import Outcome, Victims
from tests.limits import HANG
from tests.object_server import Bucket, Server, serving

IN_BUCKETS = [name for name, scene in SCENES.items() if not scene.others]
PRELOADED = ("obstore", "obstore.store", "s3fs", "torch.distributed.checkpoint._fsspec_filesystem")


def killing(pid: Path, moment: Literal["arrived", "done"]) -> Call:
    """Kill the process of which the number is in a file, and answer nothing."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        raise Hangup(reset=True)

    return Call(kill, moment)


@contextmanager
def _with(environment: dict[str, str]) -> Iterator[None]:
    """In a victim, which ends soon; and what a victim prints is not looked at."""
    os.environ.update(environment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def acting(environment: dict[str, str], pid: Path | None, function: Callable[..., Any], url: str, *args: Any) -> Any:
    """In a victim: call a function with a URL."""
    with _with(environment):
        if pid is not None:
            pid.write_text(str(os.getpid()))
        return function(as_path(url), *args)


def preparing(environment: dict[str, str], scene: Scene, url: str) -> None:
    with _with(environment):
        prepare(scene, as_path(url))


def finding(environment: dict[str, str], scene: Scene, url: str) -> Facts:
    with _with(environment):
        root = as_path(url)
        before = {name: stock_number(f"{url}/{name}") for name in {*scene.before, *scene.after, *scene.links}}
        facts = find(root, scene)
        found = {**facts.numbers, **facts.links}
        lies = [f"stock reads {number} from {name}" for name, number in before.items() if found.get(name) != number]
        return replace(facts, debris=[*facts.debris, *lies])


def stock_number(url: str) -> int | None:
    """What stock's reader finds at a URL; None if there is no checkpoint."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    target: dict[str, Any] = {key: value for key, value in state_of(-1).items() if key != "text"}
    reader = FsspecReader(url)
    if not reader.fs.exists(f"{url}/.metadata"):
        return None
    stock.load(target, storage_reader=reader, no_dist=True)
    number = int(target["number"])
    for key in ("w", "frozen"):
        assert torch.equal(target[key], state_of(number)[key]), f"{key} of {url} is not that of save {number}"  # type: ignore[arg-type]
    return number


class Place:
    """A bucket with a scene in it, made anew for each fault.

    Args:
        victims: Forked with :data:`PRELOADED`.
    """

    def __init__(
        self, victims: Victims, bucket: Bucket, proxy: Proxy, scene: str, below: Path, after_a_dead_one: bool = False
    ) -> None:
        import obstore
        from obstore.store import S3Store

        self.victims, self.bucket, self.proxy, self.scene, self.below = victims, bucket, proxy, SCENES[scene], below
        self.direct, self.through = bucket.server.environment(), bucket.server.environment(proxy.url)
        self._obstore = obstore
        direct = bucket.server.environment()
        self._store = S3Store(
            bucket.name, endpoint=bucket.server.url, region="us-east-1", access_key_id=direct["AWS_ACCESS_KEY_ID"],
            secret_access_key=direct["AWS_SECRET_ACCESS_KEY"], client_options={"allow_http": True},
        )  # fmt: skip
        outcome = victims.run(preparing, self.direct, self.scene, f"{bucket.url}/template", below=below)
        assert outcome.error is None, outcome.traceback
        self._published = {token_in(part) for key in self.keys("template") for part in key.split("/")}
        if after_a_dead_one:
            proxy.on(where("PUT", ".metadata"), killing(below / "pid", "arrived"))
            victims.run(acting, self.through, below / "pid", save, f"{bucket.url}/template/step-0", 0, below=below)
        self._template = self.keys("template")

    def keys(self, prefix: str) -> list[str]:
        return [str(one["path"]) for page in self._obstore.list(self._store, f"{prefix}/") for one in page]

    def once(self, faults: Callable[[Path], None]) -> tuple[Outcome, list[str], int]:
        """Act with faults; how it ended, all that is wrong, and how many requests there were."""
        root = f"run-{time.monotonic_ns()}"
        for key in self._template:
            self._obstore.copy(self._store, key, key.replace("template", root, 1))
        pid, url = self.below / "pid", f"{self.bucket.url}/{root}"
        self.proxy.forget()
        faults(pid)
        scene = self.scene
        outcome = self.victims.run(acting, self.through, pid, scene.act, f"{url}/{scene.target}", NEW, below=self.below)
        requests = len(self.proxy.requests)
        seen = self.victims.run(finding, self.direct, scene, url, below=self.below)
        said = wrong(scene, outcome, seen) + self._left(root)
        keys = self.keys(root)
        self._obstore.delete(self._store, keys)
        return outcome, said, requests

    def _left(self, root: str) -> list[str]:
        """What the dead have left: objects of saves that were never published, and uploads."""
        left = [f"upload of {key}" for key in self.bucket.unfinished_uploads()]
        last = [bytes(self._obstore.get(self._store, key).bytes()) for key in self.keys(root) if key.endswith(METADATA)]
        published = {end[0] for data in last if (end := end_of(data)) is not None}
        for key in self.keys(root):
            tokens = {token_in(part) for part in key.split("/")}
            is_record = "/.dcp_plugin/" in key and not key.endswith(figures.SUFFIX)
            if is_record or not tokens <= published | self._published | {""}:
                left.append(key)
        return [f"left after the next save: {left}"] if left else []


def at_each_request(
    victims: Victims, server: Server, scene: str, every: int = 1, start: int = 1, after_a_dead_one: bool = False
) -> Iterator[str | None]:
    """Kill at every so many requests of a scene, before and after each; what was wrong, or None.

    Args:
        after_a_dead_one: A save beside it was killed before.
    """
    with Proxy(server.url) as proxy, tempfile.TemporaryDirectory(prefix="dcp-stores-") as below:
        place = Place(victims, server.new_bucket(), proxy, scene, Path(below), after_a_dead_one)
        outcome, said, total = place.once(lambda pid: None)
        yield f"{scene}, no fault: {outcome.error!r} {said}" if said or outcome.error else None
        for at in range(start - 1, 2 * total, every):
            number, moment = at // 2, ("arrived", "done")[at % 2]
            outcome, said, _ = place.once(
                lambda pid, at=at, moment=moment: proxy.on(where(), killing(pid, moment), skip=at // 2)
            )
            request = next((one for one in proxy.requests if one.number == number), None)
            place_of = f"{scene}, killed when request {number} of {total} was {moment} ({request and request.method} "
            place_of += f"{request and request.path.rpartition('/')[2]})"
            yield f"{place_of}: {'; '.join(said)}" if said else None


def by_chance(victims: Victims, server: Server, count: int, seed: int) -> Iterator[str | None]:
    """Kill at random moments of random scenes."""
    chosen = random.Random(seed)
    with Proxy(server.url) as proxy, tempfile.TemporaryDirectory(prefix="dcp-stores-") as below:
        places, seconds = {}, {}
        for name in IN_BUCKETS:
            places[name] = Place(victims, server.new_bucket(), proxy, name, Path(below))
            began = time.monotonic()
            _, said, _ = places[name].once(lambda pid: None)
            assert not said, said
            seconds[name] = (time.monotonic() - began) / 2
        for _ in range(count):
            name = chosen.choice(IN_BUCKETS)
            after = chosen.uniform(0, seconds[name])

            def kill(pid: Path, after: float = after) -> None:
                pid.unlink(missing_ok=True)
                threading.Thread(target=_kill_after, args=(pid, after), daemon=True).start()

            _, said, _ = places[name].once(kill)
            yield f"{name}, killed after {after:.3f} s: {'; '.join(said)}" if said else None


def _kill_after(pid: Path, seconds: float) -> None:
    while not pid.exists() or not pid.read_text():
        time.sleep(0.001)
    time.sleep(seconds)
    with suppress(ProcessLookupError, FileNotFoundError):  # it is all over
        os.kill(int(pid.read_text()), signal.SIGKILL)


def _writer(environment: dict[str, str], url: str, mine: int, rounds: int, together: Any, told: Any) -> None:
    """Save to one path at the same moment as others do, over and over; tell which number was saved, or why not."""
    with _with(environment):
        for turn in range(rounds):
            together.wait()
            number = 10 * turn + mine
            try:
                save(as_path(f"{url}/last" if turn % 2 else f"{url}/new-{turn}"), number)
                told.put((number, ""))
            except Exception as error:
                told.put((number, f"{type(error).__name__}: {error}"))


def _reader(environment: dict[str, str], url: str, ended: Any, told: Any) -> None:
    """Look, load and let stock load until the writers have ended; tell how often, and what was wrong."""
    found = Counter[str]()
    with _with(environment):
        while not ended.is_set():
            for what, look in (
                ("latest", lambda: resume(as_path(url))),
                ("stock", lambda: stock_number(f"{url}/last")),
            ):
                try:
                    found[what] += look() is not None
                except CheckpointException as error:  # no Exception; stock has no second try
                    told_so = any(words in str(error) for words in ("no longer exists", "FileNotFound"))
                    found["stock was told" if told_so else f"WRONG: {what}: {error}"[:300]] += 1
                except Exception as error:
                    found[f"WRONG: {what}: {type(error).__name__}: {error}"[:300]] += 1
    told.put(found)


def races(server: Server, writers: int, rounds: int) -> Iterator[str | None]:
    """Several processes save to one path at a time, to a new one and over one that is there in turns; a reader beside.
    What is there then is what one of those has saved that were told so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcp_plugin.checkpointer", *PRELOADED])
    bucket, environment = server.new_bucket(), server.environment()
    url, together, told, ended = f"{bucket.url}/run", context.Barrier(writers + 1), context.Queue(), context.Event()
    seen = context.Queue()
    with _with(environment):
        save(as_path(f"{url}/last"), -1)
    processes: list[Any] = [
        context.Process(target=_writer, args=(environment, url, mine, rounds, together, told))
        for mine in range(writers)
    ]
    reader: Any = context.Process(target=_reader, args=(environment, url, ended, seen))
    for process in (*processes, reader):
        process.start()
    for turn in range(rounds):
        together.wait()
        outcomes = dict(told.get(timeout=HANG) for _ in range(writers))
        with _with(environment):
            number = number_in(as_path(f"{url}/last" if turn % 2 else f"{url}/new-{turn}"))
        won = [one for one, error in outcomes.items() if not error]
        bad = [error for error in outcomes.values() if error and not (error.startswith("SaveFailed") and url in error)]
        if number not in won:
            bad.append(f"{number} is there, and {won} have won")
        yield f"{writers} writers, turn {turn}: {bad}" if bad else None
    ended.set()
    found = seen.get(timeout=HANG)
    for process in (*processes, reader):
        process.join()
    bad = [f"{text} ({count} times)" for text, count in found.items() if text.startswith("WRONG")]
    yield f"beside {writers} writers: {bad}" if bad or not found["latest"] else None
    with _with(environment):
        save(as_path(f"{url}/last"), 1)
        save(as_path(f"{url}/next"), 2)
    if left := strays(bucket, kept=1):
        yield f"{writers} writers have left {left}"


def keys_in(bucket: Bucket) -> list[str]:
    import obstore
    from obstore.store import from_url

    store = from_url(bucket.url, endpoint=bucket.server.url, client_options={"allow_http": True})
    return sorted(one["path"] for page in obstore.list(store) for one in page)


def strays(bucket: Bucket, kept: int = 0) -> list[str]:
    """Uploads, records, and objects of saves that are not published, but for so many before in each place."""
    keys = keys_in(bucket)
    folders = {key.rpartition("/")[0] for key in keys if key.endswith(f"/{METADATA}")}
    alone = [key for key in keys if not any(key.startswith(f"{folder}/") for folder in folders)]
    tokens = [{token_in(part) for key in keys for part in key.split("/") if folder in key} for folder in folders]
    return [
        *(key for key in alone if not key.endswith(figures.SUFFIX)),
        *bucket.unfinished_uploads(),
        *(f"{of_one}" for of_one in tokens if len(of_one - {""}) > 1 + kept),
    ]


def _parts(chosen: Any) -> Parts:
    with serving() as server, Victims(PRELOADED) as victims:
        for name in IN_BUCKETS if chosen.every else ():
            yield name, at_each_request(victims, server, name, chosen.every)
        if chosen.count:
            yield "by chance", by_chance(victims, server, chosen.count, chosen.seed)
        for writers in (2, 4) if chosen.races else ():
            yield f"races of {writers}", races(server, writers, chosen.races)


CAMPAIGN = Campaign(__doc__, _parts, {"every": 1, "count": 200, "races": 50, "seed": 1})
