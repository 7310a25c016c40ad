"""Partial loads: which keys, under which names, what is judged, and what the errors say. One process."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as stock
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dcp_plugin as dcp
from dcp_plugin.core.format.derived_index import index_of
from dcp_plugin.core.format.index import Location, StoredChunk, StoredValue
from dcp_plugin.core.loading.forecast import plan_load
from dcp_plugin.core.loading.renames import Rename, RenamedKeys, prefixes_of
from dcp_plugin.core.partial import PartialLoad
from tests.compare import assert_same, same_bytes
from tests.layouts import Net, train

PRESETS = Path(__file__).parents[3] / "configs" / "partial"


class FineTune(nn.Module):
    """A pre-trained part, and something new."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrain = Net()
        self.head = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pretrain(x))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    train(model, optimizer, 2)
    path = tmp_path_factory.mktemp("pretrained") / "ck"
    dcp.save({"model": model, "optim": optimizer, "extra": {"a": {"x": 1, "list": [1, 2]}, "b": 3}}, path)
    return path, model, optimizer


def _message(state: dict[str, Any], path: Path, partial: PartialLoad | None) -> str:
    """Of the error of a load, without the path; nothing may have been overwritten."""
    before = copy.deepcopy({name: module.state_dict() for name, module in state.items()})
    with pytest.raises(dcp.CheckpointMismatch) as caught:
        dcp.load(state, path, partial)
    for name, module in state.items():
        assert_same(before[name], module.state_dict())
    return str(caught.value).replace(str(path), "CKPT")


# Names

_names = st.text("ab.", max_size=4)


@settings(deadline=None)
@given(st.dictionaries(_names, _names, max_size=5), st.text("ab.", max_size=6))
def test_the_longest_prefix_decides_alone(rename: dict[str, str], key: str) -> None:
    rules = prefixes_of("m", "m", Rename.of({f"m.{here}": there for here, there in rename.items()}))
    found = next(there + key.removeprefix(here) for here, there in rules if key.startswith(here))
    fitting = [here for here in rename if key.startswith(here)]
    assert found == (rename[max(fitting, key=len)] + key.removeprefix(max(fitting, key=len)) if fitting else f"m.{key}")


_keys = st.sets(st.text("ab", min_size=1, max_size=2).map(".".join), min_size=1, max_size=6)


@settings(deadline=None)
@given(_keys, _keys, st.dictionaries(_names, _names.map("m.".__add__), max_size=4))
def test_every_key_has_one_place_and_what_is_nobodys_is_told_once(
    names: set[str], stored: set[str], rename: dict[str, str]
) -> None:
    rules = prefixes_of("m", "m", Rename.of({f"m.{here}": there for here, there in rename.items()}))
    nothing = StoredValue((StoredChunk((), (), Location("file", 0, 0, 0, 0)),))
    index = index_of([(f"m.{key}", nothing) for key in sorted(stored)], {"file": 0})
    source = RenamedKeys("module", "m", rules, names=names)
    entries, _ = source.entries(index)
    for name in names:
        place = next(there + name.removeprefix(here) for here, there in rules if name.startswith(here))
        assert source.stored(name) == place
        assert (name in entries) == (place in index)
    claimed = {source.stored(name) for name in names}
    nobodys = [source.stored(key) for key in entries if key not in names]
    assert not claimed & set(nobodys) and set(nobodys) <= set(index)


def test_a_prefix_that_is_shorter_than_a_name_goes_in_front_of_all_of_it() -> None:
    assert prefixes_of("enc", "enc", Rename.of({"": "model."})) == (("", "model.enc."),)
    assert prefixes_of("enc", "enc", Rename.of({"en": "mod"})) == (("", "modc."),)


