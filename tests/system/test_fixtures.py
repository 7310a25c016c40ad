"""What commit faf9f77 wrote is loaded today: every byte, on other numbers of ranks, with stock, after interruptions."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.places import workspace_of
from dcp_plugin.core.paths import Where, as_path
from tests import fixtures
from tests.fixtures import core, described, frameworks, interruptions, tiers
from tests.fixtures.interruptions import IN_BUCKET, ON_DISK, Stage
from tests.launch import on_ranks
from tests.object_server import Bucket
from tests.places import copy_folder

EXPECTED = fixtures.expected()
CHECKPOINTS = sorted(set(EXPECTED) - {"local"})
IN_FOLDERS = [name for name in CHECKPOINTS if not name.startswith("bucket")]
GROUP_BY_NUMBER = re.compile(r"optim\.param_groups\.\d+\.")
"""The keys that a stock optimizer has: the values are there twice."""
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since what is tested may write beside a checkpoint."""
    folder = tmp_path_factory.mktemp("frozen") / "faf9f77"
    shutil.copytree(fixtures.FROZEN, folder, symlinks=True)
    return folder


def test_the_frozen_files_are_small_and_git_has_all_of_them() -> None:
    files = [path for path in fixtures.FROZEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    ignored = subprocess.run(["git", "check-ignore", *files], capture_output=True, text=True, cwd=fixtures.FROZEN)
    assert ignored.stdout == ""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_value_is_read_and_verified_without_a_process_group(frozen: Path, name: str) -> None:
    """The objects of a bucket, too: copied to a disk they are a checkpoint."""
    values = dcp.read(frozen / name)
    found = described({key: value for key, value in values.items() if key in EXPECTED[name]})
    assert found == EXPECTED[name]
    if name.startswith(("core", "runs", "bucket")):
        assert [key for key in set(values) - set(found) if not GROUP_BY_NUMBER.match(key)] == []
    assert dcp.verify(frozen / name).ok
    steps = {
        "accelerate/fsdp2/state": None,
        "reuse/step-1": 1,
        "reuse/step-2": 2,
        "core/with-files": 4,
    }
    assert dcp.inspect(frozen / name).step == next((steps[end] for end in steps if name.endswith(end)), 3)


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_stock_loads_every_tensor_of_a_published_checkpoint(frozen: Path, name: str) -> None:
    wanted = {key: said for key, said in EXPECTED[name].items() if said.startswith("torch.")}
    state = {key: _empty(said) for key, said in wanted.items()}
    stock.load(state, checkpoint_id=frozen / name)
    assert described(state) == wanted


def _empty(said: str) -> torch.Tensor:
    """A tensor with the dtype and the shape of a description."""
    dtype, _, rest = said.partition(" ")
    return torch.zeros(
        ast.literal_eval(rest[: rest.index("]") + 1]), dtype=getattr(torch, dtype.removeprefix("torch."))
    )


def test_files_of_each_rank_are_beside_the_tensors(frozen: Path) -> None:
    notes = frozen / "core" / "with-files" / "notes"
    assert {path.name: path.read_text() for path in notes.iterdir()} == {
        f"rank-{rank}.txt": f"rank {rank}\n" for rank in (0, 1)
    }
    assert dcp.inspect(frozen / "core" / "plain-1").metrics["loss"] == 0.5


LOADED_ON = {
    1: dict.fromkeys(core.LAYOUTS, "plain"),
    2: {name: name.partition("-")[0] for name in core.LAYOUTS if name.endswith("-4")},
    3: {name: "fsdp2" for name in core.LAYOUTS if name.endswith("-2")} | {"plain-1": "ddp"},
}
"""By number of ranks: the layout that each checkpoint of the plain API is loaded into."""


@pytest.mark.one_of
@pytest.mark.parametrize("ranks", LOADED_ON)
@on_ranks(of=lambda ranks: ranks)
def test_another_number_of_ranks_loads_every_byte(frozen: Path, ranks: int) -> None:
    """Each into a layout with other values."""
    warnings.simplefilter("ignore")
    for name, layout in LOADED_ON[ranks].items():
        state = core.core_state(layout, seed=2, all_kinds=name in core.OF_ALL_KINDS)
        dcp.load(state, frozen / "core" / name)
        assert described(core.whole(state)) == EXPECTED[f"core/{name}"], name
    for name in ("runs/reuse/step-1", "runs/reuse/step-2"):
        model, optimizer = core.tuned(seed=9)
        state = {"model": model, "optim": optimizer}
        dcp.load(state, frozen / name)
        assert described(core.whole(state)) == EXPECTED[name], name


@on_ranks(1, 2)
def test_each_framework_resumes_on_another_number_of_ranks(frozen: Path, world_size: int) -> None:
    names = {name: layout for name, (layout, number) in frameworks.RESUMED.items() if number == world_size}
    assert names
    for name, layout in names.items():
        found, step = frameworks.resume(frozen, name, layout)
        assert found == EXPECTED[str(frameworks.path_of(Path(), name))], name
        assert step == frameworks.STEPS


@on_ranks(2)
def test_stock_frameworks_resume_from_the_keys_that_they_look_for(frozen: Path) -> None:
    for name in frameworks.BY_STOCK:
        found, step = frameworks.resume_with_stock(frozen, name)
        assert found == EXPECTED[str(frameworks.path_of(Path(), name))], name
        assert step == frameworks.STEPS


def _assert_found(root: Where, stage: Stage) -> None:
    """The newest checkpoint is that of the stage, and every name leads to a complete checkpoint."""
    latest = dcp.latest(root)
    assert latest is not None
    assert dcp.inspect(latest).step == stage.newest
    for name, step in stage.names.items():
        assert described(dcp.read(root / name)) == interruptions.expected_of(step), name
        assert dcp.verify(root / name).ok


def _assert_cleaned_up(root: Where, stage: Stage) -> None:
    """A new save deletes what the interrupted one left, and nothing else."""
    dcp.save(interruptions.state_of(9), root / "step-9", step=9)
    _assert_found(root, Stage(9, {**stage.names, "step-9": 9}))
    listed = dcp.list_checkpoints(root)
    assert {state.path.name: state.committed for state in listed} == dict.fromkeys([*stage.names, "step-9"], True)
    assert medium_of(root).collect_garbage(workspace_of(root / "step-9"), dry_run=True) == []


@pytest.mark.parametrize("name", ON_DISK)
def test_an_interrupted_save_on_a_disk_loses_nothing(frozen: Path, tmp_path: Path, name: str) -> None:
    root, stage = tmp_path / "run", ON_DISK[name]
    shutil.copytree(frozen / "interrupted" / name, root, symlinks=True)
    _assert_found(root, stage)
    _assert_cleaned_up(root, stage)
    if name.startswith("renames"):
        assert (root / "last" / "args.json").read_text() == "{}"


def _put_into(root: Where, folder: Path) -> None:
    """Put the objects of an interrupted save into a store.

    The process that made a record has to have ended for sure, or the record counts for 15 minutes from now on: its
    machine becomes this one, and its process one that has ended.
    """
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for record in (folder / ".dcp_plugin").glob("*.json"):
        said = json.loads(record.read_bytes())
        record.write_text(json.dumps(said | {"machine": posix.machine(), "pid": ended.pid}))
    copy_folder(folder, root)


@pytest.mark.one_of(count=3)
@pytest.mark.parametrize("scheme", ["s3", "memory"])
@pytest.mark.parametrize("name", IN_BUCKET)
def test_an_interrupted_save_in_a_bucket_loses_nothing(
    frozen: Path, tmp_path: Path, bucket: Bucket, scheme: str, name: str
) -> None:
    root = as_path(bucket.url if scheme == "s3" else f"memory://{bucket.name}") / "run"
    shutil.copytree(frozen / "interrupted-in-bucket" / name, tmp_path / name)
    _put_into(root, tmp_path / name)
    _assert_found(root, IN_BUCKET[name])
    _assert_cleaned_up(root, IN_BUCKET[name])


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_objects_that_were_put_into_another_bucket_are_the_same_checkpoints(
    frozen: Path, bucket: Bucket, scheme: str
) -> None:
    root = as_path(bucket.url if scheme == "s3" else f"memory://{bucket.name}")
    copy_folder(frozen / "bucket", root / "bucket")
    for name in [name for name in CHECKPOINTS if name.startswith("bucket")]:
        assert described({k: v for k, v in dcp.read(root / name).items() if k in EXPECTED[name]}) == EXPECTED[name]
        assert dcp.verify(root / name).ok
    assert dcp.latest(root / "bucket" / "reuse") == str(root / "bucket" / "reuse" / "step-2")


@pytest.fixture
def local(frozen: Path, tmp_path: Path, lost: int | None) -> Path:
    """What the nodes have, without the one that is lost."""
    shutil.copytree(frozen / "local", tmp_path / "local")
    if lost is not None:
        shutil.rmtree(tmp_path / "local" / f"node-{lost}")
    return tmp_path / "local"


@pytest.mark.one_of("nodes", "lost", count=3)
@pytest.mark.parametrize(
    ("nodes", "lost"), [([0], 1), ([1], 0), ([0, 1], None), ([0, 1, 1], None), ([0, 0, 2], 1), ([2, 1, 1], 0)]
)
@on_ranks(of=lambda nodes: len(nodes))
def test_the_local_tier_is_recovered_on_any_ranks_and_without_a_node(
    local: Path, nodes: list[int], lost: int | None
) -> None:
    """The number of each rank's node. Node 2 is new, and has nothing."""
    warnings.simplefilter("ignore")
    state = tiers.sharded_state(0)
    start = dcp.resume_or_init(state, tiers.ROOT, keeper={"dir": str(local / f"node-{nodes[dist.get_rank()]}")})
    assert described(state) == EXPECTED["local"]
    newest = tiers.STEPS[-1]
    assert (str(start.path), start.step) == (str(tiers.ROOT / f"step-{newest}"), newest)
