"""DeepSpeed's folders are read without DeepSpeed: ZeRO 1 to 3 and universal checkpoints, and their lies are named.

``tests/fixtures/deepspeed-0.19.8`` has what DeepSpeed 0.19.8 wrote with torch 2.13.0 on two CPU ranks, and what its own
functions say is in it (``tests/fixtures/zero.py``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from tests.compare import assert_same, full, same_bytes
from tests.fixtures import FROZEN
from tests.launch import on_ranks
from tests.layouts import wrap
from tests.objects import PickledAs, attack

SAVED = FROZEN.with_name("deepspeed-0.19.8")
CASES = sorted(path.parent.relative_to(SAVED).as_posix() for path in SAVED.glob("*/latest"))
FOLDERS = sorted(path.relative_to(SAVED).as_posix() for path in SAVED.glob("*/global_step3*"))
STEPS = 3


def expected(name: str) -> dict[str, torch.Tensor]:
    return torch.load(SAVED / name.partition("/")[0] / "expected.pt", weights_only=True)


class Model(nn.Module):
    """The model of ``tests/fixtures/zero.py``, without its forward."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.cube = nn.Parameter(torch.zeros(3, 5, 5))
        self.scale = nn.Parameter(torch.zeros(1))
        if not name.startswith("stage3"):
            self.empty = nn.Parameter(torch.zeros(0, 3))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name != "empty"}
    decayed, others = ([p for p in trained.values() if (p.dim() > 1) is several] for several in (True, False))
    return torch.optim.AdamW([{"params": decayed}, {"params": others}])


@pytest.mark.parametrize("name", [*CASES, *FOLDERS])
def test_it_has_the_bytes_that_deepspeed_says_it_has(name: str) -> None:
    found = dcp.read(SAVED / name)
    for key, value in expected(name).items():
        # zero_to_fp32 converts buffers, which are stored in the dtype of the training.
        assert same_bytes(value, found[key].contiguous() if key != "model.mean" else found[key].float()), key
    assert dcp.inspect(SAVED / name).format == "deepspeed"


@pytest.mark.parametrize("name", FOLDERS)
def test_it_loads_into_a_model_and_a_torch_optimizer(name: str) -> None:
    model = Model(name)
    optimizer = optimizer_of(model)
    partial = dcp.PartialLoad(cast=True)  # frozen parameters are in bfloat16
    report = dcp.load({"model": model, "optim": optimizer}, SAVED / name, partial)
    assert not report.missing
    loaded = {f"model.{key}": value for key, value in model.state_dict().items()}
    for key, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            loaded[f"optim.state.{key}.{slot}"] = value
    known = {key: value.float() if key == "model.mean" else value for key, value in expected(name).items()}
    assert_same({k: v.to(loaded[k].dtype) for k, v in known.items()}, {key: loaded[key] for key in known})
    assert {float(slots["step"]) for slots in optimizer.state.values()} == {STEPS}
    if "elastic" not in name:  # which stores no hyper-parameters
        assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.00075]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_the_values_of_the_engine_and_of_its_client_are_there() -> None:
    state: dict[str, Any] = {"global_steps": 0, "epoch": 0, "history": [], "lr_scheduler": {"last_epoch": 0}}
    dcp.load(state, SAVED / "stage3-bf16")
    assert state.pop("lr_scheduler")["last_epoch"] == 3
    assert state == {"global_steps": 3, "epoch": 2, "history": [0.5, 0.25]}


@pytest.mark.parametrize("name", ["stage2-round-robin", "stage3-fp32"])
@on_ranks(2)
def test_other_ranks_warm_start_from_it_and_read_only_their_part(tmp_path: Path, name: str) -> None:
    model = wrap("fsdp2", Model(name))
    dcp.resume_or_init({"model": model}, tmp_path / "run", init_from=SAVED / name)
    for key, value in model.state_dict().items():
        assert same_bytes(full(value), expected(name)[f"model.{key}"]), key


def test_it_is_imported_and_exported(tmp_path: Path) -> None:
    dcp.export(SAVED / "stage3-bf16", tmp_path / "dcp", format="dcp")
    dcp.export(SAVED / "stage3-bf16", tmp_path / "file.pt", format="torch")
    found = dcp.read(SAVED / "stage3-bf16")
    assert_same(found, dcp.read(tmp_path / "dcp"))
    exported = torch.load(tmp_path / "file.pt", weights_only=True)["model"]
    weights = {key: value for key, value in found.items() if key.startswith("model.")}
    assert_same(weights, {f"model.{key}": value for key, value in exported.items()})