def test_a_regular_expression_goes_before_prefixes_and_the_first_one_wins() -> None:
    rename = Rename.of({"m.": "x.", r"re:m\.(\d+)\.(.*)": r"first.\1.\2", r"re:m\.(.*)": r"second.\1"})
    assert rename.by_pattern("m.3.w") == "first.3.w"
    assert rename.by_pattern("m.w") == "second.w"
    assert rename.by_pattern("other.m.3.w") is None, "the whole key has to match"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rename": {"re:(": "a"}}, "unterminated subpattern"),
        ({"rename": {"re:a": r"\1"}}, "invalid group reference"),
        ({"rename": {"a": 1}}, "both must be text"),
        ({"rename": ["a"]}, "must map prefixes to prefixes"),
        ({"missing": "raise"}, "none of error, warn, ignore"),
        ({"include": ()}, "nothing would be loaded"),
        ({"exclude": ("",)}, "not a glob"),
    ],
)
def test_what_cannot_be_meant_is_an_error_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PartialLoad(**wrong)


def test_it_takes_what_hydra_gives() -> None:
    config = OmegaConf.create(
        {"include": ["a.*"], "exclude": "b.*", "rename": {"model.pretrain.": "model."}, "missing": "warn"}
    )
    partial = PartialLoad(**config)  # type: ignore[arg-type]
    assert partial == PartialLoad(("a.*",), ("b.*",), {"model.pretrain.": "model."}, "warn")
    assert type(partial.rename) is dict and hash(partial)


# What is loaded


def test_a_pretrained_part_is_loaded_from_another_prefix(pretrained: Any) -> None:
    path, model, _ = pretrained
    target = FineTune()
    head = copy.deepcopy(target.head.state_dict())
    report = dcp.load(
        {"model": target}, path, PartialLoad(include="model.pretrain.*", rename={"model.pretrain.": "model."})
    )
    assert_same(target.pretrain.state_dict(), model.state_dict())
    assert_same(target.head.state_dict(), head)
    assert report.renamed == {f"model.pretrain.{key}": f"model.{key}" for key in model.state_dict()}
    assert report.loaded == list(report.renamed)
    assert report.left_out == ["model.head.weight", "model.head.bias"]
    assert not report.missing and not report.unexpected and not report.cast
    assert str(report).startswith("loaded 9 items from") and "9 renamed" in str(report) and "2 left out" in str(report)


@pytest.mark.parametrize(
    "rename",
    [
        {"model.pretrain.": "model."},
        {r"re:model\.pretrain\.(.*)": r"model.\1"},
        {"model.": "nowhere.", "model.pretrain.": "model.", "optim.state.pretrain.": "optim.state.",
         "optim.param_groups.pretrain.": "optim.param_groups."},
    ],
    ids=["follows", "regex", "own keys"],
)  # fmt: skip
def test_an_optimizer_follows_its_module(pretrained: Any, rename: dict[str, str]) -> None:
    path, _, source = pretrained
    target = FineTune()
    optimizer = torch.optim.AdamW(
        [{"params": target.pretrain.parameters()}, {"params": target.head.parameters(), "lr": 7.0}], lr=9.0
    )
    partial = PartialLoad(exclude="model.head.*", rename=rename, missing="ignore")
    report = dcp.load({"model": target, "optim": optimizer}, path, partial)
    for mine, theirs in zip(target.pretrain.parameters(), source.param_groups[0]["params"], strict=True):
        assert_same(optimizer.state[mine], source.state[theirs])
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 7.0]
    assert report.missing == ["optim.param_groups.head.bias", "optim.param_groups.head.weight"]
    assert not report.unexpected


def test_an_optimizer_alone_is_found_behind_the_prefix_of_its_module(pretrained: Any, tmp_path: Path) -> None:
    _, model, source = pretrained
    dcp.save({"model": nn.ModuleDict({"net": model}), "optim": source}, tmp_path / "ck")
    target = Net()
    before = copy.deepcopy(target.state_dict())
    optimizer = torch.optim.AdamW(target.parameters(), lr=9.0)
    with pytest.warns(UserWarning, match=r"has model\.net\.\* for model\.\*"):
        report = dcp.load({"model": target, "optim": optimizer}, tmp_path / "ck", PartialLoad("optim.*"))
    assert optimizer.param_groups[0]["lr"] == 0.125 and report.renamed["optim.param_groups.inp.bias.lr"]
    assert_same(target.state_dict(), before)


