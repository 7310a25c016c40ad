"""What ``fabric.save`` puts into a checkpoint and ``fabric.load`` takes out: names, filters, strictness, the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_plugin.core.paths import ObjectPath, Where
from tests.compare import assert_same, full, same_bytes
from tests.launch import on_ranks
from tests.layouts import whole_state
from tests.places import save_file
from tests.training import WORLD_SIZE, cosine, two_groups


@on_ranks(1)
def test_names_are_those_that_every_integration_and_stock_read(tmp_path: Path) -> None:
    """Those of integration/stored.py, so that every other integration and stock torch find model and optimizer."""
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import dcp_plugin as dcp
    from tests.fabric import training as t

    training = t.Training(t.attached("single")).run(1)
    training.save(tmp_path / "saved")
    saved = training.whole_state()
    info = dcp.inspect(tmp_path / "saved")
    assert {key.partition(".")[0] for key in (*(x.key for x in info.tensors), *info.values)} == {
        "model", "optim", "extra",
    }  # fmt: skip
    assert info.step == 1

    def fresh() -> tuple[t.Net, torch.optim.Optimizer]:
        net = t.Net()
        optimizer = two_groups(net, lr=0.5)
        cosine(optimizer)  # stock loads only the fields that are there
        return net, optimizer

    net, optimizer = fresh()
    dcp.load({"model": net, "optim": optimizer}, tmp_path / "saved")
    assert_same(saved, whole_state(net, optimizer))

    net, optimizer = fresh()
    model_state, optim_state = get_state_dict(net, optimizer)
    stock.load({"model": model_state, "optim": optim_state}, checkpoint_id=str(tmp_path / "saved"))
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    assert_same(saved, whole_state(net, optimizer))

    dcp.save({"model": net, "optim": optimizer, "epoch": 7}, tmp_path / "plain")
    back = t.Training(t.attached("single"), seed=5)
    back.state.update(epoch=0)
    back.fabric.load(tmp_path / "plain", {name: back.state[name] for name in ("net", "optimizer")})
    assert_same(saved, back.whole_state())
    assert back.fabric.load(tmp_path / "plain", {"net": back.state["net"]}).keys() == {"optim", "epoch"}


@on_ranks(1)
def test_several_models_and_optimizers(tmp_path: Path) -> None:
    """Modules and optimizers are found by the user's names, and by their order where nobody wrote names."""
    import dcp_plugin as dcp
    from tests.fabric import training as t

    fabric = t.attached("single")

    def pair() -> dict[str, Any]:
        generator, critic = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (generator, critic)]
        set_up = [fabric.setup(*both) for both in zip((generator, critic), optimizers, strict=True)]
        (generator, of_generator), (critic, of_critic) = set_up
        for model, optimizer in set_up:
            fabric.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
        return {"g": generator, "c": critic, "og": of_generator, "oc": of_critic}

    first = pair()
    fabric.save(tmp_path / "two", first)
    keys = {tensor.key.partition(".")[0] for tensor in dcp.inspect(tmp_path / "two").tensors}
    assert keys == {"model_0", "model_1", "optim_0", "optim_1", "extra"}
    for names in (["c", "oc", "g", "og"], ["c", "oc"]):
        second = pair()
        fabric.load(tmp_path / "two", {name: second[name] for name in names})
        for name in names:
            assert_same(_flat(first[name].state_dict()), _flat(second[name].state_dict()))

    dcp.save({"model_0": first["g"].module, "model_1": first["c"].module}, tmp_path / "by-order")
    second = pair()
    fabric.load(tmp_path / "by-order", {"one": second["g"], "other": second["c"]})
    assert_same(first["c"].state_dict(), second["c"].state_dict())
    with pytest.raises(dcp.CheckpointMismatch, match=r"has no 'one'; it has model_0, model_1"):
        fabric.load(tmp_path / "by-order", {"one": second["g"]})


@on_ranks(2)
def test_models_in_another_order_on_rank_1_are_not_exchanged(tmp_path: Path) -> None:
    from tests.fabric import training as t

    fabric = t.attached("ddp")

    def pair(value: float) -> dict[str, Any]:
        models = {name: nn.Linear(300, 3) for name in ("g", "c")}
        for number, model in enumerate(models.values()):
            nn.init.constant_(model.weight, value + number)
        pairs = [(name, fabric.setup(model)) for name, model in models.items()]
        return {"epoch": int(value), **dict(reversed(pairs) if fabric.global_rank == 1 else pairs)}

    saved, loaded = pair(1.0), pair(5.0)
    fabric.save(tmp_path / "two", saved)
    fabric.load(tmp_path / "two", loaded)
    for name, value in (("g", 1.0), ("c", 2.0)):
        assert loaded[name].weight.unique().tolist() == [value]
    assert loaded["epoch"] == 1


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    from dcp_plugin.core.format.keys import flatten

    return flatten(state)[0]


