"""``dcp_plugin.diff``, ``first_divergence`` and ``dcp-plugin diff``: what differs is found, and nothing else, whoever
wrote the checkpoints, however they are distributed and wherever they are."""

from __future__ import annotations

import math
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.tools import amounts
from dcp_plugin.tools import diff as diff_module
from dcp_plugin.tools.agreement import paired
from dcp_plugin.tools.amounts import ulps
from dcp_plugin.tools.divergence import kind_of
from tests import launch, places
from tests.commands import invoke, json_of
from tests.damage import flip_byte
from tests.layouts import WORLD_SIZE, build, train


def _state(**other: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "epoch": 1, **other}


# The same bytes


def _save_in_layout(layout: str, source: Path, target: Path) -> None:
    model, optimizer = build(layout, seed=1)
    train(model, optimizer, 1)
    dcp.load({"model": model, "optim": optimizer}, source)
    dcp.save({"model": model, "optim": optimizer}, target)
    stock.save({"model": model.state_dict()}, checkpoint_id=target.with_suffix(".stock"))


@pytest.mark.long
@pytest.mark.parametrize("layouts", [["fsdp2"], ["ddp", "tp", "fsdp2@4"]])
def test_layouts_writers_and_formats_of_the_same_bytes_are_equal(tmp_path: Path, layouts: list[str]) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "plain")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for layout in layouts:
        launch.run(_save_in_layout, WORLD_SIZE[layout], layout, tmp_path / "plain", tmp_path / layout)
    for one, other in [("plain", layouts[0]), *pairwise(layouts)]:
        found = dcp.diff(tmp_path / one, tmp_path / other)
        assert found.equal, f"{one}, {other}: {found}"
        assert found.read or layouts[0] == "ddp"
        for file in (tmp_path / "model.safetensors", (tmp_path / other).with_suffix(".stock")):
            found = dcp.diff(file, tmp_path / other, "model.*")
            assert found.equal and "model.inp.weight" in found.read, "without checksums, they are read"


def test_what_checksums_tell_is_not_read(tmp_path: Path) -> None:
    for name in "ab":
        dcp.save(_state(), tmp_path / name)
        for data in (tmp_path / name).glob("*.distcp"):  # the size that it has to have, and nothing in it
            size = data.stat().st_size
            os.truncate(data, 0)
            os.truncate(data, size)
    found = dcp.diff(tmp_path / "a", tmp_path / "b")
    assert found.equal and found.unchanged == 5
    assert not found.read and not found.bytes_read
    with pytest.raises(dcp.CheckpointCorrupt, match=str(tmp_path)):
        dcp.diff(tmp_path / "a", tmp_path / "b", checksums=False)


def test_a_checkpoint_of_stock_and_one_of_torch_save_on_a_disk_and_in_a_bucket(place: Where) -> None:
    state = _state()
    dcp.save(state, place / "ours")
    whole = {"model": state["model"].state_dict(), "epoch": 1}
    stock.save(whole, checkpoint_id=str(place / "stock"), no_dist=True)
    changed = {"model": {**whole["model"], "1.bias": whole["model"]["1.bias"] + 1}, "epoch": 1}
    dcp.save(changed, place / "changed")
    assert dcp.diff(place / "ours", place / "stock").equal
    for a in ("ours", "stock"):
        found = dcp.diff(place / a, place / "changed")
        assert [(one.key, one.decided) for one in found.changed] == [
            ("model.1.bias", "checksums" if a == "ours" else "bytes")
        ]
        amount = found.changed[0].amount
        assert amount is not None and amount.share == 1 and math.isclose(amount.largest or 0, 1, rel_tol=1e-6)
    places.save_file(whole, place / "file.pt")
    assert dcp.diff(place / "ours", place / "file.pt").equal


# How much


