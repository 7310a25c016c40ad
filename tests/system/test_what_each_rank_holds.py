"""Ranks that hold different things under one name: nothing is lost or mixed, and no rank gets what is another's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_plugin as dcp
from dcp_plugin import events
from tests import launch, layouts
from tests.compare import assert_same, same_tree
from tests.launch import gathered, on_ranks
from tests.messages import warned
from tests.objects import Holder
from tests.parallel import EQUAL_NAMES, LAYOUTS, REPLICATED, State, add, build, cut, held, stage, trained

MODES: list[dict[str, Any]] = [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}]

# An average that one rank keeps


def _average(number: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(number)), "n": number}


class Average(nn.Module):
    """Weights on the rank that keeps them, nothing elsewhere."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.shadow = nn.Linear(2, 2) if number is not None else nn.Identity()
        for parameter in self.parameters():
            nn.init.constant_(parameter, number or 0)


@pytest.mark.parametrize("elsewhere", [{}, None], ids=["empty", "None"])
@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(2)
def test_a_stateful_that_is_filled_on_one_rank_comes_back_there_in_both_generations(
    tmp_path: Path, owner: int, elsewhere: Any
) -> None:
    def begin(number: int) -> dict[str, Holder]:
        return {"ema": Holder({"shadow": _average(number) if dist.get_rank() == owner else elsewhere})}

    for number in (7, 8):
        state = begin(0) if number == 8 else begin(7)
        if number == 8:
            dcp.load(state, tmp_path / "7")
            if dist.get_rank() == owner:
                state["ema"].state["shadow"] = _average(8)
        with warned() as messages:
            dcp.save(state, tmp_path / str(number))
        assert messages == []
        state = begin(0)
        dcp.load(state, tmp_path / str(number))
        if dist.get_rank() == owner:
            assert same_tree(state["ema"].state["shadow"], _average(number))
    assert "ema.shadow" not in dcp.inspect(tmp_path / "8").values


@pytest.mark.parametrize("is_lazy", [False, True], ids=["filled at the start", "filled by the load"])
@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(2)
def test_a_copy_stays_a_copy_when_the_same_objects_are_loaded_again(tmp_path: Path, owner: int, is_lazy: bool) -> None:
    is_owner = dist.get_rank() == owner
    dcp.save({"ema": Holder({"shadow": _average(7) if is_owner else {}})}, tmp_path / "7")
    state = {"ema": Holder({"shadow": _average(0) if is_owner and not is_lazy else {}})}
    for number in (8, 9):  # the second time as a loop does that goes back to an earlier checkpoint
        dcp.load(state, tmp_path / "7")
        if is_owner:
            state["ema"].state["shadow"] = _average(number)
        dcp.save(state, tmp_path / str(number))
        found = dcp.read(tmp_path / str(number))
        assert found["ema.shadow.n"] == number, found


@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(2)
def test_a_module_that_has_weights_on_one_rank_comes_back_there(tmp_path: Path, owner: int) -> None:
    for number in (7, 8):
        dcp.save({"ema": Average(number if dist.get_rank() == owner else None)}, tmp_path / str(number))
        average = Average(0 if dist.get_rank() == owner else None)
        dcp.load({"ema": average}, tmp_path / str(number))
        assert all((parameter == number).all() for parameter in average.parameters())


@pytest.mark.parametrize("elsewhere", [{}, None], ids=["empty", "None"])
@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(2)
def test_a_mapping_that_is_filled_on_one_rank_is_stored_as_there(tmp_path: Path, owner: int, elsewhere: Any) -> None:
    """Stock loads what stock saved, and what we save."""
    state: State = {"x": {"t": torch.full((3,), 7.0)} if dist.get_rank() == owner else elsewhere}
    dcp.save(state, tmp_path / "c")
    assert [tensor.key for tensor in dcp.inspect(tmp_path / "c").tensors] == ["x.t"]
    assert "x" not in dcp.inspect(tmp_path / "c").values
    ways = [(dcp.load, elsewhere), (lambda target, path: stock.load(target, checkpoint_id=path), {})]
    for load, target_elsewhere in ways:
        target: State = {"x": {"t": torch.zeros(3)} if dist.get_rank() == owner else target_elsewhere}
        load(target, tmp_path / "c")
        assert dist.get_rank() != owner or target["x"]["t"].tolist() == [7, 7, 7]