@on_ranks(1)
def test_a_filter_is_a_callable_per_name_of_the_state(tmp_path: Path) -> None:
    """Fabric's own: a callable per name of the state, asked about each entry of the state dict."""
    from tests.fabric import training as t

    filters = {
        "net": lambda key, value: "bias" in key and value.dim() == 1,
        "settings": lambda key, value: value > 1,
        "schedule": lambda key, value: key == "last_epoch",
        "history": lambda key, value: False,  # a list has no entries to ask about
    }
    results = []
    for fabric in (t.fabric_for("single"), t.attached("single")):
        training = t.Training(fabric).run(1)
        training.state["settings"] = {"a": 1, "b": 2}
        path = tmp_path / type(fabric.strategy).__name__
        fabric.save(path, {name: training.state[name] for name in ("optimizer", *filters)}, filter=filters)
        results.append(fabric.load(path))
    stock, ours = results
    assert stock.keys() == ours.keys()
    for result in results:
        del result["optimizer"]
    assert_same(_flat(stock), _flat(ours))
    assert ours["settings"] == {"b": 2}
    assert list(ours["schedule"]) == ["last_epoch"]
    assert all("bias" in key for key in ours["net"])


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_module_gets_what_its_own_state_dict_gave(tmp_path: Path, layout: str) -> None:
    from tests.fabric import training as t

    class Owning(t.Net):
        handed: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            bias = state.pop("body.0.bias")
            return {**state, "renamed": bias, "count": {"of": 3}, "average": torch.arange(3)}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            self.handed = list(state), state["count"], full(state["average"])
            mine = {key: value for key, value in state.items() if not key.startswith("head.")}
            return super().load_state_dict({**mine, "body.0.bias": state["renamed"]}, strict=False)

    def set_up(fabric: Any) -> tuple[Any, dict[str, Any]]:
        net = Owning()
        model = fabric.setup_module(net)
        return net, {"net": model, "optimizer": fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))}

    fabric = t.attached(layout)
    saved, state = set_up(fabric)
    fabric.backward(state["net"](torch.ones(2, 6)).sum())
    state["optimizer"].step()
    fabric.save(tmp_path / layout, state)
    for raw in (False, True):
        loaded, target = set_up(fabric)
        if raw:
            fabric.load_raw(tmp_path / layout, target["net"])
            fabric.load_raw(tmp_path / layout, target["optimizer"])
        else:
            fabric.load(tmp_path / layout, target)
        names, count, average = loaded.handed
        assert set(names) == set(saved.state_dict()) and count == {"of": 3}
        assert same_bytes(average, torch.arange(3))
        assert same_bytes(full(loaded.body[0].bias), full(saved.body[0].bias))
        assert not same_bytes(full(loaded.head.weight), full(saved.head.weight))


@on_ranks(2)
def test_a_filter_on_two_ranks_keeps_the_values_of_the_others(tmp_path: Path) -> None:
    """Fabric refuses this for FSDP and ModelParallel. Here the others keep their values."""
    import dcp_plugin as dcp
    from tests.fabric import training as t

    for layout in ("ddp", "fsdp1", "fsdp2"):
        fabric = t.attached(layout)
        first = t.Training(fabric).run(1)
        filters = {"net": lambda key, value: key.startswith("head"), "optimizer": lambda key, value: key == "state"}
        fabric.save(tmp_path / layout, first.state, filter=filters)
        keys = [tensor.key for tensor in dcp.inspect(tmp_path / layout).tensors]
        assert {key for key in keys if key.startswith("model")} == {"model.head.weight", "model.head.bias"}
        assert any(key.startswith("optim.state") for key in keys)
        assert not any("param_groups" in key for key in keys)
        second = t.Training(fabric, seed=5)
        before, saved = second.whole_state(), first.whole_state()
        fabric.load(tmp_path / layout, {"net": second.state["net"]}, strict=False)
        after = second.whole_state()
        for key in (key for key in after if key.startswith("model.")):
            assert_same({key: after[key]}, {key: (saved if "head" in key else before)[key]})
        with pytest.raises(dcp.CheckpointMismatch, match=r"model\.body"):
            fabric.load(tmp_path / layout, {"net": second.state["net"]})


