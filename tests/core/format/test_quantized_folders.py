"""Folders of quantized weights, as Hugging Face has them: each weight is multiplied with its scale, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Mxfp4Config

import dcp_plugin as dcp
from tests.compare import assert_same, full_state, same_bytes
from tests.launch import on_ranks

State = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


def _config(method: str = "", **fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}} if method else {}


def _compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights}}
    return _config("compressed-tensors", format="float-quantized", config_groups={"group_0": group})


def _blocks(*size: int) -> dict[str, Any]:
    return _config("fp8", activation_scheme="dynamic", weight_block_size=list(size))


def _folder(path: Path, tensors: State, config: dict[str, Any]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return path


def _raw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(100).to(FP8)


def _scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) / 447


def _per_element(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """The formula of DeepSeek's ``weight_dequant``, element by element: the last block of a row may be smaller."""
    for dim, size in enumerate(block):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


CASES: dict[str, tuple[dict[str, Any], str, tuple[int, ...], torch.Tensor, tuple[int, ...]]] = {
    "blocks": (_blocks(3, 4), "weight_scale_inv", (9, 8), _scale(3, 2), (3, 4)),
    "blocks that do not divide": (_blocks(3, 4), "weight_scale_inv", (10, 7), _scale(4, 2), (3, 4)),
    "blocks of stacked experts": (_blocks(3, 4), "weight_scale_inv", (2, 10, 7), _scale(2, 4, 2), (1, 3, 4)),
    "scales in bfloat16": (_blocks(3, 4), "weight_scale_inv", (9, 8), _scale(3, 2).bfloat16(), (3, 4)),
    "scales that are exponents": (_blocks(3, 4), "scale", (9, 8), _scale(3, 2).to(torch.float8_e8m0fnu), (3, 4)),
    "fp8 per tensor": (_config("fp8", activation_scheme="static"), "weight_scale", (9, 8), _scale(1), (9, 8)),
    "compressed per tensor": (_compressed("tensor"), "weight_scale", (9, 8), _scale(1), (9, 8)),
    "compressed per channel": (_compressed("channel"), "weight_scale", (8, 8), _scale(8, 1), (1, 8)),
    "one dimension is rows": (_compressed("channel"), "weight_scale", (8, 8), _scale(8), (1, 8)),
    "compressed blocks": (_compressed("block", block_structure=[4, 3]), "weight_scale", (9, 8), _scale(3, 3), (4, 3)),
    "modelopt": (_config("modelopt", quant_algo="FP8"), "weight_scale", (9, 8), _scale(), (9, 8)),
    "modelopt per channel": (
        *(_config("modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "weight_scale"),
        *((8, 8), _scale(8), (1, 8)),
    ),
}


def _stored(case: str) -> State:
    _, name, shape, scale, _ = CASES[case]
    of_activations = {key: torch.tensor(9.0) for key in ("one.input_scale", "k_scale", "one.v_scale")}
    return {"one.weight": _raw(*shape), f"one.{name}": scale, **of_activations}


def _product(case: str) -> torch.Tensor:
    _, _, shape, scale, block = CASES[case]
    numbers = scale.float().reshape([-(-length // size) for length, size in zip(shape, block, strict=True)])
    return _raw(*shape).float() * _per_element(numbers, shape, block)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for case, (config, *_) in CASES.items():
        _folder(root / case, _stored(case), config)
    return root


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_multiplied_with_its_scale_in_float32(folders: Path, case: str) -> None:
    product = _product(case)
    for dtype in (torch.float32, torch.bfloat16):
        found = {"one.weight": torch.zeros(product.shape, dtype=dtype)}
        report = dcp.load({"model": found}, folders / case)
        assert_same(found, {"one.weight": product.to(dtype)})
        assert not report.unexpected


@on_ranks(2)
def test_each_rank_multiplies_its_own_part_of_a_block(folders: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for case in ("blocks that do not divide", "compressed per channel", "blocks of stacked experts"):
        for placement in (Shard(0), Shard(1), Replicate()):
            found = {"one.weight": distribute_tensor(torch.zeros(_product(case).shape), mesh, [placement])}
            dcp.load({"model": found}, folders / case, io=dcp.IO(broadcast=True))
            assert_same(full_state(found), {"one.weight": _product(case)})


class Hooked(nn.Module):
    """Code of the module gets the stored keys, as that of models that rename theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 9, bias=False)
        self.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(state))


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_whose_hooks_get_the_keys_gets_the_product(folders: Path, strict: bool) -> None:
    model = Hooked()
    dcp.load({"model": model}, folders / "blocks", strict=strict)
    assert_same(model.state_dict(), {"one.weight": _product("blocks")})


def test_a_target_with_both_keys_gets_them_as_they_are_stored(folders: Path) -> None:
    for dtype in (FP8, torch.float32):
        found = {"one.weight": torch.zeros(8, 8, dtype=dtype), "one.weight_scale": torch.zeros(8, 1)}
        dcp.load({"model": found}, folders / "compressed per channel")
        assert_same(found, {"one.weight": _raw(8, 8).to(dtype), "one.weight_scale": _scale(8, 1)})


WEIGHT = {"one.weight": _raw(8, 8)}
PACKED = torch.ones(8, 4, dtype=torch.int32)
REFUSED: dict[str, tuple[dict[str, Any], State, str]] = {
    "no config": ({}, {**WEIGHT, "one.weight_scale": _scale(1)}, "no quantization_config"),
    "unknown": (
        _config("new"),
        {**WEIGHT, "one.weight_scale": _scale(1)},
        "new, with numbers of torch.float8_e4m3fn, is not",
    ),
    "of a tool without a scheme here": (_config("fbgemm_fp8"), {**WEIGHT, "one.weight_scale": _scale(8, 1)}, "fbgemm"),
    "another algorithm": (_config("modelopt", quant_algo="W4A8"), {**WEIGHT, "one.weight_scale": _scale()}, "W4A8"),
    "another group": (_compressed("group"), {**WEIGHT, "one.weight_scale": _scale(8, 4)}, "by group"),
    "another block": (_blocks(128, 128), {**WEIGHT, "one.weight_scale_inv": _scale(2, 2)}, r"\(2, 2\) for \(8, 8\) by"),
    "no block": (_config("fp8"), {**WEIGHT, "one.weight_scale_inv": _scale(2, 2)}, r"\(2, 2\) for \(8, 8\) by"),
    "a bad block": (_blocks(0, 4), {**WEIGHT, "one.weight_scale_inv": _scale(2, 2)}, r"\(2, 2\) for \(8, 8\) by"),
    "columns": (
        _compressed("channel"),
        {**WEIGHT, "one.weight_scale": _scale(1, 8)},
        r"\(1, 8\) for \(8, 8\) by channel",
    ),
    "bytes": (_blocks(4, 4), {**WEIGHT, "one.weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)}, "torch.uint8"),
    "a second scale": (
        *(_compressed("tensor"), {**WEIGHT, "one.weight_scale": _scale(1), "one.weight_global_scale": _scale(1)}),
        "one.weight_global_scale, is not",
    ),
    "comfy": ({}, {**WEIGHT, "one.scale_weight": _scale()}, "no quantization_config"),
    "integers": (
        *(_compressed("channel"), {"one.weight": torch.ones(8, 8, dtype=torch.int8), "one.weight_scale": _scale(8, 1)}),
        "with numbers of torch.int8",
    ),
    "bitsandbytes of 8 bits": (
        *(_config("bitsandbytes"), {"one.weight": torch.ones(8, 8, dtype=torch.int8), "one.SCB": _scale(8)}),
        "bitsandbytes, with numbers of torch.int8",
    ),
    "bitsandbytes of 4 bits": (
        *(
            _config("bitsandbytes"),
            {"one.weight": torch.ones(32, 1, dtype=torch.uint8), "one.weight.absmax": _scale(1)},
        ),
        "bitsandbytes, with numbers of torch.uint8",
    ),
    "nvfp4": (
        _config("modelopt", quant_algo="NVFP4"),
        {
            "one.weight": torch.ones(8, 4, dtype=torch.uint8),
            "one.weight_scale": _raw(8, 1),
            "one.weight_scale_2": _scale(),
        },
        "modelopt NVFP4",
    ),
    "gptq": (_config("gptq", bits=4), {"one.qweight": PACKED, "one.scales": _scale(1, 8)}, "gptq, stored as"),
    "awq": (_config("awq", bits=4), {"one.qweight": PACKED, "one.scales": _scale(1, 8)}, "awq, stored as"),
    "packed": (
        *(_config("compressed-tensors", format="pack-quantized"), {"one.weight_packed": PACKED}),
        "compressed-tensors pack-quantized, stored as",
    ),
    "mxfp4": (
        _config("mxfp4"),
        {
            "one.weight_blocks": torch.ones(8, 1, 4, dtype=torch.uint8),
            "one.weight_scales": torch.ones(8, 1, dtype=torch.uint8),
        },
        "mxfp4, stored as model.one.weight_blocks",
    ),
}
REFUSED["packed"][1]["one.weight_scale"] = _scale(8, 1)


@pytest.mark.parametrize("case", REFUSED)
def test_all_else_is_refused_by_name_also_where_other_keys_may_differ(tmp_path: Path, case: str) -> None:
    config, stored, reason = REFUSED[case]
    path = _folder(tmp_path / "folder", {**stored, "other": torch.ones(2)}, config)
    for options in ({}, {"strict": False}, {"partial": dcp.PartialLoad(missing="ignore", unexpected="ignore")}):
        found = {"one.weight": torch.zeros(8, 8), "other": torch.zeros(2)}
        with pytest.raises(
            dcp.CheckpointMismatch, match=rf"(?s)one\.weight is .*quantized in the checkpoint.*{reason}"
        ):
            dcp.load({"model": found}, path, **options)
        assert not found["one.weight"].any() and not found["other"].any()
    found = {"other": torch.zeros(2)}
    dcp.load({"model": found}, path, dcp.PartialLoad(include="model.other"))
    assert found["other"].all()


@pytest.mark.parametrize("key", ["one.weight", "one.weight_blocks"])
def test_a_target_of_the_stored_dtype_needs_the_scale_too(tmp_path: Path, key: str) -> None:
    stored = {
        "one.weight": {**WEIGHT, "one.weight_scale": _scale(1)},
        "one.weight_blocks": REFUSED["mxfp4"][1],
    }[key]
    path = _folder(tmp_path / "folder", stored, _compressed("tensor"))
    found = {key: torch.zeros_like(stored[key])}
    with pytest.raises(dcp.CheckpointMismatch, match=r"or have model\.one\.weight_scales? in the target too"):
        dcp.load({"model": found}, path, strict=False)
    found = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    dcp.load({"model": found}, path)
    assert_same(found, stored)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"quantization_config": 3}', "[" * 100])
def test_a_damaged_configuration_is_none(tmp_path: Path, text: str) -> None:
    path = _folder(tmp_path / "folder", {**WEIGHT, "one.weight_scale": _scale(1)}, {})
    (path / "config.json").write_text(text)
    with pytest.raises(dcp.CheckpointMismatch, match="no quantization_config"):
        dcp.load({"model": {"one.weight": torch.zeros(8, 8)}}, path, strict=False)


def test_a_tool_that_converts_does_not_lose_the_scale(folders: Path, tmp_path: Path) -> None:
    path = folders / "scales that are exponents"
    with pytest.raises(dcp.CheckpointMismatch, match=r"to be multiplied with model\.one\.scale"):
        dcp.export(path, tmp_path / "out.safetensors", dtype="bf16")
    assert same_bytes(dcp.read(path)["model.one.weight"], _raw(9, 8))


def test_a_checkpoint_of_ours_does_not_lose_a_scale_in_a_conversion(tmp_path: Path) -> None:
    dcp.save({"model": {**WEIGHT, "one.weight_scale": _scale(1)}}, tmp_path / "step-1")
    with pytest.raises(dcp.CheckpointMismatch, match=r"to be multiplied with model\.one\.weight_scale"):
        dcp.load({"model": {"one.weight": torch.zeros(8, 8)}}, tmp_path / "step-1", strict=False)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"


@pytest.mark.parametrize(
    "folder", [path.name for path in sorted(FIXTURES.iterdir()) if (path / "config.json").exists()]
)
def test_a_folder_of_another_library_has_the_weights_that_the_library_gives(folder: str) -> None:
    expected = load_file(FIXTURES / f"{folder}.safetensors")
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    report = dcp.load({"model": found}, FIXTURES / folder)
    assert_same(found, expected)
    assert not report.unexpected


def _llama(**quantization: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=48, tie_word_embeddings=False, **sizes, **quantization)


@pytest.mark.parametrize("size", [(16, 32), (8, 8)])
@pytest.mark.filterwarnings("ignore")
def test_a_model_gets_the_weights_that_transformers_gives_it(tmp_path: Path, size: tuple[int, int]) -> None:
    torch.manual_seed(3)
    stored: State = {}
    for key, tensor in LlamaForCausalLM(_llama()).state_dict().items():
        stored[key] = tensor.clone()
        if "_proj" in key:
            blocks = tensor.reshape(tensor.shape[0] // size[0], size[0], tensor.shape[1] // size[1], size[1])
            scale = blocks.abs().amax((1, 3)) / 448
            stored[key] = (blocks / scale[:, None, :, None]).reshape(tensor.shape).to(FP8)
            stored[f"{key}_scale_inv"] = scale
    path = _folder(tmp_path / "folder", stored, {})
    _llama(**_blocks(*size)).save_pretrained(path)
    expected = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = LlamaForCausalLM(_llama())
    dcp.load({"model": found}, path)
    assert_same(dict(found.state_dict()), dict(expected.state_dict()))


def test_torchs_reader_gives_the_same_for_blocks_of_128(tmp_path: Path) -> None:
    stored = {"one.weight": _raw(300, 200), "one.weight_scale_inv": _scale(3, 2)}
    path = _folder(tmp_path / "folder", stored, _blocks(128, 128))
    index = {"weight_map": dict.fromkeys(stored, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    found, expected = ({"one.weight": torch.zeros(300, 200)} for _ in range(2))
    dcp.load({"model": found}, path)
    stock.load(expected, storage_reader=stock.QuantizedHuggingFaceStorageReader(str(path)))
    assert_same(found, expected)


PROJECTIONS = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


def _gpt_oss(**changes: Any) -> GptOssConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
    return GptOssConfig(vocab_size=48, head_dim=32, num_key_value_heads=1, **{**sizes, **experts, **changes})


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of gpt-oss with square matrices, as in the published models, and with all values and exponents."""
    torch.manual_seed(4)
    stored = {key: tensor.clone() for key, tensor in GptOssForCausalLM(_gpt_oss()).state_dict().items()}
    for key in PROJECTIONS:
        experts, columns, rows = stored.pop(key).shape
        stored[f"{key}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        stored[f"{key}_scales"] = torch.arange(experts * rows * columns // 32).reshape(experts, rows, -1).byte()
    path = _folder(tmp_path_factory.mktemp("gpt") / "folder", stored, {})
    _gpt_oss(**_config("mxfp4", modules_to_not_convert=["lm_head"])).save_pretrained(path)
    return path


def _experts(path: Path, dtype: torch.dtype = torch.float32) -> State:
    dequantized = Mxfp4Config(dequantize=True)
    model = GptOssForCausalLM.from_pretrained(path, quantization_config=dequantized, dtype=dtype)
    return {key: model.state_dict()[key] for key in PROJECTIONS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_gets_the_matrices_that_transformers_gives_it(gpt_oss: Path, dtype: torch.dtype) -> None:
    model = GptOssForCausalLM(_gpt_oss()).to(dtype)
    report = dcp.load({"model": model}, gpt_oss)
    assert_same({key: model.state_dict()[key] for key in PROJECTIONS}, _experts(gpt_oss, dtype))
    assert not report.missing and not report.unexpected


@on_ranks(2)
def test_each_rank_unpacks_its_own_part_of_gpt_oss(gpt_oss: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = {key: torch.zeros(3, 64, size) for key, size in zip(PROJECTIONS, (128, 64), strict=True)}
    dcp.load({"model": whole}, gpt_oss, dcp.PartialLoad(unexpected="ignore", cast=True))
    for dim in range(3):  # three experts: one rank has two
        found = {key: distribute_tensor(torch.zeros(tensor.shape), mesh, [Shard(dim)]) for key, tensor in whole.items()}
        dcp.load({"model": found}, gpt_oss, dcp.PartialLoad(unexpected="ignore", cast=True), io=dcp.IO(broadcast=True))
        assert_same(full_state(found), whole)


@on_ranks(2)
def test_a_matrix_that_another_rank_takes_is_not_unexpected(gpt_oss: Path) -> None:
    model, last = GptOssForCausalLM(_gpt_oss()), PROJECTIONS[1]
    for key in model.state_dict():
        if (key == last) != (dist.get_rank() == 1):
            module, _, name = key.rpartition(".")
            delattr(model.get_submodule(module), name)
    report = dcp.load({"model": model}, gpt_oss)
    assert not report.missing and not report.unexpected
    assert all(tensor.any() for key, tensor in model.state_dict().items() if key in PROJECTIONS)


class Unpacked(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.zeros(3, 64, 128))
        self.register_load_state_dict_pre_hook(lambda module, state, *_: self.handed.update(state))
        self.handed: State = {}


@pytest.mark.parametrize("name", ["gate_up_proj", ""])
@pytest.mark.filterwarnings("ignore")
def test_hooks_get_the_product_or_the_packed_tensor_with_its_scale(gpt_oss: Path, name: str) -> None:
    model = Unpacked(*filter(None, [name]))
    state = {"model": nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})})}
    state["model"]["model"]["layers"][0]["mlp"] = nn.ModuleDict({"experts": model})
    dcp.load(
        state, gpt_oss, dcp.PartialLoad(include="*.gate_up_proj*", exclude="*_bias", unexpected="ignore", cast=True)
    )
    raw = dcp.read(gpt_oss, "*.gate_up_proj_[bs]*", exclude="*_bias")
    packed = {key.removeprefix("model."): tensor for key, tensor in raw.items()}
    assert_same(model.handed, {PROJECTIONS[0]: _experts(gpt_oss)[PROJECTIONS[0]]} if name else packed)


def test_a_tool_has_gpt_oss_as_it_is_stored(gpt_oss: Path) -> None:
    stored = dcp.read(gpt_oss, include="*_proj_*", exclude="*_bias")
    assert {tensor.dtype for tensor in stored.values()} == {torch.uint8} and len(stored) == 4
    found = {key.removeprefix("model."): torch.zeros_like(tensor) for key, tensor in stored.items()}
    dcp.load({"model": found}, gpt_oss, dcp.PartialLoad(unexpected="ignore", cast=True))
    assert_same({f"model.{key}": tensor for key, tensor in found.items()}, stored)


def test_another_model_with_square_matrices_is_not_filled_with_transposed_ones(gpt_oss: Path) -> None:
    found = {"mlp2_weight": torch.zeros(3, 64, 64)}
    rename = {"model.mlp2_weight": f"model.{PROJECTIONS[1]}"}
    with pytest.raises(dcp.CheckpointMismatch, match=r"which names it .*down_proj, is known to have its matrices"):
        dcp.load({"model": found}, gpt_oss, dcp.PartialLoad(rename=rename, unexpected="ignore"))


@pytest.mark.parametrize("changes", [{"model_type": "other"}, {"intermediate_size": 32}, {"hidden_size": "64"}])
def test_gpt_oss_with_another_configuration_is_refused(gpt_oss: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = json.loads((gpt_oss / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(gpt_oss / "model.safetensors")
    found = {PROJECTIONS[1]: torch.zeros(3, 64, 64)}
    with pytest.raises(dcp.CheckpointMismatch, match=r"mxfp4, stored as .*down_proj_blocks, is not dequantized"):
        dcp.load({"model": found}, tmp_path, strict=False)