def test_several_targets_may_take_the_same_stored_key(pretrained: Any) -> None:
    path, model, _ = pretrained
    twins = nn.ModuleDict({"one": Net(), "two": Net()})
    dcp.load({"model": twins}, path, PartialLoad(rename={"model.one.": "model.", "model.two.": "model."}))
    for twin in twins.values():
        assert_same(twin.state_dict(), model.state_dict())


def test_a_forecast_knows_that_another_object_takes_a_key(tmp_path: Path) -> None:
    dcp.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))}, tmp_path / "ck")
    state = {"model": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 1)}
    partial = PartialLoad(rename={"head.": "model.1."})
    planned = plan_load(state, tmp_path / "ck", partial)
    assert (planned.error, planned.report.unexpected) == ("", [])
    assert [item.key for item in planned.items] == dcp.load(state, tmp_path / "ck", partial).loaded


def test_a_part_of_what_was_saved_is_loaded_into_a_bare_module_under_any_name(pretrained: Any) -> None:
    path, model, _ = pretrained
    block = Net().block
    mine = torch.optim.AdamW(block.parameters(), lr=9.0)
    with pytest.warns(UserWarning, match="has no 'opt'; its only optimizer, 'optim', is loaded"):
        dcp.load({"block": block, "opt": mine}, path, PartialLoad(rename={"": "model."}, unexpected="ignore"))
    assert mine.param_groups[0]["lr"] == 0.125 and len(mine.state) == 4
    for name, rename in (("block", {"": "model."}), ("b", {"b.": "model.block."}), ("b", {"b": "model.block"})):
        block = Net().block
        dcp.load({name: block}, path, PartialLoad(rename=rename))
        assert_same(block.state_dict(), model.block.state_dict())


def test_data_is_renamed_too_and_keeps_its_structure(pretrained: Any) -> None:
    path, _, _ = pretrained
    data: dict[str, Any] = {}
    dcp.load({"mine": data}, path, PartialLoad(rename={"mine.": "extra."}))
    assert data == {"a": {"x": 1, "list": [1, 2]}, "b": 3}
    data = {"inner": {}}
    dcp.load({"extra": data}, path, PartialLoad(include="extra.inner.*", rename={"extra.inner.": "extra.a."}))
    assert data == {"inner": {"x": 1, "list": [1, 2]}}
    data = {"a": {"deep": {"x": 0}}}
    dcp.load({"mine": data}, path, PartialLoad("mine.a.*", rename={r"re:mine\.a\.deep\.(.*)": r"extra.a.\1"}))
    assert data == {"a": {"deep": {"x": 1}}}
    state = {"number": 0}
    dcp.load(state, path, PartialLoad(rename={"number": "extra.b"}))
    assert state == {"number": 3}


def test_a_stock_checkpoint_is_renamed_the_same_way(pretrained: Any, tmp_path: Path) -> None:
    _, model, source = pretrained
    state = {"net": model.state_dict(), "opt": get_optimizer_state_dict(model, source)}
    stock.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    target = FineTune()
    optimizer = torch.optim.AdamW(target.pretrain.parameters(), lr=9.0)
    partial = PartialLoad(exclude="model.head.*", rename={"model.pretrain.": "net.", "optim.": "opt."})
    with pytest.warns(UserWarning, match="list without names.*'optim' keeps its own hyper-parameters"):
        dcp.load({"model": target, "optim": optimizer}, tmp_path / "stock", partial)
    assert_same(target.pretrain.state_dict(), model.state_dict())
    for mine, theirs in zip(target.pretrain.parameters(), model.parameters(), strict=True):
        assert_same(optimizer.state[mine], source.state[theirs])
    assert optimizer.param_groups[0]["lr"] == 9.0