@on_ranks(1)
def test_a_strict_load_raises_what_a_lenient_one_passes_over(tmp_path: Path) -> None:
    import dcp_plugin as dcp
    from tests.fabric import training as t

    fabric = t.attached("single")
    training = t.Training(fabric).run(1)
    training.save(tmp_path / "saved")
    state = {"net": training.state["net"], "absent": 3}
    with pytest.raises(KeyError, match=r"has no 'absent'; it has net, optimizer, .*strict=False") as caught:
        fabric.load(tmp_path / "saved", state)
    assert isinstance(caught.value, dcp.CheckpointMismatch)
    fabric.load(tmp_path / "saved", state, strict=False)
    assert state["absent"] == 3
    larger = {"net": fabric.setup(nn.ModuleDict({"body": training.state["net"].body, "new": nn.Linear(1, 1)}))}
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.new\.weight is not in the checkpoint"):
        fabric.load(tmp_path / "saved", larger)
    fabric.load(tmp_path / "saved", larger, strict=False)
    with pytest.raises(dcp.CheckpointNotFound):
        fabric.load(tmp_path / "nowhere", state)


@on_ranks(1)
def test_a_load_returns_the_remainder_that_fabric_returns(place: Where) -> None:
    """What Fabric itself returns from a state that both saved; an optimizer's state is by name, not by number."""
    from tests.fabric import training as t

    rests, wholes = [], []
    for fabric in (t.fabric_for("single"), t.attached("single")):
        training = t.Training(fabric).run(1)
        path = place / type(fabric.strategy).__name__
        training.save(path)
        rests.append(fabric.load(path, {"step": 0, "optimizer": training.state["optimizer"]}))
        wholes.append(fabric.load(path))
    for stock, ours in (rests, wholes):
        assert stock.keys() == ours.keys()
        for name in stock.keys() - {"optimizer", "loader"}:
            assert_same(_flat({name: stock[name]}), _flat({name: ours[name]}))
    optimizer = wholes[1]["optimizer"]
    assert [len(group["params"]) for group in optimizer["param_groups"]] == [4, 2]
    assert optimizer["state"].keys() == {name for group in optimizer["param_groups"] for name in group["params"]}
    assert torch.equal(wholes[0]["optimizer"]["state"][0]["exp_avg"], optimizer["state"]["body.0.weight"]["exp_avg"])


@on_ranks(1)
def test_groups_of_equal_settings_are_groups_in_the_remainder(tmp_path: Path) -> None:
    import dcp_plugin as dcp
    from tests.fabric import training as t

    net = t.Net()
    optimizer = torch.optim.AdamW([{"params": net.body.parameters()}, {"params": net.head.parameters()}])
    dcp.save({"model": net, "optim": optimizer}, tmp_path / "saved")
    groups = t.attached("single").load(tmp_path / "saved")["optim"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [4, 2]


@on_ranks(1)
def test_the_remainder_has_an_optimizer_in_its_own_layout(tmp_path: Path) -> None:
    from tests.fabric import training as t

    class Numbered(torch.optim.SGD):
        """An optimizer whose state dict has a layout of its own, with numbers for keys."""

        def state_dict(self) -> dict[Any, Any]:  # type: ignore[override]
            return {0: {"steps": 3}, 1: {"steps": 5}}

    fabric = t.attached("single")
    model = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, Numbered(model.parameters(), lr=0.1))
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    assert fabric.load(tmp_path / "saved")["optimizer"] == {0: {"steps": 3}, 1: {"steps": 5}}


@on_ranks(2)
def test_no_rank_gets_full_models_in_the_remainder_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    """Where ranks keep shards, no rank gets whole models, as with Fabric itself."""
    from tests.fabric import training as t

    for layout in ("fsdp1", "fsdp2", "ddp"):
        fabric = t.attached(layout)
        training = t.Training(fabric).run(1)
        training.save(tmp_path / layout)
        rest = fabric.load(tmp_path / layout, {"net": training.state["net"]})
        others = {"schedule", "loader", "step", "history"}
        assert rest.keys() == (others | {"optimizer"} if layout == "ddp" else others)
        assert rest["history"] == [1]
        if layout != "ddp":
            with pytest.raises(ValueError, match="needs a state with the module"):
                fabric.load(tmp_path / layout)


