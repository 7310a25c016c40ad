"""What an object store, the way to it, and other jobs may do to a save and to a load."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
import torch
import torch.distributed as dist
from obstore.store import from_url

import dcp_plugin as dcp
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.objects import commit
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import ObjectPath, as_path
from dcp_plugin.core.runs import deletion
from dcp_plugin.errors import CheckpointUnreadable
from tests import launch, sampling
from tests.faults import stores
from tests.faults.network import Answer, Call, Cut, Flip, Ignore, Silence
from tests.faults.proxy import Proxy, Request, where
from tests.faults.scenes import number_in, save
from tests.faults.stores import (
    IN_BUCKETS,
    PRELOADED,
    acting,
    at_each_request,
    keys_in,
    killing,
    stock_number,
    strays,
)
from tests.faults.victims import Outcome, Victims
from tests.object_server import Bucket, Server

QUICK: dict[str, Any] = {
    "client_options": {"timeout": timedelta(seconds=60)},
    "retry_config": {
        "max_retries": 2,
        "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2},
        "retry_timeout": timedelta(seconds=60),
    },
}


@pytest.fixture(scope="session")
def others() -> Iterator[Victims]:
    """Processes for other jobs, and for those that are killed."""
    with Victims(PRELOADED) as made:
        yield made


@pytest.fixture
def root(bucket: Bucket) -> ObjectPath:
    path = as_path(f"{bucket.url}/run", QUICK)
    assert isinstance(path, ObjectPath)
    return path


def _without_leases(url: ObjectPath, number: int) -> None:
    lease.LEASE = -1.0
    save(url, number)


def _beside(others: Victims, bucket: Bucket, tmp_path: Path, function: Callable[..., Any], *args: Any) -> Outcome:
    """What another job does, not through the proxy."""
    return others.run(acting, bucket.server.environment(), None, function, *args, below=tmp_path)


@pytest.mark.one_of
@pytest.mark.parametrize("scene", IN_BUCKETS)
def test_killed_at_a_request_the_next_save_goes_on(others: Victims, s3: Server, scene: str) -> None:
    """Of 62 moments in a row one, another one for each commit."""
    start = 1 + sampling.number(scene, 62)
    assert [one for one in at_each_request(others, s3, scene, every=62, start=start) if one] == []


def test_killed_while_it_deletes_what_a_dead_one_has_left(others: Victims, s3: Server) -> None:
    found = list(at_each_request(others, s3, "new", every=9, start=6, after_a_dead_one=True))
    assert len(found) > 3 and [one for one in found if one] == []


def _save_in_parts(url: str, number: int) -> None:
    dcp.save({"n": number, "w": torch.ones(6 << 20)}, url)


def test_parts_that_the_dead_had_sent_are_given_back(
    others: Victims, bucket: Bucket, proxy: Proxy, root: ObjectPath, tmp_path: Path
) -> None:
    proxy.on(where("PUT", ".distcp", query="partNumber"), killing(tmp_path / "pid", "done"))
    through = bucket.server.environment(proxy.url)
    others.run(acting, through, tmp_path / "pid", _save_in_parts, str(root / "step-1"), 1, below=tmp_path)
    assert len(bucket.unfinished_uploads()) in (1, 2)
    assert dcp.latest(root) is None
    save(root / "step-2", 2)
    assert bucket.unfinished_uploads() == [] and strays(bucket) == []


def test_many_records_of_the_dead_do_not_hold_up_a_save(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_saved, sweep_some = threading.Event(), commit._sweep_some
    monkeypatch.setattr(commit, "_SWEPT_TOGETHER", 20)
    monkeypatch.setattr(commit, "_sweep_some", lambda *args: has_saved.wait() and sweep_some(*args))
    client = client_of(root)
    dead = {"host": "gone", "machine": "gone", "pid": 1, "replaces": None, "dead": True}
    for number in range(50):
        token = f"{number:012x}deadbeef"
        client.put((root / f".dcp_plugin/{token}.json").key, json.dumps({"target": f"step-{number}", **dead}).encode())
        client.put((root / f"step-{number}/__0_0-{token}.distcp").key, b"left")
    proxy.forget()
    save(root / "next", 1)
    has_saved.set()
    (thread,) = [one for one in threading.enumerate() if one.name == "dcp-sweep"]
    thread.join()
    assert not strays(bucket)
    records = proxy.count(lambda request: request.method == "GET" and request.path.endswith(".json"))
    deletions = proxy.count(lambda request: request.method == "POST" and "delete" in request.query)
    assert records <= 2 * 51 and deletions < 50 + 20, "the save and the thread read each record once"
    assert len(proxy.requests) < 50 * 8


@pytest.mark.long
@pytest.mark.parametrize("scene", IN_BUCKETS)
def test_killed_at_each_request(others: Victims, s3: Server, scene: str) -> None:
    assert [one for one in at_each_request(others, s3, scene) if one] == []


@pytest.mark.long
def test_killed_at_moments_by_chance(others: Victims, s3: Server) -> None:
    assert [one for one in stores.by_chance(others, s3, 200, seed=1) if one] == []


@pytest.mark.one_of
@pytest.mark.parametrize("before", [None, 1])
def test_who_was_taken_for_dead_just_before_the_commit_publishes_nothing(
    others: Victims, bucket: Bucket, proxy: Proxy, root: ObjectPath, tmp_path: Path, before: int | None
) -> None:
    if before is not None:
        save(root / "last", before)
    outcomes: list[Outcome] = []
    sweep = Call(lambda: outcomes.append(_beside(others, bucket, tmp_path, _without_leases, f"{root}/other", 5)))
    proxy.on(where("PUT", "last/.metadata"), sweep)
    with pytest.raises(dcp.SaveFailed, match=r"took this save for dead|another save was published there"):
        save(root / "last", 2)
    assert [one.error for one in outcomes] == [None]
    assert _beside(others, bucket, tmp_path, stock_number, f"{root}/last").result == before
    if before is not None:
        assert number_in(root / "last") == before
    save(root / "next", 6)
    assert not strays(bucket)
    assert {state.path.name for state in dcp.list_checkpoints(root)} == {"other", "next"} | (
        {"last"} if before else set()
    )


def test_what_a_save_writes_while_another_one_cleans_the_same_path_stays(
    others: Victims, bucket: Bucket, proxy: Proxy, root: ObjectPath, tmp_path: Path
) -> None:
    save(root / "last", 1)
    save(root / "last", 2)
    begun: list[Any] = []
    mine = as_path(f"{root}/last", {**QUICK, "endpoint": bucket.server.url})
    assert isinstance(mine, ObjectPath)

    def begin() -> None:
        """A save of this process, as it is when it has written its data."""
        reservation = commit.reserve(mine)
        begun.append(reservation)
        store = from_url(bucket.url, endpoint=bucket.server.url, client_options={"allow_http": True})
        obstore.put(store, f"run/last/__0_0-{reservation.token}.distcp", b"data")

    listing = where("GET", bucket.name, "list-type")

    def cleans(request: Request) -> bool:
        asked = listing(request) and request.query["prefix"] == "run/last/" and "delimiter" not in request.query
        return asked and proxy.count(where("PUT", ".json")) > 0

    proxy.forget()
    proxy.on(cleans, Call(begin))
    outcome = others.run(acting, bucket.server.environment(proxy.url), None, save, f"{root}/last", 3, below=tmp_path)
    assert outcome.error is None
    assert len(begun) == 1 and f"run/last/__0_0-{begun[0].token}.distcp" in keys_in(bucket)
    commit.discard(begun[0])
    assert number_in(root / "last") == 3


@pytest.mark.parametrize("moment", ["before", "during"])
def test_what_a_dead_save_would_have_replaced_is_replaced_by_the_next(root: ObjectPath, moment: str) -> None:
    """The dead save is swept, which gives ``.metadata`` another tag: by the next save, or by another one beside it."""

    def die_and_be_swept(directory: Path) -> None:
        commit.discard(commit.reserve(root / "last"), keep=True)
        save(root / "beside", 3)

    save(root / "last", 1)
    if moment == "before":
        commit.discard(commit.reserve(root / "last"), keep=True)
    files = die_and_be_swept if moment == "during" else None
    dcp.Checkpointer().save({"n": 2}, root / "last", step=2, files=files)
    assert dcp.inspect(root / "last").step == 2 and dcp.verify(root / "last").ok


def test_a_removal_that_died_long_ago_deletes_no_newer_checkpoint(
    others: Victims, bucket: Bucket, root: ObjectPath, tmp_path: Path
) -> None:
    said = {"target": "step-2", "machine": "another one", "pid": 1, "deletes": True}
    obstore.put(from_url(bucket.url), f"run/.dcp_plugin/{commit.new_token(1.0)}.json", json.dumps(said).encode())
    save(root / "step-2", 2)
    assert _beside(others, bucket, tmp_path, _without_leases, f"{root}/step-3", 3).error is None
    assert number_in(root / "step-2") == 2
    assert not strays(bucket)


def test_to_delete_spares_a_save_in_flight(bucket: Bucket, root: ObjectPath) -> None:
    reservation = commit.reserve(root / "step-1")
    key = f"run/step-1/__0_0-{reservation.token}.distcp"
    obstore.put(from_url(bucket.url), key, b"data")
    deletion.remove(root / "step-1")
    assert key in keys_in(bucket)
    commit.discard(reservation)
    assert not keys_in(bucket)


def test_a_record_that_goes_while_it_is_read_is_of_no_importance(
    bucket: Bucket, proxy: Proxy, root: ObjectPath
) -> None:
    store = from_url(bucket.url, endpoint=bucket.server.url, client_options={"allow_http": True})
    key = f"run/.dcp_plugin/{commit.new_token(1.0)}.json"
    obstore.put(store, key, b"{}")
    proxy.on(where("GET", key), Call(lambda: obstore.delete(store, key)))
    save(root / "step-1", 1)
    assert proxy.count(where("GET", key)) == 1
    assert number_in(root / "step-1") == 1


def test_a_store_that_is_slow_is_no_clock_that_is_wrong(
    bucket: Bucket, root: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_CLOCKS_DIFFER", -1.0)
    save(root / "step-1", 1)
    save(root / "step-2", 2)
    assert dcp.latest(root) == root / "step-2"
    assert not strays(bucket)


def test_what_failed_is_deleted_by_the_next_save_of_the_same_process(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.on(where("PUT", ".metadata"), Answer(500, "InternalError"), times=None)
    proxy.on(where("POST", query="delete"), Answer(500, "InternalError"), times=None)
    with pytest.raises(dcp.SaveFailed, match=f"{root}/step-1.*InternalError"):
        save(root / "step-1", 1)
    assert strays(bucket)
    proxy.forget()
    save(root / "step-2", 2)
    assert not strays(bucket)
    assert dcp.latest(root) == root / "step-2"


@pytest.mark.one_of
@pytest.mark.parametrize("before", [None, 1])
@pytest.mark.parametrize("answer", [Answer(500, "InternalError", True), Answer(503, "SlowDown", True)])
def test_an_answer_that_was_lost_is_no_failure(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, before: int | None, answer: Answer
) -> None:
    if before is not None:
        save(root / "last", before)
    proxy.on(where("PUT", ".metadata"), answer)
    save(root / "last", 2)
    assert number_in(root / "last") == 2


@pytest.mark.one_of
@pytest.mark.parametrize("ignored", [("If-None-Match", "If-Match"), ("If-Match",)])
def test_a_store_that_knows_not_all_conditions_is_told_of_once(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, caplog: pytest.LogCaptureFixture, ignored: tuple[str, ...]
) -> None:
    proxy.on(where("PUT"), Ignore(*ignored), times=None)
    for number in (1, 2, 3):
        save(root / "last", number)
        assert number_in(root / "last") == number
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "conditional requests" in told[0] and bucket.url in told[0]


def test_a_store_without_conditions_that_says_so(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, caplog: pytest.LogCaptureFixture
) -> None:
    def conditional(request: Any) -> bool:
        asked = request.headers.get("If-Match") or request.headers.get("If-None-Match")
        return bool(asked) and request.method == "PUT"

    proxy.on(conditional, Answer(501, "NotImplemented"), times=None)
    for number in (1, 2):
        save(root / "last", number)
        assert number_in(root / "last") == number
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.WARNING]


REFUSED = {
    "expired": (Answer(400, "ExpiredToken"), "ExpiredToken"),
    "denied": (Answer(403, "AccessDenied"), "AccessDenied"),
    "no bucket": (Answer(404, "NoSuchBucket"), "NoSuchBucket|bucket there"),
    "clock": (Answer(403, "RequestTimeTooSkewed"), "RequestTimeTooSkewed"),
    "failing": (Answer(500, "InternalError"), "InternalError"),
    "busy": (Answer(503, "SlowDown"), "SlowDown"),
}


@pytest.mark.one_of(count=3)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("at", ["", ".distcp", ".index"])
def test_a_save_that_is_refused_says_where_and_why_and_leaves_the_old_one(
    bucket: Bucket, proxy: Proxy, root: ObjectPath, kind: str, at: str
) -> None:
    answer, said = REFUSED[kind]
    save(root / "last", 1)
    proxy.on(where("" if not at else "PUT", at), answer, times=None)
    with pytest.raises(dcp.SaveFailed, match=said) as failed:
        save(root / "last", 2)
    assert f"{root}/last" in str(failed.value) and "the-secret" not in str(failed.value)
    proxy.forget()
    assert number_in(root / "last") == 1
    save(root / "next", 3)
    assert not strays(bucket)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_load_that_is_refused_says_where_and_why(bucket: Bucket, proxy: Proxy, root: ObjectPath, kind: str) -> None:
    answer, said = REFUSED[kind]
    save(root / "last", 1)
    proxy.on(where("GET"), answer, times=None)
    with pytest.raises(dcp.CheckpointError, match=said) as failed:
        number_in(root / "last")
    assert f"{root}/last" in str(failed.value) and "the-secret" not in str(failed.value)
    assert isinstance(failed.value, (CheckpointUnreadable, dcp.CheckpointNotFound))  # which is no damage


IMPATIENT = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}


@pytest.mark.one_of
@pytest.mark.parametrize(
    ("method", "path", "query"), [("PUT", ".metadata", ""), ("POST", "", "delete"), ("GET", "", "list-type")]
)
def test_a_store_that_has_answered_once_is_asked_for_up_to_three_minutes(
    bucket: Bucket, proxy: Proxy, method: str, path: str, query: str
) -> None:
    root: Any = as_path(f"{bucket.url}/run", {"retry_config": {"backoff": IMPATIENT}})
    save(root / "last", 1)
    proxy.on(where(method, path, query), Answer(503, "SlowDown"), times=40)
    save(root / "last", 2)
    save(root / "next", 3)
    assert number_in(root / "last") == 2 and not strays(bucket, kept=1)


def test_a_store_that_has_never_answered_is_given_up_within_20_s(bucket: Bucket) -> None:
    """The limits are obstore's: an attempt to connect of 10 s, and 8 s after which no other begins."""
    client: Any = client_of(as_path(f"{bucket.url}/run"))
    asked = client._store
    assert asked.retry_config["retry_timeout"] == timedelta(seconds=8)
    assert asked.client_options["connect_timeout"] == "10s"
    assert client.head("run/a") is None, "an answer, too"
    asked = client._store
    assert asked.retry_config["retry_timeout"] == timedelta(minutes=3) and asked.retry_config["max_retries"] >= 100