@pytest.mark.parametrize(
    ("dtype", "old", "new", "largest"),
    [
        (torch.float32, 1.0, 1.5, 0.5),
        (torch.float64, 1.0, 1.0 + 2**-50, 2**-50),
        (torch.bfloat16, 1.0, 1.0078125, 0.0078125),
        (torch.float8_e4m3fn, 1.0, -2.0, 3.0),
        (torch.int64, 2**60, 2**60 + 1, 1.0),
        (torch.int64, -(2**63), 2**63 - 1, 2.0**64),
        (torch.uint8, 255, 0, 255.0),
        (torch.bool, True, False, 1.0),
        (torch.complex64, 3j, 4 + 3j, 4.0),
        (torch.float32, 0.0, -0.0, 0.0),
        (torch.float32, float("nan"), 1.0, None),
        (torch.float32, 1.0, float("inf"), None),
    ],
)
def test_how_much_an_element_differs(tmp_path: Path, dtype: torch.dtype, old: Any, new: Any, largest: Any) -> None:
    one = torch.ones(4, 5, dtype=torch.float32).to(dtype)
    one[2, 3] = old
    other = one.clone()
    other[2, 3] = new
    dcp.save({"w": one, "same": one}, tmp_path / "a")
    dcp.save({"w": other, "same": one}, tmp_path / "b")
    for checksums in (True, False):
        (changed,) = dcp.diff(tmp_path / "a", tmp_path / "b", checksums=checksums).changed
        assert changed.key == "w" and changed.amount is not None
        assert (changed.amount.elements, changed.amount.differ, changed.amount.largest) == (20, 1, largest)
        assert changed.amount.not_finite == (largest is None)
    (quick,) = dcp.diff(tmp_path / "a", tmp_path / "b", amounts=False).changed
    assert quick.amount is None


def test_norms_are_those_of_all_pieces_and_modules_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "_WINDOW", 1 << 10)
    one = {f"net.{part}.{name}": torch.randn(33, 20) for part in "ab" for name in "xy"}
    other = {key: value + (0.1 if key != "net.b.y" else 0) for key, value in one.items()}
    save_file(one, tmp_path / "one.safetensors")
    save_file(other, tmp_path / "other.safetensors")
    told: list[tuple[int, int]] = []
    found = dcp.diff(
        tmp_path / "one.safetensors", tmp_path / "other.safetensors", progress=lambda *now: told.append(now)
    )
    for changed in found.changed:
        name = changed.key.removeprefix("model.")
        assert changed.amount is not None
        assert math.isclose(changed.amount.norm, float(one[name].double().norm()), rel_tol=1e-9)
        apart = (other[name].double() - one[name].double()).norm()
        assert math.isclose(changed.amount.difference, float(apart), rel_tol=1e-9)
    assert {key: row[:2] for key, row in found.modules(3).items()} == {"model.net.a": (2, 2), "model.net.b": (1, 2)}
    assert found.modules(3)["model.net.b"][2].share == 0.5
    assert found.modules(1)["model"][0] == 3
    assert told[-1] == (2 * 4 * 33 * 20 * 4, 2 * 4 * 33 * 20 * 4) and len(told) > 8


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_classes_of_their_own_are_compared(tmp_path: Path) -> None:
    one = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 0, torch.qint8)
    other = torch.quantize_per_tensor(torch.arange(6.0) + 1, 0.5, 0, torch.qint8)
    for name, value in (("a", one), ("b", one), ("c", other)):
        dcp.save({"q": value, "w": torch.ones(2)}, tmp_path / name)
    for checksums in (True, False):
        assert dcp.diff(tmp_path / "a", tmp_path / "b", checksums=checksums).equal
        (changed,) = dcp.diff(tmp_path / "a", tmp_path / "c", checksums=checksums).changed
        assert changed.key == "q" and changed.amount is None


# Keys


def test_keys_are_renamed_reshaped_retyped_added_and_removed(tmp_path: Path) -> None:
    w, v = torch.arange(12.0), torch.randn(5)
    dcp.save({"a": {"w": w, "z": w.view(3, 4), "t": v, "u": torch.ones(()), "n": v.half()}, "x": 1}, tmp_path / "a")
    dcp.save({"b": {"w": w}, "a": {"z": w.view(4, 3), "t": v.double(), "k": torch.ones(())}, "x": v}, tmp_path / "b")
    found = dcp.diff(tmp_path / "a", tmp_path / "b")
    assert found.renamed == {"a.w": "b.w"}
    assert [(one.key, one.old, one.new) for one in found.reshaped] == [("a.z", (3, 4), (4, 3))]
    assert [(one.key, one.old, one.new) for one in found.retyped] == [
        ("a.t", "float32", "float64"),
        ("x", "value", "float32"),
    ]
    assert found.removed == ["a.u", "a.n"], "of a scalar that is 1, another name says that it is another"
    assert found.added == ["a.k"]
    assert not found.changed and not found.values and not found.unchanged