@on_ranks(1)
def test_a_state_dict_alone_is_the_model_for_every_integration(tmp_path: Path) -> None:
    import dcp_plugin as dcp
    from tests.fabric import training as t

    saved, loaded = t.Net(), t.Net()
    t.attached("single").save(tmp_path / "saved", saved.state_dict())
    dcp.load({"model": loaded}, tmp_path / "saved")
    assert_same(saved.state_dict(), loaded.state_dict())


@on_ranks(1)
def test_random_streams_and_a_value_of_their_name_are_both_restored(tmp_path: Path) -> None:
    from tests.fabric import training as t

    training = t.Training(t.attached("single")).run(1)
    training.state["rng"] = {"0": "mine"}
    training.save(tmp_path / "saved")
    drawn = torch.rand(3)
    other = t.Training(t.attached("single"), seed=5)
    other.state["rng"] = None
    other.load(tmp_path / "saved")
    assert other.state["rng"] == {"0": "mine"}
    assert torch.equal(torch.rand(3), drawn)


@on_ranks(2)
def test_load_raw_fills_one_module_or_one_optimizer(place: Where) -> None:
    """One module or one optimizer: from a whole checkpoint of ours, and from a file of plain torch."""
    import dcp_plugin as dcp
    from tests.fabric import training as t

    for layout in ("ddp", "fsdp1", "fsdp2"):
        fabric = t.attached(layout)
        first = t.Training(fabric).run(1)
        first.save(place / layout)
        saved = first.whole_state()
        second = t.Training(fabric, seed=5)
        streams = torch.get_rng_state()
        fabric.load_raw(place / layout, second.state["net"])
        fabric.load_raw(place / layout, second.state["optimizer"])
        assert_same(saved, second.whole_state())
        assert torch.equal(streams, torch.get_rng_state())
        alone = torch.optim.SGD(nn.Linear(2, 2).parameters())
        with pytest.raises(dcp.CheckpointMismatch, match="Load it with its model"):
            fabric.load_raw(place / layout, alone)
        if layout == "fsdp1":  # Fabric reads files through FSDP1's full state dict, which crashes on a CPU
            continue
        weights = {key.removeprefix("model."): value for key, value in saved.items() if key.startswith("model.")}
        if fabric.global_rank == 0:
            save_file(weights, place / f"{layout}.pt")
        fabric.barrier()
        third = t.Training(fabric, seed=6)
        if layout == "fsdp2" and isinstance(place, ObjectPath):  # Fabric's own strategy reads a disk only
            with pytest.raises(ValueError, match="must be on a file system"):
                fabric.load_raw(place / f"{layout}.pt", third.state["net"])
            continue
        fabric.load_raw(place / f"{layout}.pt", third.state["net"])
        loaded = {key: value for key, value in third.whole_state().items() if key.startswith("model.")}
        assert_same(loaded, {key: value for key, value in saved.items() if key.startswith("model.")})


@on_ranks(2)
def test_optimizers_and_modules_that_were_not_set_up_come_back(tmp_path: Path) -> None:
    """Optimizers of a parameter that is in no module, and of a module that is neither set up nor saved: as Fabric
    alone saves and loads them."""
    from tests.fabric import training as t

    def start(seed: int, native: bool) -> tuple[Any, dict[str, Any]]:
        fabric = t.fabric_for("ddp") if native else t.attached("ddp")
        torch.manual_seed(seed)
        net, other, loose = t.Net(), nn.Linear(1, 1), nn.Parameter(torch.ones(()))
        net, first = fabric.setup(net, torch.optim.AdamW([{"params": net.parameters()}, {"params": [loose]}]))
        second = fabric.setup_optimizers(torch.optim.AdamW(other.parameters()))
        torch.manual_seed(seed + fabric.global_rank)
        fabric.backward((other(net(torch.randn(2, 6))) * loose).sum())
        for optimizer in (first, second):
            optimizer.step()
        return fabric, {"net": net, "first": first, "second": second, "loose": loose}

    found = []
    for native in (True, False):
        fabric, state = start(1, native)
        fabric.save(tmp_path / str(native), state)
        fabric.barrier()
        fabric, fresh = start(2, native)
        fabric.load(tmp_path / str(native), fresh)
        slots = {
            f"{name}.{number}.{slot}": value
            for name in ("first", "second")
            for number, of_one in fresh[name].state_dict()["state"].items()
            for slot, value in of_one.items()
        }
        found.append({**slots, "loose": fresh["loose"].detach()})
    assert_same(*found)
