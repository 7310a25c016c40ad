"""Marks the tests that launch ranks: ``make check`` leaves them out. And what several files ask for."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_plugin.core.paths import Where, as_path
from tests import object_server, programs, sampling
from tests.faults.proxy import Proxy
from tests.limits import HANG

# Hundreds of processes import the package and the tests, and Python would compile both in each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Several test processes share the cores: threads of torch that wait for each other in turns take a fifth of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What the collection imports and makes stays until the end, so looking for garbage among it is in vain: it takes
# seconds meanwhile, and half a second each time that a test collects garbage later.
gc.disable()


def pytest_report_header() -> str:
    return f"sample of long lists: TEST_SEED={sampling.seed()}"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampling.mark_the_rest_long(items)
    for item in items:
        if item.config.pluginmanager.has_plugin("timeout"):  # else its mark is unknown, and nothing ends what hangs
            item.add_marker(pytest.mark.timeout(2 * HANG))
        if isinstance(item, pytest.Function) and _launches(item):
            item.add_marker("ranks")


def _launches(test: pytest.Function) -> bool:
    """Whether a test or one of its fixtures names :mod:`tests.launch`."""
    definitions = test._fixtureinfo.name2fixturedefs.values()
    functions = [test.function, *(fixture.func for fixtures in definitions for fixture in fixtures)]
    return any("launch" in function.__code__.co_names for function in functions if hasattr(function, "__code__"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What is told of each save that ends during the test."""
    from tests.finetune import finished_saves

    with finished_saves() as noted:
        yield noted


@pytest.fixture(scope="session")
def s3() -> Iterator[object_server.Server]:
    """One S3 server for all tests of this process."""
    with object_server.serving() as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[object_server.Server]:
    """A server of another make, for tests that take minutes: where it is installed."""
    if why := object_server.why_no_azure():
        pytest.skip(why)
    with object_server.serving_azure() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def keepers_are_ended() -> Iterator[None]:
    """Those that tests of this process have started: they would outlive it, of which Python warns."""
    yield
    if (client := sys.modules.get("dcp_plugin.tiers.keeper_client")) is not None:
        for keeper in client._started:
            keeper.kill()
            keeper.wait(HANG)


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object_server.Bucket:
    """A new bucket, and an environment that leads there, in the ranks of :mod:`tests.launch` too.

    It is of the server ``s3``, or of the one that ``parametrize("bucket", ["s3", "azure"], indirect=True)`` names.
    """
    server = request.getfixturevalue(getattr(request, "param", "s3"))
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    made: object_server.Bucket = server.new_bucket()
    return made


@pytest.fixture(scope="module")
def forked_keepers() -> Iterator[None]:
    """Keepers that this process, its ranks and its programs start do not import torch once more."""
    python = programs.python(programs.KEEPER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        patch.setenv("PYTHON_EXEC", python)
        yield


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which other users can read and write."""
    folder = Path(tempfile.mkdtemp(prefix="dcp-shared-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """Where the checkpoints of a test are: what holds on a disk holds in a bucket.

    ``make test`` runs each test in one of the two places, drawn by the commit.
    """
    return tmp_path if request.param == "disk" else as_path(request.getfixturevalue("bucket").url) / "run"


@pytest.fixture
def proxy(bucket: object_server.Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What stands between the clients and the bucket during this test."""
    with Proxy(bucket.server.url) as made:
        for name, value in bucket.server.environment(made.url).items():
            monkeypatch.setenv(name, value)
        yield made
