"""What goes wrong with Accelerate alone and is right here. Each test shows both."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch
from tests.accelerate import ACCELERATE, resumes_fsdp2_alone
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.places import names_in

BOTH = pytest.mark.parametrize("native", [True, False], ids=["Accelerate alone", "attached"])


def _fails(native: bool, kind: type[BaseException], match: str) -> Any:
    """The native path raises; ours does not."""
    from contextlib import nullcontext

    return pytest.raises(kind, match=match) if native else nullcontext()


@pytest.mark.parametrize(
    "native", [pytest.param(True, marks=resumes_fsdp2_alone, id="Accelerate alone"), pytest.param(False, id="attached")]
)
@on_ranks(2)
def test_a_parameter_that_never_got_a_gradient_does_not_stop_a_resume(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"
    run = t.start("fsdp2", native=native).train(1)
    run.accelerator.save_state(str(path))
    other = t.start("fsdp2", native=native, seed=3)
    with _fails(native, BaseException, "unused.weight"):
        other.accelerator.load_state(str(path))
        assert_same(run.whole_state(), other.whole_state())


@BOTH
@on_ranks(2)
def test_fsdp1_resumes_its_optimizer(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"
    run = t.start("fsdp1", native=native, unused=False).train(1)
    run.accelerator.save_state(str(path))
    other = t.start("fsdp1", native=native, seed=3, unused=False)
    other.accelerator.load_state(str(path))
    moments = [key for key in other.whole_state() if "exp_avg" in key]
    assert bool(moments) != native, "Accelerate alone drops them without a word"


@BOTH
@on_ranks(2)
def test_two_optimizers_of_one_model_are_told_apart(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"

    def build(seed: int) -> tuple[Any, list[Any]]:
        accelerator = t.start("fsdp2", native=native).accelerator
        accelerator.free_memory()
        model = t.Net(seed, unused=False)
        parts = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.body, model.head)]
        model, *parts = accelerator.prepare(model, *parts)
        return accelerator, [model, *parts]

    accelerator, (model, *parts) = build(0)
    model(torch.ones(2, 6)).sum().backward()
    for part in parts:
        part.step()
    with _fails(native, IndexError, "out of range"):
        accelerator.save_state(str(path))
    if not native:
        keys = {tensor.key for tensor in dcp.inspect(path).tensors}
        assert "optim_0.state.body.inp.weight.momentum_buffer" in keys
        assert "optim_1.state.head.weight.momentum_buffer" in keys
        assert not any(key.startswith("optim_0.state.head") for key in keys)
        other, (_, *others) = build(4)
        other.load_state(str(path))
        for part, loaded in zip(parts, others, strict=True):
            saved, found = ([slots["momentum_buffer"].to_local() for slots in o.state.values()] for o in (part, loaded))
            assert_same(dict(enumerate(saved)), dict(enumerate(found)))


@BOTH
@on_ranks(2)
def test_strict_is_heard_under_fsdp(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"
    t.start("fsdp2", native=native, unused=False).train(1).accelerator.save_state(str(path))
    larger = t.start("fsdp2", native=native, seed=1)
    with pytest.raises(BaseException, match=r"unused\.(weight|bias)"):  # DCP's exception is not even an Exception
        larger.accelerator.load_state(str(path))
    larger = t.start("fsdp2", native=native, seed=1)
    with _fails(native, BaseException, "unused"):
        larger.accelerator.load_state(str(path), strict=False)


@BOTH
@on_ranks(2)
def test_flipped_bytes_are_noticed(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"
    run = t.start("fsdp2", native=native, unused=False).train(1)
    run.accelerator.save_state(str(path))
    if dist.get_rank() == 0:
        folder = path / "pytorch_model_fsdp_0" if native else path
        file = max(folder.glob("__0_*.distcp"), key=lambda one: one.stat().st_size)
        weight = run.model.body.inp.weight.to_local().detach().numpy().tobytes()
        data = bytearray(file.read_bytes())
        data[data.index(weight)] ^= 1
        file.write_bytes(data)
    dist.barrier()
    other = t.start("fsdp2", native=native, seed=1, unused=False)
    if native:
        other.accelerator.load_state(str(path))  # wrong weights, not a word
    else:
        with pytest.raises(dcp.CheckpointCorrupt, match="checksum"):
            other.accelerator.load_state(str(path))


@BOTH
def test_more_processes_agree_on_where_an_accumulation_window_ends(tmp_path: Path, native: bool) -> None:
    launch.run(_save_alone, 1, tmp_path / "ck", native)
    steps = launch.run(_steps_of_two, 2, tmp_path / "ck", native)
    assert (steps[0] == steps[1]) != native, "a new rank has no file, starts with 0, and synchronizes at other batches"


def _save_alone(path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    run = t.start("single", native=native, stateful=False, unused=False, accumulate=1)
    run.train(3, at={3: lambda: run.accelerator.save_state(str(path))})


def _steps_of_two(path: Path, native: bool) -> int:
    from tests.accelerate import training as t

    run = t.start("ddp", native=native, stateful=False, unused=False)
    run.accelerator.load_state(str(path))
    return int(run.accelerator.step)


@BOTH
@on_ranks(1)
def test_naming_goes_on_after_a_resume(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    run = t.start("single", native=native, project=tmp_path, stateful=False)
    for _ in range(2):
        run.train(1)
        run.accelerator.save_state()
    resumed = t.start("single", native=native, project=tmp_path, stateful=False)
    resumed.accelerator.load_state()
    with _fails(native, ValueError, "already exists"):
        resumed.accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints"))[-1] == ("checkpoint_1" if native else "checkpoint_2")


@BOTH
@on_ranks(1)
def test_what_is_no_committed_checkpoint_is_not_resumed_from(tmp_path: Path, native: bool) -> None:
    from tests.accelerate import training as t

    run = t.start("single", native=native, project=tmp_path, stateful=False).train(1)
    run.accelerator.save_state()
    torn = tmp_path / "checkpoints" / "checkpoint_7"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "checkpoint_9.tmp").mkdir()
    resumed = t.start("single", native=native, seed=4, project=tmp_path, stateful=False)
    with _fails(native, Exception, ""):
        resumed.accelerator.load_state()
        assert_same(run.whole_state(), resumed.whole_state())


@BOTH
def test_a_limit_of_one_and_a_crash_leave_one_checkpoint(tmp_path: Path, native: bool) -> None:
    launch.run(_save_limited, 1, tmp_path, native)
    launch.outcomes_of(_die_in_the_second_save, 1, tmp_path, native)
    if native:
        assert not (tmp_path / "checkpoints" / "checkpoint_0").exists()
    else:
        launch.run(_resume_and_save, 1, tmp_path)
        assert names_in(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_5"], "a torn one counts not"
        assert names_in(tmp_path) == ["checkpoints"]


def _save_limited(root: Path, native: bool) -> None:
    from tests.accelerate import training as t

    t.start("single", native=native, project=root, limit=1).accelerator.save_state()


def _die_in_the_second_save(root: Path, native: bool) -> None:
    from dcp_plugin.core.media.disk import commit
    from tests.accelerate import training as t

    run = t.start("single", native=native, project=root, limit=1)
    run.accelerator.project_configuration.iteration = 1

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    commit.publish = die  # type: ignore[assignment]
    run.accelerator.register_save_state_pre_hook(lambda *args: die() if native else None)
    run.accelerator.save_state()


def _resume_and_save(root: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("single", project=root, limit=1)
    run.accelerator.load_state()
    torn = root / "checkpoints" / "checkpoint_5"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    run.accelerator.save_state()


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, {"cpu": True}, "silently fallen back to MULTI_CPU"),
        pytest.param(
            {},
            {},
            "trains each on its own",
            marks=pytest.mark.skipif(
                ACCELERATE < (1, 13), reason="Accelerate before 1.13 trains the processes together"
            ),
        ),
    ],
)
@on_ranks(2)
def test_a_silent_fallback_is_an_error(environment: dict[str, str], options: dict[str, Any], said: str) -> None:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    os.environ.update(environment)
    with pytest.raises(dcp.CheckpointError, match=said):
        attach(Accelerator(**options))