def test_a_stock_checkpoint_of_bare_names_is_the_source_of_a_sub_module(pretrained: Any, tmp_path: Path) -> None:
    _, model, _ = pretrained
    stock.save(model.state_dict(), checkpoint_id=tmp_path / "stock", no_dist=True)
    target = FineTune()
    dcp.load({"model": target}, tmp_path / "stock", PartialLoad.submodule(target.pretrain, source=""))
    assert_same(target.pretrain.state_dict(), model.state_dict())
    said = _message({"model": target}, tmp_path / "stock", PartialLoad.submodule(target.pretrain))
    assert said.endswith("source='' would find all of them.")


def test_a_model_on_the_meta_device_gets_memory(pretrained: Any) -> None:
    path, model, _ = pretrained
    with torch.device("meta"):
        target = Net()
    dcp.load({"model": target}, path, PartialLoad())
    assert_same(target.state_dict(), model.state_dict())


# What is judged


def test_only_what_would_be_selected_is_missing_or_unexpected(tmp_path: Path) -> None:
    saved = nn.ModuleDict(
        {"backbone": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), "head": nn.Linear(2, 1)}
    )
    dcp.save({"model": saved}, tmp_path / "ck")
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    whole = PartialLoad(rename={"model.": "model.backbone."}, missing="ignore", unexpected="ignore")
    report = dcp.load({"model": target}, tmp_path / "ck", whole)
    assert report.missing == ["model.c.weight", "model.c.bias"]
    assert report.unexpected == ["model.backbone.b.weight", "model.backbone.b.bias"], (
        "the head is outside of the prefix"
    )
    report = dcp.load(
        {"model": target}, tmp_path / "ck", PartialLoad("model.a.*", rename={"model.": "model.backbone."})
    )
    assert not report.missing and not report.unexpected
    report = dcp.load(
        {"model": target},
        tmp_path / "ck",
        PartialLoad(exclude=("model.c.*", "*.bias"), rename={"model.": "model.backbone."}, unexpected="ignore"),
    )
    assert report.unexpected == ["model.backbone.b.weight"]


@pytest.mark.parametrize("policy", ["error", "warn", "ignore"])
@pytest.mark.parametrize("strict", [True, False])
def test_policies_and_strict(tmp_path: Path, policy: Any, strict: bool) -> None:
    """``strict=False`` makes nothing worse: where a policy says nothing, it tolerates; a warning stays a warning."""
    dcp.save({"model": nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})}, tmp_path / "ck")
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    partial = PartialLoad(missing=policy, unexpected=policy)
    if policy == "error" and strict:
        said = _message({"model": target}, tmp_path / "ck", partial)
        assert (
            "model.new.weight is not in the checkpoint" in said and "model.old.bias is only in the checkpoint" in said
        )
        return
    if policy == "warn":
        with pytest.warns(UserWarning, match=r"model\.(new|old)\.weight") as caught:
            report = dcp.load({"model": target}, tmp_path / "ck", partial, strict)
        assert len(caught) == 2
    else:
        report = dcp.load({"model": target}, tmp_path / "ck", partial, strict)
    assert report.missing == ["model.new.weight", "model.new.bias"]
    assert report.unexpected == ["model.old.weight", "model.old.bias"]


def test_a_load_of_nothing_is_not_silent(pretrained: Any) -> None:
    path, _, _ = pretrained
    target = FineTune()
    with pytest.warns(UserWarning, match=r"nothing is loaded.*rename=\{'model.pretrain.': 'model.'\} would find all"):
        report = dcp.load(
            {"model": target},
            path,
            PartialLoad("model.pretrain.*", rename={"model.": "model."}, missing="ignore", unexpected="ignore"),
        )
    assert not report.loaded and len(report.missing) == 9