@pytest.mark.parametrize(("filled", "empty"), [(5, None), ([1, 2], []), (["a"], None), (torch.ones(2), None)], ids=str)
@on_ranks(2)
def test_a_value_beside_an_empty_one_is_the_value(tmp_path: Path, filled: Any, empty: Any) -> None:
    with warned() as messages:
        dcp.save({"x": filled if dist.get_rank() == 1 else empty}, tmp_path / "c")
    assert messages == []
    (stored,) = dcp.read(tmp_path / "c").values() if not isinstance(filled, list) else [_list(tmp_path / "c")]
    assert same_tree(stored, filled)


def _list(path: Path) -> Any:
    state: State = {"x": []}
    dcp.Checkpointer(solo=True).load(state, path)
    return state["x"]


@on_ranks(2)
def test_what_is_empty_on_all_ranks_stays_empty(tmp_path: Path) -> None:
    state: State = {"a": {}, "b": None, "c": [], "d": Holder({"shadow": {}})}
    dcp.save(state, tmp_path / "c")
    target: State = {"a": {}, "b": 5, "c": [1], "d": Holder({"shadow": {}})}
    dcp.load(target, tmp_path / "c")
    assert [target["a"], target["b"], target["c"], target["d"].state] == [{}, None, [], {"shadow": {}}]


# A module that has its weights on rank 0


class Task(nn.Module):
    """Gathers its weights on rank 0, as open_clip's ``TrainingTask`` does under ``--fsdp``."""

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = fully_shard(nn.Linear(4, 4))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"state_dict": get_model_state_dict(self.net, options=self.options)}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return set_model_state_dict(self.net, dict(state_dict["state_dict"]), options=self.options)


@on_ranks(2)
def test_a_task_that_gathers_on_rank_0_is_resumed_or_refused(tmp_path: Path) -> None:
    saved, task = Task(seed=0), Task(seed=1)
    dcp.save({"model": saved}, tmp_path / "step-2", step=2)
    dcp.resume_or_init({"model": task}, tmp_path)
    assert_same(_local(task), _local(saved))


def _local(module: nn.Module) -> dict[str, torch.Tensor]:
    return held({"": module})