@pytest.mark.parametrize("b", ["ours", "safetensors"])
def test_a_renamed_module_is_found_and_a_prefix_makes_it_equal(tmp_path: Path, b: str) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].bias)  # the same bytes: the ends of the names tell
    dcp.save({"model": model}, tmp_path / "a")
    path = tmp_path / b
    if b == "ours":
        dcp.save({"net": model}, path)
    else:
        path = tmp_path / "net.safetensors"
        save_file({f"inner.{key}": value for key, value in model.state_dict().items()}, path)
    there = "net" if b == "ours" else "model.inner"
    found = dcp.diff(tmp_path / "a", path)
    assert found.renamed == {f"model.{key}": f"{there}.{key}" for key in model.state_dict()}
    assert not found.equal and not found.added and not found.removed
    assert dcp.diff(tmp_path / "a", path, rename={"model.": f"{there}."}).equal
    with pytest.raises(dcp.CheckpointMismatch, match=r"no selected key starts with 'modl\.'"):
        dcp.diff(tmp_path / "a", path, rename={"modl.": "net."})


def test_twenty_thousand_equal_tensors_are_paired_by_their_names() -> None:
    keys = [f"layers.{number}.weight" for number in range(20_000)]
    assert paired([f"a.{key}" for key in keys], [f"b.{key}" for key in reversed(keys)], 64) == {
        f"a.{key}": f"b.{key}" for key in keys
    }


def test_globs_select_what_is_compared(tmp_path: Path) -> None:
    dcp.save(_state(epochs=1), tmp_path / "a")
    dcp.save(_state(epochs=2), tmp_path / "b")
    assert dcp.diff(tmp_path / "a", tmp_path / "b", include="model.*").equal
    assert dcp.diff(tmp_path / "a", tmp_path / "b", exclude="epochs").equal
    with pytest.raises(dcp.CheckpointMismatch, match="has no key that 'epocs' matches"):
        dcp.diff(tmp_path / "a", tmp_path / "b", exclude="epocs")


def test_values_are_compared_part_by_part(tmp_path: Path) -> None:
    nan = float("nan")
    loop: list[Any] = [1, nan, (torch.ones(2), "x")]
    dcp.save({"v": {"deep": [loop, {"lr": 0.1}]}, "s": "run-1", "same": loop}, tmp_path / "a")
    dcp.save({"v": {"deep": [loop, {"lr": 0.2}]}, "s": "run-2", "same": loop}, tmp_path / "b")
    found = dcp.diff(tmp_path / "a", tmp_path / "b")
    told = {one.key + one.at: (one.old, one.new, one.text) for one in found.values}
    assert told["s"] == ("'run-1'", "'run-2'", True)
    (other,) = [value for key, value in told.items() if key != "s"]
    assert other == ("0.1", "0.2", False)
    assert dcp.diff(tmp_path / "a", tmp_path / "a", checksums=False).equal


# Runs


def test_values_with_as_many_parts_as_are_compared_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts, "_MOST_PAIRS", 3)
    assert list(amounts.differences([1, 2], [1, 2])) == []
    (leaf,) = amounts.differences([1, 2, 3], [1, 2, 3])
    assert (leaf.at, leaf.old) == ("[2]", "too much to compare")


def _pair_of_runs(root: Where, planted: bool = True) -> torch.Tensor:
    """Two runs of 3 and 4 saves; in step 300 of the second, an element of a moment of Adam is another one."""
    for run, steps in (("one", (100, 200, 300)), ("two", (50, 100, 200, 300))):
        model, optimizer = build("plain")
        for step in steps:
            train(model, optimizer, 1, seed=step) if step != 50 else None
            state = {"model": model, "optim": optimizer, "extra": {"rng": torch.arange(4), "path": f"{run}/{step}"}}
            moment = optimizer.state[model.inp.weight]["exp_avg"] if step != 50 else torch.zeros(1)
            if planted and (run, step) == ("two", 300):
                before = moment[7, 4].clone()
                moment[7, 4] = torch.nextafter(before, torch.tensor(9.0))
            dcp.save(state, root / run / f"step-{step}", step=step)
    return torch.stack((before, moment[7, 4])) if planted else moment


def test_the_first_divergence_of_two_runs_is_one_element_of_one_step(place: Where) -> None:
    old, new = _pair_of_runs(place).tolist()
    found = dcp.tools.first_divergence(place / "one", place / "two")
    assert (found.compared, found.only_in_1, found.only_in_2) == ([100, 200, 300], [], [50])
    assert (found.step, found.key, found.at) == (300, "optim.state.inp.weight.exp_avg", "[7, 4]")
    assert found.values == (repr(old), repr(new)) and found.ulps == 1
    assert found.differ == {"optimizer": [found.key]} and found.still_equal == ["model", "random streams"]
    assert found.texts == ["extra.path"] and not found.deterministic
    assert found.verdict == (
        f"Bit-identical through step 200; first difference at step 300 in optim.state.inp.weight.exp_avg[7, 4] "
        f"({old!r} -> {new!r}, 1 ulp apart); the model and the random streams were still equal."
    )