def test_another_dtype_is_an_error_unless_cast(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2).bfloat16()
    dcp.save({"model": saved}, tmp_path / "ck")
    target = nn.Linear(2, 2)
    assert _message({"model": target}, tmp_path / "ck", PartialLoad("model.weight")) == (
        "CKPT does not fit the state: model.weight is torch.float32 here and torch.bfloat16 in the checkpoint: "
        "cast=True converts."
    )
    report = dcp.load({"model": target}, tmp_path / "ck", PartialLoad(cast=True))
    assert report.cast == ["model.weight", "model.bias"]
    assert same_bytes(target.weight.data, saved.weight.data.float())
    assert dcp.load({"model": target}, tmp_path / "ck").cast == report.cast, "a load without a choice converts"


def test_a_rename_cannot_leave_the_checkpoint(pretrained: Any, tmp_path: Path) -> None:
    path, _, _ = pretrained
    dcp.save({"model": Net()}, path.parent / "other")
    for there in ("../other/model.", f"{path.parent}/other/model."):
        assert "no key of the checkpoint starts with" in _message(
            {"model": Net()}, path, PartialLoad(rename={"model.": there})
        )


# What the errors say


def test_a_wrong_prefix_is_told_with_the_one_that_fits(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "lm_head": nn.Linear(2, 4)})
    dcp.save({"model": saved}, tmp_path / "ck")
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    state, path = {"model": model}, tmp_path / "ck"

    def said(rename: dict[str, str]) -> str:
        return _message(state, path, PartialLoad("model.backbone.*", rename=rename, missing="ignore"))

    assert said({"model.backbone.": "model.enc."}) == (
        "CKPT does not fit the state: no key of the checkpoint starts with 'model.enc.', as rename={'model.backbone.': "
        "'model.enc.'} requires. rename={'model.backbone.': 'model.encoder.'} would find all of them."
    )
    assert (
        "rename has 'backbone.', which no key of the target starts with or matches: did you mean 'model.backbone.'?"
        in said({"backbone.": "model.encoder."})
    )
    assert _message(state, path, PartialLoad("model.backbone.*")).splitlines()[-2:] == [
        "  rename={'model.backbone.': 'model.encoder.'} would find all of them",
        '  missing="ignore" and unexpected="ignore" load what fits',
    ]
    assert "'model.encoder0.weight'" not in _message(
        state, path, PartialLoad("model.backbone.*", rename={"model.backbone.": "model.encoder"})
    )
    dcp.load(state, path, PartialLoad("model.backbone.*", rename={"model.backbone.": "model.encoder."}))


def test_a_rename_that_was_not_needed_is_told(pretrained: Any) -> None:
    path, _, _ = pretrained
    said = _message({"model": Net()}, path, PartialLoad(rename={"model.": "modl."}))
    assert said.endswith("requires. rename={'model.': 'model.'} would find all of them.")


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("pretrain.*", "did you mean 'model.pretrain.*'?"),
        ("model.pretrian.*", "did you mean 'model.pretrain.*'?"),
        ("*.nothing", "matches no key of the target."),
    ],
)
def test_a_glob_that_matches_nothing_is_told_with_the_nearest(pretrained: Any, glob: str, hint: str) -> None:
    path, _, _ = pretrained
    said = _message(
        {"model": FineTune()}, path, PartialLoad(glob, rename={"model.pretrain.": "model."}, missing="ignore")
    )
    assert f"{glob!r} matches no key of the target" in said and hint in said


def test_everything_that_is_wrong_is_in_one_error_of_bounded_length(tmp_path: Path) -> None:
    dcp.save(
        {"model": nn.ModuleDict({f"old{n}": nn.Linear(2, 2) for n in range(500)} | {"a": nn.Linear(3, 2)})},
        tmp_path / "ck",
    )
    target = nn.ModuleDict({f"new{n}": nn.Linear(2, 2) for n in range(500)} | {"a": nn.Linear(2, 2)})
    said = _message({"model": target}, tmp_path / "ck", PartialLoad(exclude="nix.*", rename={"nix.": "model."}))
    parts = (
        "'nix.*' matches",
        "'nix.', which no key",
        "model.a.weight has shape (2, 2) here",
        "model.new0.weight is not",
        "more like this",
        "1000 keys are only in the checkpoint",
    )
    assert not [part for part in parts if part not in said]
    assert len(said) < 3000