@on_ranks(2)
def test_a_module_that_is_handed_nothing_of_what_is_stored_is_an_error_or_a_warning(tmp_path: Path) -> None:
    class Silent(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {} if self.in_features == 3 else super().state_dict(*args, **kwargs)

    dcp.save({"model": Silent(2, 2)}, tmp_path / "c")
    with pytest.raises(dcp.CheckpointError, match="model"):
        dcp.load({"model": Silent(3, 3)}, tmp_path / "c")


# Stages, actor and critic


NAMED = [layout for layout in LAYOUTS if layout not in EQUAL_NAMES]


@pytest.mark.one_of(count=4)
@pytest.mark.parametrize("layout", NAMED)
@on_ranks(4)
def test_each_rank_gets_its_own_part_back_without_a_word(tmp_path: Path, layout: str) -> None:
    state = build(layout)
    with warned() as messages:
        dcp.save(state, tmp_path / "c")
        target = build(layout)
        add(target, 5)
        dcp.load(target, tmp_path / "c")
    assert_same(held(target), held(state))
    assert messages == []


@on_ranks(2)
def test_a_stage_is_never_loaded_in_place_of_another(tmp_path: Path) -> None:
    """Also where their shapes are equal, and where each rank has the only module that it knows."""
    rank = dist.get_rank()
    dcp.save({f"stage{rank}": cut(rank)}, tmp_path / "c")
    target = cut(9)
    with pytest.raises(dcp.CheckpointMismatch, match=r"stage2\.0\.weight is not in the checkpoint"):
        dcp.load({f"stage{rank + 1}": target}, tmp_path / "c")
    assert_same(_local(target), _local(cut(9)))


def _save(path: Path, layout: str) -> None:
    dcp.save(build(layout), path)


@pytest.mark.parametrize(
    ("layout", "names"), [("actor and critic", ("actor", "critic")), ("stages with names", ("stage0", "stage3"))]
)
def test_one_process_loads_what_ranks_saved_under_names_of_their_own(
    tmp_path: Path, layout: str, names: tuple[str, ...]
) -> None:
    launch.run(_save, 4, tmp_path / "c", layout)
    state: State = {name: cut(9) for name in names}
    dcp.load(state, tmp_path / "c", strict=False)
    for name in names:
        number = int(name[-1]) if name[-1].isdigit() else names.index(name)
        assert_same(_local(state[name]), _local(cut(number)))


@on_ranks(2)
def test_the_only_module_under_another_name_is_one_warning(tmp_path: Path) -> None:
    dcp.save({"model": cut(3)}, tmp_path / "c")
    target = cut(0)
    with warned() as messages:
        dcp.load({"net": target}, tmp_path / "c")
    assert_same(_local(target), _local(cut(3)))
    assert [len(each) for each in gathered(messages)] == [1, 0]
    assert dist.get_rank() or ("'net'" in messages[0] and "'model'" in messages[0])


@on_ranks(2)
def test_ranks_may_use_optimizers_of_different_classes_under_one_name(tmp_path: Path) -> None:
    def begin() -> State:
        model = stage(dist.get_rank())
        kind = (torch.optim.AdamW, torch.optim.SGD)[dist.get_rank()]
        return {"model": model, "optim": kind(model.parameters(), lr=0.5)}

    state = begin()
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optim"].step()
    with warned() as messages:
        dcp.save(state, tmp_path / "c")
        target = begin()
        dcp.load(target, tmp_path / "c")
    assert_same(held(target), held(state))
    assert messages == []


@pytest.mark.one_of("mode")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(2)
def test_an_optimizer_that_one_rank_never_steps_is_no_alarm_after_a_resume(
    tmp_path: Path, owner: int, mode: dict[str, Any]
) -> None:
    def begin() -> State:
        net = nn.utils.skip_init(nn.Linear, 4, 4)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)
        return {"net": net, "optim": torch.optim.AdamW(net.parameters(), lr=0.0)}

    state = begin()
    with closing(dcp.Checkpointer(**mode)) as checkpointer, warned() as messages:
        for name in "abc":
            if dist.get_rank() == owner:
                for parameter in state["net"].parameters():
                    parameter.grad = torch.ones_like(parameter)
                state["optim"].step()
            checkpointer.save(state, tmp_path / name).wait()
            own, state = gathered(held(state))[owner], begin()
            checkpointer.load(state, tmp_path / name)
            assert_same(held(state), own)
    assert messages == []