# What is missing, differs, or belongs to other ranks


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("stage1-fp32/global_step3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage2-bf16/global_step3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage3-fp32/global_step3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("stage3-fp32/global_step3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("stage2-bf16/global_step3_universal", "zero/cube/fp32.pt"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, lost: str) -> None:
    folder = shutil.copytree(SAVED / name, tmp_path / "ck")
    (folder / lost).unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match=f"{folder}: {lost} is missing. Copy the files of all ranks"):
        dcp.inspect(folder)


def test_the_files_of_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "stage2-bf16/global_step3", tmp_path / "ck")
    shutil.copytree(SAVED / "stage1-fp32/global_step3", folder, dirs_exist_ok=True)
    with pytest.raises(dcp.CheckpointMismatch, match=r"two trainings, bf16_zero_pp_rank_0\S+ and zero_pp_rank_0"):
        dcp.inspect(folder)


def test_a_file_of_one_rank_is_refused_with_the_name_of_the_folder() -> None:
    folder = SAVED / "stage3-fp32" / "global_step3"
    for name in ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"):
        with pytest.raises(dcp.CheckpointNotFound, match=f"parts of rank 1 alone. Name the directory, {folder}"):
            dcp.inspect(folder / name)


def written(folder: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], Any] = lambda *_: None) -> Path:
    """Write a checkpoint of ZeRO 2 on two ranks. ``change`` gets its model states, and the optimizer's of each rank."""
    module = {"w": torch.zeros(3, 2), "mean": torch.ones(2)}
    shapes = [{"w": torch.Size((3, 2))}]
    model = {"module": module, "param_shapes": shapes, "buffer_names": ["mean"], "shared_params": {}}
    model |= {"dp_world_size": 2, "mp_world_size": 1, "global_steps": 4}
    ranks = []
    for flat in torch.arange(6.0).split(3):
        group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
        state = {"step": 4, "exp_avg": flat * 2, "exp_avg_sq": flat * 3}
        base = {"state": {0: state}, "param_groups": [{**group, "params": [0]}]}
        ranks.append({"partition_count": [2], "single_partition_of_fp32_groups": [flat], "base_optimizer_state": base})
    change(model, ranks)
    folder.mkdir()
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, folder / name)
    return folder


def _step_of_the_group(_: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        base = rank["base_optimizer_state"]
        base["param_groups"][0]["step"] = base["state"][0].pop("step")


@pytest.mark.parametrize("change", [lambda *_: None, _step_of_the_group], ids=["state", "group"])
def test_the_step_of_a_fused_optimizer_becomes_that_of_a_torch_optimizer(tmp_path: Path, change: Any) -> None:
    model = nn.ParameterDict({"w": torch.zeros(3, 2)})
    model.register_buffer("mean", torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.load({"model": model, "optim": optimizer}, written(tmp_path / "ck", change))
    model["w"].grad = torch.zeros(3, 2)
    optimizer.step()
    assert float(optimizer.state[model["w"]]["step"]) == 5 and optimizer.param_groups[0]["lr"] == 0.5


def _of_another_step(model: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["base_optimizer_state"]["state"][0]["step"] = 5


def _with_another_rate(model: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    ranks[1]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.25


@pytest.mark.parametrize(
    ("change", "key"), [(_of_another_step, "optim.state.*.step"), (_with_another_rate, "optim.param_groups.*.lr")]
)
def test_ranks_that_disagree_are_both_named(tmp_path: Path, change: Any, key: str) -> None:
    with pytest.raises(
        dcp.CheckpointMismatch,
        match=rf"{re.escape(key)} differs between zero_pp_rank_0_.*\.pt and zero_pp_rank_1_.*one save",
    ):
        dcp.inspect(written(tmp_path / "ck", change))


def test_a_file_of_another_step_of_zero_3_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / "stage3-fp32" / "global_step3", tmp_path / "ck")
    other = SAVED / "stage3-bf16" / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(other, folder)
    with pytest.raises(dcp.CheckpointMismatch, match=f"{other.name} has another step, or other parameters"):
        dcp.inspect(folder)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"mp_world_size": 2}, "tensor or pipeline parallel ranks"),
        ({"module": None}, "tensor or pipeline parallel ranks"),
        ({"ds_autoep_layers": [{}]}, "experts on single ranks"),
    ],
)
def test_other_parallel_ranks_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:
    folder = written(tmp_path / "ck", lambda model, _: model.update(changes))
    with pytest.raises(dcp.CheckpointMismatch, match=f"{kind}.*ds_to_universal --input_folder {folder} --output_f"):
        dcp.inspect(folder)