def test_another_width_is_a_line_for_each_of_the_first_keys(tmp_path: Path) -> None:
    dcp.save({"model": nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))}, tmp_path / "ck")
    said = _message({"model": nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))}, tmp_path / "ck", None)
    head, *lines = said.splitlines()
    assert head == "CKPT does not fit the state:"
    assert lines[:2] == [
        "  model.0.weight has shape (2, 2) here and (4, 4) in the checkpoint",
        "  model.0.bias has shape (2,) here and (4,) in the checkpoint",
    ]
    assert len(lines) == 11 and lines[-1] == "  and 30 more like this"


def test_a_sub_module_that_is_not_there_is_told_with_what_is(pretrained: Any) -> None:
    path, _, _ = pretrained
    said = _message({"model": FineTune()}, path, PartialLoad.submodule(Net()))
    assert "this Net is in no module of the state, which has 'model', a FineTune with pretrain, head" in said
    target = FineTune()
    said = _message({"model": target}, path, PartialLoad.submodule(target.pretrain, source="modl"))
    assert "as source='modl.' requires" in said and said.endswith("source='model.' would find all of them.")
    said = _message({"model": target}, path, PartialLoad.submodule(target.pretrain.inp))
    assert "source='model.inp.' would find all of them" in said


# Presets


def _preset(name: str) -> PartialLoad:
    with initialize_config_dir(str(PRESETS.parent), version_base=None):
        return instantiate(compose(f"partial/{name}").partial)  # type: ignore[no-any-return]


def test_every_preset_but_none_is_a_partial_load() -> None:
    names = {path.stem for path in PRESETS.glob("*.yaml")}
    assert names == {"none", "backbone", "model_only", "no_optimizer", "adapters", "peft"}
    assert _preset("none") is None
    assert all(isinstance(_preset(name), PartialLoad) for name in names - {"none"})


@pytest.mark.parametrize(
    ("preset", "kept"),
    [
        ("none", ()),
        ("model_only", ("optim", "extra")),
        ("no_optimizer", ("optim",)),
        ("backbone", ("model.head", "optim", "extra")),
        ("adapters", ("model.lora_A", "optim", "extra")),
    ],
)
def test_a_preset_loads_what_its_name_says(tmp_path: Path, preset: str, kept: tuple[str, ...]) -> None:
    def make(lr: float, adapters: bool = False) -> dict[str, Any]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
        if adapters:
            model["lora_A"] = nn.Linear(2, 1)
        return {"model": model, "optim": torch.optim.SGD([model.body.weight], lr=lr), "extra": {"n": lr}}

    saved, target = make(1.0), make(2.0, adapters=preset == "adapters")
    dcp.save(saved, tmp_path / "ck")
    before = copy.deepcopy(target["model"].state_dict())
    dcp.load(target, tmp_path / "ck", _preset(preset))
    for key, value in target["model"].state_dict().items():
        untouched = any(f"model.{key}".startswith(front) for front in kept)
        assert same_bytes(value, before[key] if untouched else saved["model"].state_dict()[key]), key
    assert target["optim"].param_groups[0]["lr"] == (2.0 if "optim" in kept else 1.0)
    assert target["extra"]["n"] == (2.0 if "extra" in kept else 1.0)


def test_the_preset_for_peft_fills_the_base_of_a_model_with_adapters(pretrained: Any) -> None:
    peft = pytest.importorskip("peft")
    path, model, _ = pretrained
    target = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["inp", "block.0"], r=2))
    dcp.load({"model": target}, path, _preset("peft"))
    base = {
        re.sub(r"base_model\.model\.|base_layer\.", "", k): v
        for k, v in target.state_dict().items()
        if "lora_" not in k
    }
    assert_same(base, model.state_dict())