def test_two_runs_that_compute_the_same_are_bit_identical(tmp_path: Path) -> None:
    _pair_of_runs(tmp_path, planted=False)
    result = invoke("diff", tmp_path / "one", tmp_path / "two", "--first-divergence")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "Bit-identical through step 300, in all of the 3 checkpoints that both runs have.",
        "compared: 3 of the steps that both have, 100 to 300",
        f"only in {tmp_path / 'two'}: step 50",
        "texts that differ, and do not count: extra.path",
    ]
    document = json_of("diff", tmp_path / "one", tmp_path / "two", "--first-divergence")
    assert document["divergence"]["deterministic"] is True


def test_runs_without_a_common_step_and_what_is_no_run_are_told(tmp_path: Path) -> None:
    for run, step in (("one", 1), ("two", 2)):
        dcp.save({"n": 1}, tmp_path / run / f"step-{step}", step=step)
    with pytest.raises(dcp.CheckpointMismatch, match=r"\(steps 1\) .*\(steps 2\) have no step in common"):
        dcp.tools.first_divergence(tmp_path / "one", tmp_path / "two")
    with pytest.raises(dcp.CheckpointNotFound, match="is not the directory of a run"):
        dcp.tools.first_divergence(tmp_path / "one", tmp_path / "three")
    (tmp_path / "empty").mkdir()
    with pytest.raises(dcp.CheckpointNotFound, match="no complete checkpoint with a step"):
        dcp.tools.first_divergence(tmp_path / "empty", tmp_path / "one")


def test_a_run_of_stock_has_the_steps_of_its_names(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"model": {"w": torch.full((2, 2), step)}}, tmp_path / "ours" / f"step-{step}", step=step)
        state = {"model": {"w": torch.full((2, 2), 1)}}
        stock.save(state, checkpoint_id=tmp_path / "stock" / f"checkpoint-{step}", no_dist=True)
    found = dcp.tools.first_divergence(tmp_path / "ours", tmp_path / "stock")
    assert (found.identical_through, found.step, found.key, found.at) == (1, 2, "model.w", "[0, 0]")
    assert found.values == ("2", "1") and found.ulps is None


def test_keys_belong_to_what_the_checkpoint_or_their_names_say() -> None:
    kinds = {"net": "module", "net.opt": "optimizer"}
    assert kind_of("net.w", kinds) == "model" and kind_of("net.opt.state.w", kinds) == "optimizer"
    assert kind_of("extra.rng.0.streams.torch", {}) == "random streams"
    assert kind_of("extra.dataloaders.0", {}) == "data loader"
    assert kind_of("optim.state.w.exp_avg", {}) == "optimizer" and kind_of("extra.loops", {}) == "other state"


def test_ulps_count_the_numbers_between_two_floats() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        one = torch.tensor([1.0], dtype=dtype)
        assert ulps(one, one + torch.finfo(dtype).eps) == 1
        tiny = torch.tensor([torch.finfo(dtype).smallest_normal], dtype=dtype)
        assert ulps(-tiny * 0, tiny * 0) == 0 and (ulps(-tiny, tiny) or 0) > 2
    assert ulps(torch.tensor([1]), torch.tensor([2])) is None
    assert ulps(torch.tensor([1.0]), torch.tensor([float("nan")])) is None


# The command