def test_the_parameters_of_several_ranks_are_read_from_a_universal_checkpoint(tmp_path: Path) -> None:
    """Those of tensor and pipeline parallel ranks: each has its names, and the tensors are complete."""
    folder = written(tmp_path / "ck")
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save(model | {"module": None, "param_shapes": [{"v": (1,)}]}, folder / "mp_rank_01_model_states.pt")
    for name in ("w", "v"):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(4, 2)}, folder / "zero" / name / "fp32.pt")
        torch.save(7, folder / "zero" / name / "step.pt")
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    steps = {f"optim.state.{name}.step": torch.tensor(7.0) for name in ("w", "v")}
    weights = {f"model.{name}": torch.ones(4, 2) for name in ("w", "v")}
    assert_same(steps | weights | {"model.mean": torch.ones(2)}, dcp.read(folder, ["model.*", "optim.*"]))


def test_a_slot_in_other_parts_is_refused_by_its_key_and_the_weights_load(tmp_path: Path) -> None:
    def quantize(_: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        for state in ranks:
            state["base_optimizer_state"]["state"][0]["absmax"] = torch.ones(1)

    folder = written(tmp_path / "ck", quantize)
    assert dcp.read(folder, "model.w")["model.w"].tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(dcp.CheckpointMismatch, match=r"optim\.state\.w\.absmax is not stored in parts like those"):
        dcp.read(folder)


def _with_nothing_but_a_module(model: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    module = model.pop("module")
    model.clear()
    model["module"] = module
    ranks.clear()


@pytest.mark.parametrize(
    "change",
    [lambda model, ranks: (model.update(param_shapes=None), ranks.clear()), _with_nothing_but_a_module],
    ids=["stage 0", "module"],
)
def test_a_folder_without_zero_is_read_as_the_one_file_that_it_has(tmp_path: Path, change: Any) -> None:
    folder = written(tmp_path / "ck", change)
    (tmp_path / "latest").write_text("ck")
    for path in (folder, tmp_path):
        assert_same({"model.w": torch.zeros(3, 2), "model.mean": torch.ones(2)}, dcp.read(path, "model.*"))


# What may be in a file


LIES: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], Any]] = {
    "no shapes": lambda model, _: model.update(param_shapes=[7]),
    "shapes of text": lambda model, _: model.update(param_shapes=[{"w": "32"}]),
    "negative": lambda model, _: model.update(param_shapes=[{"w": (-3, -2)}]),
    "huge": lambda model, _: model.update(param_shapes=[{"w": (1 << 40, 1 << 40)}]),
    "empty and huge": lambda model, _: model.update(param_shapes=[{"w": (0, 1 << 70)}]),
    "many dimensions": lambda model, _: model.update(param_shapes=[{"w": (1,) * 5_000}]),
    "too large": lambda model, _: model.update(param_shapes=[{"w": (3, 4)}]),
    "too small": lambda model, _: model.update(param_shapes=[{"w": (1, 1)}]),
    "no group": lambda model, _: model.update(param_shapes=[{"w": (3, 2)}] * 2),
    "a tensor": lambda model, _: model.update(param_shapes=torch.ones(3)),
    "no ranks": lambda model, _: model.update(dp_world_size=0),
    "endless ranks": lambda model, _: model.update(dp_world_size=float("inf")),
    "many ranks": lambda model, _: model.update(dp_world_size=1 << 60),
    "tied to itself": lambda model, _: model.update(shared_params={"a": ["w"]}),
    "no module": lambda model, _: model.update(module=[1]),
    "other ranks": lambda _, ranks: ranks[0].update(partition_count=[2, 3]),
    "no flat tensor": lambda _, ranks: ranks[1].update(single_partition_of_fp32_groups=[torch.ones(1, 3)]),
    "strides": lambda _, ranks: ranks[1].update(single_partition_of_fp32_groups=[torch.ones(1).expand(3)]),
    "no tensor": lambda _, ranks: ranks[0].update(single_partition_of_fp32_groups=[3]),
    "another dtype": lambda _, ranks: ranks[1].update(single_partition_of_fp32_groups=[torch.ones(3).half()]),
    "no groups": lambda _, ranks: [state["base_optimizer_state"].update(param_groups=7) for state in ranks],
    "no states": lambda _, ranks: [state["base_optimizer_state"].update(state=[]) for state in ranks],
    "paddings": lambda _, ranks: [state.update(param_alignment_paddings=[[-4]]) for state in ranks],
    "endless paddings": lambda _, ranks: [state.update(param_alignment_paddings=[[1 << 80]]) for state in ranks],
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_damage_and_load_nothing(tmp_path: Path, lie: str) -> None:
    folder = written(tmp_path / "ck", LIES[lie])
    target = {"w": torch.full((3, 2), 9.0)}
    with pytest.raises((dcp.CheckpointCorrupt, dcp.CheckpointMismatch), match=str(folder)):
        dcp.load({"model": target}, folder, dcp.PartialLoad(unexpected="ignore"))
    assert (target["w"] == 9).all()


@pytest.mark.parametrize("parts", [(torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(3))], ids=len)
def test_parts_of_a_frozen_parameter_that_do_not_fit_are_damage(
    tmp_path: Path, parts: tuple[torch.Tensor, ...]
) -> None:
    model = {"module": {}, "param_shapes": [{}, {}], "buffer_names": [], "shared_params": {}, "dp_world_size": 2}
    for rank, part in enumerate(parts):
        frozen = {"frozen_param_shapes": {"f": (4,)}, "frozen_param_fragments": {"f": part}}
        torch.save(model | frozen, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    with pytest.raises(dcp.CheckpointCorrupt, match=r"rank_1_mp_rank_00_model_states\.pt is damaged"):
        dcp.inspect(tmp_path)


@pytest.mark.parametrize("name", ["../../secret", "/etc", "..", "", "a/b", "a\0"])
def test_a_parameter_of_a_universal_checkpoint_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "ck", lambda model, _: model.update(param_shapes=[{name: (3, 2)}]))
    (folder / "zero").mkdir()
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    with pytest.raises(dcp.CheckpointCorrupt, match="is not the name of a folder"):
        dcp.inspect(folder)


@pytest.mark.parametrize("tag", ["..", "../ck", "/tmp", ".", "", "x" * 5_000, "\0"])
def test_latest_leads_nowhere_else(tmp_path: Path, tag: str) -> None:
    written(tmp_path / "ck")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    with pytest.raises(dcp.CheckpointNotFound, match="is not a checkpoint"):
        dcp.inspect(tmp_path / "run")


def test_nothing_is_executed_and_refused_values_are_named(tmp_path: Path) -> None:
    def put(model: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        command = PickledAs(subprocess.call, (["mkdir", str(tmp_path / "owned")],))
        model["client"], ranks[0]["loss_scaler"] = command, command

    folder = written(tmp_path / "ck", put)
    assert dcp.read(folder, "model.w")["model.w"].shape == (3, 2)
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"client is, or contains, an object of .*call"):
        dcp.read(folder, "client")
    torch.save(attack(tmp_path / "owned"), folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(dcp.UnsafeCheckpoint, match="mkdir"):
        dcp.inspect(folder)
    assert not (tmp_path / "owned").exists()


# Checkpoints of other tools that are named


def test_orbax_nemo_and_megatron_are_named_with_their_conversion(tmp_path: Path) -> None:
    for name in ("orbax", "megatron"):
        (tmp_path / name).mkdir()
    (tmp_path / "orbax" / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "model.nemo").write_bytes(b"./model_config.yaml")
    metadata = b"\x80\x02cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n)\x81."
    (tmp_path / "megatron" / ".metadata").write_bytes(metadata)
    with pytest.raises(dcp.CheckpointNotFound, match=r"a checkpoint of Orbax.*restore\('.*orbax'\)"):
        dcp.inspect(tmp_path / "orbax")
    with pytest.raises(dcp.CheckpointNotFound, match=r"tar archive of NeMo; `tar -xf model\.nemo`"):
        dcp.inspect(tmp_path / "model.nemo")
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"Megatron-Core.*convert_checkpoints\.py export.*nemo llm export"):
        dcp.inspect(tmp_path / "megatron")