class Counting(torch.optim.Optimizer):
    """An optimizer whose step changes a number, and a slot behind the back of version counters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            slots.setdefault("count", 0), slots.setdefault("moment", torch.zeros_like(parameter))
            slots["count"] += 1
            slots["moment"].data += 1


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.0, fused=True)


@pytest.mark.parametrize("optimizer", [Counting, _fused])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@on_ranks(2)
def test_the_rank_that_steps_has_its_state_stored_after_a_resume_and_after_a_rollback(
    tmp_path: Path, optimizer: Any, layout: torch.memory_format
) -> None:
    def begin() -> State:
        net = nn.utils.skip_init(nn.Conv2d, 4, 8, 3).to(memory_format=layout)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)
        return {"net": net, "optim": optimizer(net.parameters())}

    def step(state: State, times: int) -> None:
        for _ in range(times if dist.get_rank() == 1 else 0):
            for parameter in state["net"].parameters():
                parameter.grad = torch.ones_like(parameter)
            state["optim"].step()

    state = begin()
    with closing(dcp.Checkpointer()) as checkpointer, warned() as messages:
        step(state, 1)
        checkpointer.save(state, tmp_path / "first")
        resumed = begin()
        checkpointer.load(resumed, tmp_path / "first")
        for name, times in (("second", 4), ("third", 2)):
            step(resumed, times)
            checkpointer.save(resumed, tmp_path / name)
            own, fresh = gathered(resumed["optim"].state_dict()["state"])[1], begin()
            checkpointer.load(fresh, tmp_path / name)
            assert same_tree(fresh["optim"].state_dict()["state"], own)
            checkpointer.load(resumed, tmp_path / "second")
    assert messages == []


# Equal names, and replicas that differ


@pytest.mark.parametrize("layout", EQUAL_NAMES)
@on_ranks(4)
def test_different_tensors_under_one_name_are_named_with_the_way_out(tmp_path: Path, layout: str) -> None:
    with warned("differ") as messages:
        dcp.save(build(layout), tmp_path / "c")
    if dist.get_rank() == 0:
        assert "0.weight" in messages[0] and "ranks 0" in messages[0]
        assert "different names" in messages[0] and "DTensor" in messages[0]


@pytest.mark.one_of("mode")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("what", ["weight", "exp_avg"])
@on_ranks(3)
def test_a_replica_that_drifts_is_named_once_and_the_checkpoint_is_of_one_rank(
    tmp_path: Path, what: str, mode: dict[str, Any]
) -> None:
    model = cut(*range(12))
    state: State = {"model": model, "optim": trained(model)}
    told: list[events.Event] = []
    stop = events.subscribe(lambda event: told.append(event) if isinstance(event, events.ReplicasDiffer) else None)
    with closing(dcp.Checkpointer(**mode)) as checkpointer, warned("differ") as messages:
        for step in range(4):
            if step == 2 and dist.get_rank() == 2:
                add(state, 1, to=what)
            checkpointer.save(state, tmp_path / str(step), step=step).wait()
    stop()
    assert [len(each) for each in gathered(messages)] == [1, 0, 0]
    if dist.get_rank() == 0:
        assert what in messages[0] and "(rank 2)" in messages[0]
        assert [(event.step, set(map(tuple, event.ranks.values()))) for event in told] == [(2, {(2,)})]
    own = _of_rank_0(state)
    for step in (2, 3):
        target: State = {"model": cut(*range(12))}
        target["optim"] = trained(target["model"])
        add(target, 5)
        dcp.load(target, tmp_path / str(step))
        assert_same(held(target), own)


def _of_rank_0(state: State) -> dict[str, torch.Tensor]:
    return gathered({key: tensor.clone() for key, tensor in held(state).items()})[0]


@on_ranks(2)
def test_ranks_that_train_apart_are_saved_as_rank_0_has_them(tmp_path: Path) -> None:
    """Every tensor differs, as under PostLocalSGD: weights and moments are of one rank, never a mixture."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    state: State = {"model": model, "optim": trained(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, tmp_path / "c")
    own = _of_rank_0(state)
    add(state, 3)
    dcp.load(state, tmp_path / "c")
    assert_same(held(state), own)


def _drift(layout: str, path: Path) -> list[str]:
    state = build(layout)
    with closing(dcp.Checkpointer()) as checkpointer, warned("differ") as messages:
        checkpointer.save(state, path / "1")
        if dist.get_rank() == 3:
            add(state, 1, to="model")
        checkpointer.save(state, path / "2")
    return messages


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("layout", REPLICATED)
def test_a_replica_that_drifts_is_found_in_each_layout(tmp_path: Path, layout: str) -> None:
    """At a later save, and in a part of a mesh; ranks that have no replica of each other are not compared."""
    (message,), *others = launch.run(_drift, 4, layout, tmp_path)
    assert others == [[], [], []]
    assert "3" in message.partition("(rank")[2].partition(")")[0]


@on_ranks(2)
def test_verify_says_that_replicas_differed(tmp_path: Path) -> None:
    with warned("differ"):
        dcp.save({"model": cut(dist.get_rank())}, tmp_path / "c")
    dist.barrier()
    report = dcp.verify(tmp_path / "c")
    assert report.ok and "model.0.weight" in repr(report)


