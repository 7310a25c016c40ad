"""Attaching, detaching, hooks, registered objects, saves in the background."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where
from tests import programs
from tests.accelerate import resumes_fsdp2_alone
from tests.compare import assert_same, full_state
from tests.launch import on_ranks
from tests.messages import warned


def test_importing_the_door_does_not_import_transformers() -> None:
    code = "import sys, dcp_plugin.accelerate; print('transformers' in sys.modules)"
    assert programs.run("-c", code).stdout == "False\n"


@on_ranks(1)
def test_attaching_twice_is_attaching_once_and_detaching_undoes_it(tmp_path: Path) -> None:
    from dcp_plugin.accelerate import attach
    from tests.accelerate import training as t

    run = t.start("single", native=True)
    accelerator, before = run.accelerator, dict(vars(run.accelerator))
    base, sampler = type(run.loader.base_dataloader), run.loader.batch_sampler.sampler
    attached = attach(accelerator, io={"threads": 3})
    assert attach(accelerator) is attached
    assert attach(accelerator, io={"threads": 3}) is attached
    with pytest.raises(ValueError, match=r"detach\(\) first"):
        attach(accelerator, io={"threads": 2})
    attached.detach()
    attached.detach()
    assert dict(vars(accelerator)) == before
    assert type(run.loader.base_dataloader) is base
    assert run.loader.batch_sampler.sampler is sampler
    run.train(1)
    accelerator.save_state(str(tmp_path / "native"))
    assert (tmp_path / "native" / "model.safetensors").exists()
    with attach(accelerator):
        accelerator.save_state(str(tmp_path / "ours"))
    assert accelerator.save_state.__func__ is type(accelerator).save_state
    assert dcp.verify(tmp_path / "ours").ok


def test_a_pickled_accelerator_is_one_that_is_not_attached() -> None:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    accelerator = Accelerator(cpu=True)
    with attach(accelerator):
        loader = accelerator.prepare(torch.utils.data.DataLoader(range(4)))
        copy = pickle.loads(pickle.dumps(accelerator))
        assert type(copy) is Accelerator
        assert "dcp_plugin_attachment" not in vars(copy)
        assert torch.equal(torch.cat(list(copy._dataloaders[0])), torch.cat(list(loader)))


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=resumes_fsdp2_alone)])
@on_ranks(2)
def test_hooks_see_what_they_see_natively_and_what_they_write_is_published(
    place: Where, tmp_path: Path, layout: str
) -> None:
    from tests.accelerate import training as t

    seen: dict[bool, list[Any]] = {}
    for native in (True, False):
        run = t.start(layout, native=native, unused=False).train(1)
        seen[native] = calls = []

        def on_save(models: Any, weights: Any, folder: str, run: Any = run, calls: Any = calls) -> None:
            calls.append(("save", models is run.accelerator._models, [sorted(one) for one in weights]))
            if run.accelerator.is_main_process:
                Path(folder, "net").mkdir()
                Path(folder, "net", "config.json").write_text("{}")

        def on_load(models: Any, folder: str, run: Any = run, calls: Any = calls) -> None:
            calls.append(("load", [one is run.model for one in models], os.path.exists(f"{folder}/net/config.json")))

        run.accelerator.register_save_state_pre_hook(on_save)
        run.accelerator.register_load_state_pre_hook(on_load)
        path = tmp_path / "native" if native else place / "ours"
        run.accelerator.save_state(str(path))
        dist.barrier()  # Accelerate alone does not wait for rank 0
        run.accelerator.load_state(str(path))
    assert seen[True] == seen[False]


@on_ranks(1)
def test_a_hook_may_take_a_model_out_and_save_it_itself(place: Where) -> None:
    from tests.accelerate import training as t

    path = place / "ck"
    run = t.start("single").train(1)
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop())
    run.accelerator.save_state(str(path))
    keys = {tensor.key for tensor in dcp.inspect(path).tensors}
    assert not any(key.startswith("model.") for key in keys)
    assert "optim.state.head.weight.exp_avg" in keys
    other = t.start("single", seed=3)
    before = full_state(other.model.state_dict())
    other.accelerator.register_load_state_pre_hook(lambda models, folder: models.pop())
    other.accelerator.load_state(str(path))
    assert_same(before, full_state(other.model.state_dict()))
    whole, loaded = run.whole_state(), other.whole_state()
    slots = [key for key in whole if key.startswith("optim.")]
    assert_same({key: whole[key] for key in slots}, {key: loaded[key] for key in slots})


@on_ranks(2)
def test_registered_objects_of_every_kind_come_back(place: Where) -> None:
    """A model that only the user has sharded, its optimizer, an average of the weights, a plain counter."""
    from tests.accelerate import training as t
    from tests.accelerate.test_native import Counter

    path = place / "ck"

    def build(seed: int, count: int) -> tuple[Any, ...]:
        accelerator = t.start("own_fsdp2", seed).accelerator
        accelerator.free_memory()
        model = t.layouts.wrap("fsdp2", t.Net(seed, unused=False), "body")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = nn.Linear(2, 2)
        nn.init.constant_(average.weight, seed)
        counter = Counter(count)
        accelerator.register_for_checkpointing(model, optimizer, average, counter)
        return accelerator, model, optimizer, average, counter

    accelerator, model, optimizer, average, _ = build(1, 7)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(path))
    names = {key.split(".")[0] for key in (tensor.key for tensor in dcp.inspect(path).tensors)}
    assert names == {"model", "optim", "extra"}
    other, loaded, loaded_optimizer, loaded_average, counter = build(2, 0)
    other.load_state(str(path))
    assert_same(full_state(model.state_dict()), full_state(loaded.state_dict()))
    assert len(loaded_optimizer.state) == len(optimizer.state)
    assert_same(average.state_dict(), loaded_average.state_dict())
    assert counter.value == 7
    accelerator, *_ = build(3, 0)
    accelerator.register_for_checkpointing(Counter(1))
    with pytest.raises(dcp.CheckpointMismatch, match="has 2 objects given to register_for_checkpointing"):
        accelerator.load_state(str(path))


@on_ranks(2)
def test_objects_that_only_rank_0_registers_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    """Stock loads the object on rank 0, and raises on rank 1."""
    from tests.accelerate import training as t
    from tests.accelerate.test_native import Counter

    raised: dict[bool, str] = {}
    for native in (True, False):
        run = t.start("ddp", native=native, unused=False)
        counter = Counter(7)
        if run.accelerator.is_main_process:
            run.accelerator.register_for_checkpointing(counter)
        run.accelerator.save_state(str(tmp_path / str(native)))
        run.accelerator.wait_for_everyone()
        try:
            run.accelerator.load_state(str(tmp_path / str(native)))
        except RuntimeError as error:
            raised[native] = str(error)
    assert raised.keys() == ({False} if dist.get_rank() == 0 else {True, False})
    assert "register_for_checkpointing, and this run has Counter on rank 0; none on rank 1: register" in raised[False]


@on_ranks(1)
def test_save_state_returns_the_path_that_stock_returns(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    returned: dict[bool, list[Path]] = {}
    for native in (True, False):
        os.makedirs(folder := tmp_path / str(native))
        os.chdir(folder)
        save = t.start("single", native=native).accelerator.save_state
        returned[native] = [save("out"), save(Path("two")), save(output_dir="three") / "meta.json"]
        named = t.start("single", native=native, project=folder / "run").accelerator.save_state()
        returned[native].append(named.relative_to(folder))
    assert returned[True] == returned[False]


@on_ranks(1)
def test_a_registered_object_gets_the_class_and_the_keys_of_its_state(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    class Tally:
        def __init__(self, **seen: int) -> None:
            self.state: dict[Any, Any] = collections.Counter({(0, 1): 1, **seen}) if seen else {}

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = state

    for tally in (Tally(a=2), fresh := Tally()):
        accelerator = t.start("single").accelerator
        accelerator.register_for_checkpointing(tally)
        (accelerator.load_state if tally is fresh else accelerator.save_state)(str(tmp_path / "ck"))
    assert repr(fresh.state) == repr(Tally(a=2).state)


@on_ranks(2)
def test_several_models_are_told_apart(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"

    def build(seed: int) -> tuple[Any, ...]:
        accelerator = t.start("ddp").accelerator
        accelerator.free_memory()
        models = [t.Net(seed, unused=False), t.Net(seed + 1, unused=False)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in reversed(models)]
        return (accelerator, *accelerator.prepare(*models, *optimizers))

    accelerator, *models, _, _ = build(1)
    accelerator.save_state(str(path))
    other, *loaded, _, _ = build(5)
    other.load_state(str(path))
    for one, two in zip(models, loaded, strict=True):
        assert_same(one.state_dict(), two.state_dict())


@on_ranks(2)
def test_one_optimizer_may_train_several_models(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"

    def build(seed: int) -> tuple[Any, ...]:
        accelerator = t.start("ddp").accelerator
        accelerator.free_memory()
        models = [t.Net(seed, unused=False), t.Net(seed + 1, unused=False)]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.1)
        return (accelerator, *accelerator.prepare(*models, optimizer))

    accelerator, one, two, optimizer = build(1)
    accelerator.backward((one(torch.ones(2, 6)) + two(torch.ones(2, 6))).sum())
    optimizer.step()
    accelerator.save_state(str(path))
    other, *models, loaded = build(5)
    other.load_state(str(path))
    for before, after in zip((one, two), models, strict=True):
        assert_same(before.state_dict(), after.state_dict())
    slots, restored = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    for number in slots:
        assert_same(slots[number], restored[number])
    assert slots.keys() == restored.keys()


@on_ranks(2)
def test_a_save_in_the_background_is_the_state_at_the_call(place: Where) -> None:
    from tests.accelerate import training as t

    run = t.start("fsdp2", async_save=True, project=place, limit=1)
    states = []
    for _ in range(3):
        run.train(1)
        states.append(run.whole_state())
        run.accelerator.save_state()
    medium = medium_of(place)
    note = b"right after the save"
    if dist.get_rank() == 0:
        medium.note(place / "checkpoints" / "not_one.txt", note, only_new=True)
    run.attached.wait()
    dist.barrier()
    names = [one.path.name for one in medium.entries(place / "checkpoints")]
    assert [name for name in names if "checkpoint" in name] == ["checkpoint_2"]
    other = t.start("fsdp2", seed=9, async_save=True)
    other.accelerator.save_state(str(place / "mine"))
    if dist.get_rank() == 0:
        if isinstance(place, Path):  # as a script has to that puts files there before the save is complete
            (place / "mine").mkdir(exist_ok=True)
        medium.note(place / "mine" / "notes.txt", note, only_new=True)
    other.accelerator.load_state(str(place / "mine"))  # waits for it
    with medium.open(place / "mine").open("notes.txt") as file:
        assert file.read() == note
    other.accelerator.load_state(str(place / "checkpoints" / "checkpoint_2"))
    assert_same(other.whole_state(), states[-1])
    other.accelerator.save_state(str(place / "last"))
    other.accelerator.end_training()
    assert dcp.latest(place / "last") == place / "last"


@on_ranks(2)
def test_a_failed_background_save_is_raised_on_every_rank_once(tmp_path: Path) -> None:
    from dcp_plugin.core.storage import part_writer
    from tests.accelerate import training as t

    run = t.start("ddp", async_save=True)
    run.accelerator.save_state(str(tmp_path / "good"))
    run.attached.wait()
    write = part_writer.PartWriter.write
    if dist.get_rank() == 1:

        def broken(*args: Any) -> Any:
            raise OSError("no space left")

        part_writer.PartWriter.write = broken
    run.accelerator.save_state(str(tmp_path / "bad"))
    with pytest.raises(dcp.CheckpointError, match="no space left"):
        run.attached.wait()
    part_writer.PartWriter.write = write
    run.accelerator.load_state(str(tmp_path / "good"))
    with pytest.raises(dcp.CheckpointError):
        run.accelerator.load_state(str(tmp_path / "bad"))
    run.attached.close()


@on_ranks(2)
def test_in_the_middle_of_an_accumulation_window_it_warns_and_goes_back_to_its_start(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    path = tmp_path / "ck"
    run = t.start("ddp", samples=48)
    seen = []
    for number, batch in enumerate(run.loader):
        seen.append(batch[1].tolist())
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(batch[0]).sum())
            run.optimizer.step()
            run.optimizer.zero_grad()
        if number == 4:  # the first batch of the third window
            with warned("gradient accumulation") as said:
                run.accelerator.save_state(str(path))
    assert len(said) == 1 and "after 1 of 2 batches" in said[0]
    other = t.start("ddp", seed=2, samples=48)
    other.accelerator.load_state(str(path))
    assert other.accelerator.step == 4
    assert [batch[1].tolist() for batch in other.loader] == seen[4:]


@on_ranks(1)
def test_random_streams_stay_out_if_they_are_not_wanted(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    for wanted in (True, False):
        t.start("single", rng=wanted).accelerator.save_state(str(tmp_path / str(wanted)))
        keys = [tensor.key for tensor in dcp.inspect(tmp_path / str(wanted)).tensors]
        assert any(key.startswith("extra.rng.0.streams") for key in keys) == wanted


@on_ranks(2)
def test_what_fails_on_one_rank_is_raised_on_all_or_on_none(tmp_path: Path) -> None:
    from dcp_plugin.core.runs import deletion
    from tests.accelerate import training as t

    run = t.start("ddp", project=tmp_path, limit=1, timeout=20.0)
    accelerator, remove = run.accelerator, deletion.remove

    def broken(*args: Any) -> None:
        raise OSError("broken here")

    deletion.remove = broken  # which rank 0 alone calls
    accelerator.save_state()
    accelerator.save_state()
    deletion.remove = remove
    dist.barrier()
    if accelerator.is_main_process:
        run.scheduler.scheduler.load_state_dict = broken
    with pytest.raises(dcp.CheckpointError, match="broken here"):
        accelerator.load_state()
    accelerator.register_load_state_pre_hook(broken if accelerator.is_main_process else lambda models, folder: None)
    with pytest.raises(dcp.CheckpointError, match=r"run the hooks.*broken here"):
        accelerator.load_state()


@on_ranks(1)
def test_a_link_to_a_directory_stays_one(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "args.json").write_text("{}")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    run = t.start("single")
    run.accelerator.save_state(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert dcp.verify(tmp_path / "disk").ok
    assert (tmp_path / "out" / "args.json").exists()
    run.accelerator.load_state(tmp_path / "out")


@on_ranks(1)
def test_the_step_of_a_checkpoint_is_the_one_in_its_name(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("single")
    steps = {"step_12": 12, "epoch_1-step-13": 13, "global_step14": 14, "checkpoint-15": 15, "checkpoint_16": None}
    for name in (*steps, "epoch_3", "footstep_4"):
        run.accelerator.save_state(tmp_path / name)
    assert {one.path.name: one.step for one in dcp.list_checkpoints(tmp_path)} == {
        **steps, "epoch_3": None, "footstep_4": None,
    }  # fmt: skip
