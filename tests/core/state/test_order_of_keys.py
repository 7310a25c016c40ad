"""The keys of a state may come in another order on each rank, as from a set or from a listing of a directory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests.compare import assert_same, full_state
from tests.launch import gathered, on_ranks
from tests.layouts import build, train, whole_state


def _reversed_on_rank_1(state: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(state.items())) if dist.get_rank() == 1 else state


class Together:
    """An object whose methods need all ranks at the same time, each object with a tensor of another size."""

    def __init__(self, number: int) -> None:
        self.value = torch.full((number,), float(number))

    def state_dict(self) -> dict[str, Any]:
        self._meet()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meet()
        self.value = state["value"]

    def _meet(self) -> None:
        lengths = gathered(len(self.value))
        assert len(set(lengths)) == 1, f"ranks called different objects: {lengths}"


@on_ranks(2)
def test_stateful_objects_are_called_in_one_order(tmp_path: Path) -> None:
    def state() -> dict[str, Together]:
        return {name: Together(number) for number, name in enumerate(("c", "a", "b"), 1)}

    for name, save in (("sync", dcp.save), ("async", _save_asynchronously)):
        save(_reversed_on_rank_1({**state(), "nested": _reversed_on_rank_1(state())}), tmp_path / name)
        target = {**state(), "nested": _reversed_on_rank_1(state())}
        for one in (*target.values(), *target["nested"].values()):
            if isinstance(one, Together):
                one.value.zero_()
        dcp.load(_reversed_on_rank_1(target), tmp_path / name)
        assert_same(
            {key: one.value for key, one in target.items() if isinstance(one, Together)},
            {key: one.value for key, one in state().items()},
        )


def _save_asynchronously(state: dict[str, Any], path: Path) -> None:
    with closing(dcp.Checkpointer(async_save=True)) as checkpointer:
        checkpointer.save(state, path).wait()


@on_ranks(2)
def test_two_fsdp1_models_and_their_optimizers_in_reversed_order(tmp_path: Path) -> None:
    def both(seed: int) -> dict[str, Any]:
        (g, opt_g), (d, opt_d) = build("fsdp1", seed), build("fsdp1", seed + 1)
        train(g, opt_g, 2)
        train(d, opt_d, 3)
        return {"g": g, "opt_g": opt_g, "d": d, "opt_d": opt_d}

    saved, loaded = both(0), both(5)
    dcp.save(_reversed_on_rank_1(saved), tmp_path / "ck")
    dcp.load(_reversed_on_rank_1(loaded), tmp_path / "ck")
    for name in ("g", "d"):
        pair = [whole_state(state[name], state[f"opt_{name}"]) for state in (loaded, saved)]
        assert_same(*map(full_state, pair))


@on_ranks(2)
def test_fsdp1_models_inside_of_stateful_objects_in_reversed_order(tmp_path: Path) -> None:
    """As the tutorial's AppState: ``state_dict`` gathers, ``load_state_dict`` scatters."""

    class App:
        def __init__(self, seed: int) -> None:
            self.model, _ = build("fsdp1", seed)

        def state_dict(self) -> dict[str, Any]:
            return {"model": dist.checkpoint.state_dict.get_model_state_dict(self.model)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            dist.checkpoint.state_dict.set_model_state_dict(self.model, state["model"])

    saved, loaded = ({"b": App(seed), "a": App(seed + 1)} for seed in (0, 5))
    dcp.save(_reversed_on_rank_1(saved), tmp_path / "ck")
    dcp.load(_reversed_on_rank_1(loaded), tmp_path / "ck")
    for name in ("a", "b"):
        assert_same(full_state(loaded[name].state_dict()["model"]), full_state(saved[name].state_dict()["model"]))


def test_a_report_has_the_values_in_the_order_of_the_state(tmp_path: Path) -> None:
    state = {"weights": torch.ones(2), "epoch": 3, "best": 0.5}
    dcp.save(state, tmp_path / "ck")
    assert dcp.load(state, tmp_path / "ck").loaded == ["weights", "epoch", "best"]
    assert list(dcp.read(tmp_path / "ck")) == ["weights", "epoch", "best"]