# No alarm


class Normed(nn.Module):
    """A layer and a norm with buffers that follow this rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inp(x))  # type: ignore[no-any-return]


def _said_while_training(path: Path, model: nn.Module, optimizer: Any, inputs: int = 4, steps: int = 3) -> list[str]:
    """Train on data of this rank's own, save after each step, and return the warnings."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with closing(dcp.Checkpointer()) as checkpointer, warned() as messages:
        for step in range(steps):
            model(torch.randn(8, inputs, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save({"model": model, "optim": optimizer}, path / f"step-{step}", step=step)
    return [message for message in messages if "differ" in message]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(2)
def test_batch_norm_is_no_alarm(tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    if layout == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(Normed(), broadcast_buffers=False)
    else:
        model = fully_shard(Normed(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    assert _said_while_training(tmp_path, model, optimizer) == []


@on_ranks(2)
def test_scales_of_fp8_in_buffers_are_no_alarm(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("amax_history", torch.full((16,), float(dist.get_rank())))
    model.register_buffer("scale", torch.full((1,), float(dist.get_rank() + 1)))
    with warned() as messages:
        dcp.save({"model": _alike(model)}, tmp_path / "c")
    assert messages == []


def _alike(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def _said_in_layout(layout: str, path: Path, mode: dict[str, Any]) -> list[str]:
    model, optimizer = layouts.build(layout)
    with closing(dcp.Checkpointer(**mode)) as checkpointer, warned("differ") as messages:
        for step in range(3):
            layouts.train(model, optimizer, seed=step)
            checkpointer.save({"model": model, "optim": optimizer}, path / f"step-{step}", step=step)
    return messages


@pytest.mark.one_of(count=3)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("layout", [layout for layout in layouts.WORLD_SIZE if layout not in ("plain", "fsdp1_flat")])
def test_a_training_is_no_alarm_in_any_layout(tmp_path: Path, layout: str, mode: dict[str, Any]) -> None:
    """Norms of tensor-parallel layers, for one, are plain tensors beside DTensors."""
    said = launch.run(_said_in_layout, layouts.WORLD_SIZE[layout], layout, tmp_path, mode)
    assert not any(said)


class Rounding(torch.optim.SGD):
    """An optimizer outside of torch that rounds at random, on each rank in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            noise = torch.rand(parameter.shape, generator=self.generator)
            self.state[parameter]["momentum_buffer"] = noise
            parameter.add_((noise - 0.5) * 1e-3)


@on_ranks(2)
def test_an_optimizer_outside_of_torch_that_rounds_at_random_is_no_alarm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Rounding(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.generator = torch.Generator().manual_seed(dist.get_rank())
    assert _said_while_training(tmp_path, model, optimizer) == []


@on_ranks(2)
def test_equal_nans_and_zeros_of_either_sign_are_no_alarm(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([float("nan"), -0.0 if dist.get_rank() else 0.0] * 8).view(2, 8))
        model.bias.fill_(float("nan"))
    with closing(dcp.Checkpointer()) as checkpointer, warned() as messages:
        for step in range(8):
            checkpointer.save({"model": model}, tmp_path / f"step-{step}")
    assert messages == []


@on_ranks(2)
def test_a_mapping_beside_a_module_of_its_name_is_loaded_and_not_passed_over(tmp_path: Path) -> None:
    """Rank 1 has the state dict of a module that rank 0 has as an object."""
    saved = nn.Linear(2, 2)
    for parameter in saved.parameters():
        nn.init.constant_(parameter, 5)
    dcp.save({"model": saved}, tmp_path / "ck")
    module = nn.Linear(2, 2)
    mapping = {key: torch.zeros_like(value) for key, value in module.state_dict().items()}
    dcp.load({"model": module if dist.get_rank() == 0 else mapping}, tmp_path / "ck")
    loaded = module.state_dict() if dist.get_rank() == 0 else mapping
    assert all(bool((value == 5).all()) for value in loaded.values())