PASSING = {
    "failing": Answer(500, "InternalError"),
    "busy": Answer(503, "SlowDown"),
    "cut before": Cut("before"),
    "cut after": Cut("after"),
    "closed after": Cut("after", reset=False),
    "cut in the body": Cut("body", at=100),
}


@pytest.mark.one_of
@pytest.mark.parametrize("kind", PASSING)
def test_what_fails_once_is_asked_again(bucket: Bucket, proxy: Proxy, root: ObjectPath, kind: str) -> None:
    """Some requests in turn, of saves over an old one and of loads: others for each kind."""
    save(root / "last", 1)
    proxy.forget()
    save(root / "last", 2)
    assert number_in(root / "last") == 2
    total = len(proxy.requests)
    for at in range(list(PASSING).index(kind), total, 5):
        proxy.forget()
        proxy.on(where(), PASSING[kind], skip=at)
        save(root / "last", at)
        assert number_in(root / "last") == at, proxy.requests[at]
    proxy.forget()
    save(root / "next", 3)
    assert not strays(bucket, kept=1)


def test_a_byte_that_is_wrong_is_never_loaded(bucket: Bucket, proxy: Proxy, root: ObjectPath) -> None:
    save(root / "last", 1)
    proxy.forget()
    assert number_in(root / "last") == 1
    reads = [one for one in proxy.requests if one.method == "GET" and one.path != f"/{bucket.name}"]
    assert len(reads) > 2
    for at, read in enumerate(reads):
        for place in range(5, read.received, max(1, read.received // 3)):
            proxy.forget()
            proxy.on(lambda one: one.method == "GET" and one.path != f"/{bucket.name}", Flip(place), skip=at)
            with suppress(dcp.CheckpointCorrupt):
                assert number_in(root / "last") == 1, "what has been hit is used by nobody"


def test_a_byte_that_was_wrong_on_the_way_up_is_not_stored(bucket: Bucket, proxy: Proxy, root: ObjectPath) -> None:
    for name in (".distcp", ".index"):
        proxy.forget()
        proxy.on(where("PUT", name), Flip(40, up=True))
        with pytest.raises(dcp.SaveFailed, match=f"{root}/last.*Mismatch"):
            save(root / "last", 1)
        assert dcp.latest(root) is None
    proxy.on(where("PUT", ".metadata"), Flip(40, up=True))
    save(root / "next", 3)  # that is tried again
    assert number_in(root / "next") == 3 and dcp.verify(root / "next").ok
    assert not strays(bucket)


def _save_within(url: str, options: dict[str, Any], number: int, timeout: float) -> None:
    """On each of two ranks; rank 1 has another way to the store."""
    rank = dist.get_rank()
    path = as_path(url, {**QUICK, **options[rank]})
    state = {f"of {rank}": torch.full((1 << 20,), float(number)), "number": number}
    dcp.save(state, path, timeout=timeout)


@pytest.mark.one_of
@pytest.mark.parametrize("silent", [0, 1])
def test_two_ranks_of_which_one_hears_nothing(bucket: Bucket, proxy: Proxy, root: ObjectPath, silent: int) -> None:
    client = {"timeout": timedelta(seconds=1), "connect_timeout": timedelta(seconds=1)}
    quick = {"client_options": client, "retry_config": {**QUICK["retry_config"], "max_retries": 1}}
    options: list[dict[str, Any]] = [{"endpoint": bucket.server.url}, {"endpoint": bucket.server.url}]
    options[silent] = {"endpoint": proxy.url, **quick}
    proxy.on(where("PUT", ".distcp"), Silence(), times=None)
    outcomes = launch.outcomes_of(_save_within, 2, f"{root}/last", options, 1, 60.0)
    for outcome in outcomes:
        assert "SaveFailed" in outcome.traceback or "RankFailure" in outcome.traceback, outcome
        assert f"{root}/last" in outcome.traceback and f"rank {silent}" in outcome.traceback
    proxy.forget()
    save(root / "next", 3)
    assert not strays(bucket)
    assert dcp.latest(root) == root / "next"


@pytest.mark.parametrize("writers", [pytest.param(2, marks=pytest.mark.long), 4])
def test_writers_to_one_path_at_the_same_time(bucket: Bucket, writers: int) -> None:
    found = list(stores.races(bucket.server, writers, 6))
    assert len(found) == 7 and [one for one in found if one] == []


def _save_and_be_stopped(environment: dict[str, str], url: str) -> str:
    """Ctrl-C in the middle of an upload; what was raised."""
    os.environ.update(environment)
    try:
        save(as_path(url, QUICK), 2)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "saved"


def test_ctrl_c_in_the_middle_of_an_upload_publishes_nothing(
    others: Victims, bucket: Bucket, proxy: Proxy, root: ObjectPath, tmp_path: Path
) -> None:
    save(root / "last", 1)
    proxy.forget()
    pid = tmp_path / "pid"
    proxy.on(where("PUT", ".distcp"), Call(lambda: os.kill(int(pid.read_text()), signal.SIGINT)))
    through = bucket.server.environment(proxy.url)
    outcome = others.run(acting, through, pid, partial(_save_and_be_stopped, through), f"{root}/last", below=tmp_path)
    assert outcome.error is None
    # Python hears of it when it is back from obstore, which may be in code whose exceptions nobody gets.
    assert (outcome.result, number_in(root / "last")) in (("KeyboardInterrupt", 1), ("saved", 2))
    save(root / "next", 3)
    assert not strays(bucket, kept=int(outcome.result == "saved"))  # what was saved over stays until the save after it


def _fork_and_save(url: str) -> str:
    """What a process hears that was forked from one that has used a store."""
    save(as_path(f"{url}/mine"), 1)
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            save(as_path(f"{url}/forked"), 2)
        except dcp.SaveFailed as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.close(theirs)
    os.wait()
    return os.read(ours, 10_000).decode()


def test_a_fork_is_told_what_to_do(others: Victims, bucket: Bucket, root: ObjectPath, tmp_path: Path) -> None:
    outcome = _beside(others, bucket, tmp_path, _fork_and_save, str(root))
    assert "spawn" in outcome.result and "forked" in outcome.result
    assert not strays(bucket)


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_wrong_by_hours_is_not_believed(
    others: Victims, bucket: Bucket, root: ObjectPath, tmp_path: Path, hours: int
) -> None:
    save(root / "b", 1)
    outcome = _beside(others, bucket, tmp_path, _save_at_another_time, f"{root}/a", hours)
    assert outcome.error is None, outcome.traceback
    save(root / "c", 3)
    times = [dcp.inspect(root / name).time for name in "abc"]
    assert max(times) - min(times) < 1800  # a store tells full seconds: which came first within one, nobody knows
    assert not strays(bucket)


def _save_at_another_time(url: ObjectPath, hours: int) -> None:
    """By our clock alone: requests with a wrong date would be refused."""
    right = commit.time.time
    commit.time = SimpleNamespace(time=lambda: right() + 3600 * hours, monotonic=commit.time.monotonic)  # type: ignore[assignment]
    save(url, 2)