def test_the_table_for_people(tmp_path: Path) -> None:
    ones = {"a": {"x": torch.ones(4), "y": torch.ones(2, 2)}, "b": {"x": torch.ones(8), "old": torch.zeros(3)}}
    twos = {"a": {"x": torch.tensor([1, 1, 1.5, 1]), "y": torch.ones(2, 2)}, "b": {"x": torch.ones(2, 4)}}
    dcp.save({"model": ones, "epoch": 1}, tmp_path / "a")
    dcp.save({"model": twos, "epoch": 2}, tmp_path / "b")
    result = invoke("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    *lines, last = result.stdout.splitlines()
    assert lines == [
        "module   tensors  elements  largest  relative",
        "model.a   1 of 2     12.5%      0.5  2.50e-01",
        "",
        "changed: 1",
        "tensor     shape  dtype    elements  largest  relative",
        "model.a.x  4      float32     25.0%      0.5  2.50e-01",
        "",
        "other values: 1",
        "value  A  B",
        "epoch  1  2",
        "",
        "reshaped: 1",
        "tensor     A  B",
        "model.b.x  8  2 x 4",
        "",
        "only in A: 1",
        "key",
        "model.b.old",
        "",
        f"{tmp_path / 'a'} and {tmp_path / 'b'} differ: 1 changed, 1 removed, 1 reshaped, 1 values differ, 1 unchanged",
    ]
    assert last.startswith("2 keys compared by their checksums, 1 by their bytes; ")


def test_exit_statuses_and_documents(tmp_path: Path) -> None:
    dcp.save(_state(), tmp_path / "a")
    dcp.save(_state(epoch=2), tmp_path / "b")
    dcp.save({"net": _state()["model"], "epoch": 1}, tmp_path / "c")
    result = invoke("diff", tmp_path / "a", tmp_path / "a")
    assert result.exit_code == 0 and "are equal: 5 keys" in result.stdout
    assert invoke("diff", tmp_path / "a", tmp_path / "b", "--include", "model.*").exit_code == 0
    assert invoke("diff", tmp_path / "a", tmp_path / "c", "--rename", "model.=net.").exit_code == 0
    assert invoke("diff", tmp_path / "a", tmp_path / "c").exit_code == 1
    assert invoke("diff", tmp_path / "a", tmp_path / "c", "--rename", "model.").exit_code == 2
    assert invoke("diff", tmp_path / "a", tmp_path / "b", "--first-divergence", "--rename", "a=b").exit_code == 2
    for other in "bc":
        found = json_of("diff", tmp_path / "a", tmp_path / other, status=1)["diff"]
        assert not found["equal"] and found["unchanged"] == (4 if other == "b" else 1)
    _pair_of_runs(tmp_path)
    document = json_of("diff", tmp_path / "one", tmp_path / "two", "--first-divergence", status=1)
    assert document["divergence"]["ulps"] == 1
    steps = [tmp_path / run / "step-300" for run in ("one", "two")]
    found = json_of("diff", *steps, status=1)["diff"]
    assert [one["key"] for one in found["changed"]] == ["optim.state.inp.weight.exp_avg"]
    assert found["modules"][0]["module"] == "optim.state.inp" and found["modules"][0]["amount"]["differ"] == 1


def test_what_is_no_checkpoint_or_damaged_is_told_in_a_line(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(64, 64)}, tmp_path / "a")
    dcp.save({"model": nn.Linear(64, 64)}, tmp_path / "b")
    (tmp_path / "text.txt").write_text("nothing")
    for other in ("none", "text.txt"):
        result = invoke("diff", tmp_path / "a", tmp_path / other)
        assert result.exit_code == 3 and str(tmp_path / other) in result.stderr and "Traceback" not in result.output
    assert json_of("diff", tmp_path / "a", tmp_path / "none", status=3)["error"]["type"] == "CheckpointNotFound"
    data = next((tmp_path / "b").glob("*.distcp"))
    flip_byte(data)
    result = invoke("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 3 and "model.weight" in result.stderr and str(data.name) in result.stderr


def test_one_that_is_deleted_from_the_disk_meanwhile_is_compared_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "_WINDOW", 1 << 12)
    for name in "ab":
        dcp.save({f"w{number}": torch.full((1024,), float(number)) for number in range(20)}, tmp_path / name)
    found: dcp.tools.CheckpointDiff | str
    try:
        found = dcp.diff(
            tmp_path / "a",
            tmp_path / "b",
            checksums=False,
            progress=lambda done, total: shutil.rmtree(tmp_path / "b", ignore_errors=True),
        )
    except dcp.CheckpointNotFound as error:
        found = str(error)
    assert not (tmp_path / "b").exists()
    assert f"{tmp_path / 'b'} was deleted" in found if isinstance(found, str) else found.equal


def test_tied_weights_and_their_export_are_equal(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 4, bias=False), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    dcp.save({"model": model}, tmp_path / "ck")
    dcp.export(tmp_path / "ck", tmp_path / "x.safetensors", exclude="model.head.*")
    for a, b in (("ck", "x.safetensors"), ("x.safetensors", "ck")):
        assert dcp.diff(tmp_path / a, tmp_path / b).equal
    changed = model["embed"].weight.detach() + 1
    dcp.save({"model": {"embed": {"weight": changed}}}, tmp_path / "other")
    assert not dcp.diff(tmp_path / "ck", tmp_path / "other").equal
