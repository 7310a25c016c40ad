"""Quantized tensors in the folders of other tools: the scale of each, and the elements that share a number of it.

A quantized tensor is of a float8 dtype, of integers, or packed (two or more numbers in a byte). It is found by the
scale beside it, whose name follows from its own. The rule: ``quantization_config`` of the folder's ``config.json``
decides how the scale is applied, never a name. The shape of the scale must be that of the strategy.

======================  ================================================  =============================================
``quant_method``        strategy                                          shape of the scale of a tensor (rows, columns)
======================  ================================================  =============================================
``fp8``                 ``weight_block_size``                             (rows / block, columns / block), rounded up
``fp8``                 no ``weight_block_size``                          one number
``compressed-tensors``  ``strategy`` of a group's weights: ``tensor``,    one number; (rows,) or (rows, 1);
                        ``channel``, ``block`` (``block_structure``)      as with blocks above
``modelopt``            ``quant_algo``: ``FP8``,                          one number;
                        ``FP8_PER_CHANNEL_PER_TOKEN``                     (rows,) or (rows, 1)
``mxfp4``               none; the ``model_type`` is ``gpt_oss``           (rows, columns / 32), exponents in bytes
======================  ================================================  =============================================

The matrices of gpt-oss are packed: a byte has two numbers of four bits, the earlier one in its lower half. The model of
transformers has them transposed. Their shape cannot tell, because ``down_proj`` is square in the published models. So
the sizes in ``config.json`` decide which dimension is which.

A tensor of another method, or with another scale, has a ``refusal``. A load never fills a target from it without the
scale. Scales of activations and caches (:data:`NOT_OF_WEIGHTS`) belong to no tensor, and are never applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt
from dcp_plugin.core.format import MOST_JSON, Files, json_object, read
from dcp_plugin.core.format.columns import KeyColumns
from dcp_plugin.core.format.derived_index import index_of, joined
from dcp_plugin.core.format.index import CheckpointIndex, StoredChunk, StoredTensor

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_CANDIDATES = (*_FLOAT8, torch.uint8, torch.int8, torch.int16, torch.int32)

# End of a quantized tensor's key, the end of its scale's, and for packed tensors the end of the key in a model. SCB and
# absmax are those of bitsandbytes.
_NAMES = (
    *(("_blocks", "_scales", ""), ("_packed", "_scale", ""), ("._data", "._scale", "")),
    *(("qweight", "scales", "weight"), ("W_q", "scale", "weight"), ("_weight_qdata", "_weight_scale", "weight")),
    *(("", "_scale_inv", None), ("", "_scale", None), ("", "_scales", None), ("", ".absmax", None)),
    *(("weight", name, None) for name in ("scale", "qscale_weight", "scale_weight", "SCB")),
)
# Ends of the key of a second scale or of an offset. The first scale alone would be wrong.
_FURTHER = ("_global_scale", "_scale_2", "_zero_point")
# Last segments of the keys of scales that are never applied to a weight.
NOT_OF_WEIGHTS = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Scaled:
    """A quantized tensor, or the key that a model has for a packed one.

    Args:
        scale: The key of the scale.
        block: Elements in each dimension that share a number of the scale.
        refusal: The reason why a load does not apply the scale; empty if it does.
        needs_scale: False if a target of the stored dtype may be filled alone: layers of bitsandbytes find their scale.
        packed: The key of the packed tensor, if this is the key that a model has for it and a load fills it.
        shape: The shape of the tensor in the model, for such a key.
    """

    scale: str
    block: tuple[int, ...]
    refusal: str
    needs_scale: bool
    packed: str = ""
    shape: tuple[int, ...] = ()


class _WithProducts(CheckpointIndex):
    """Index that also has the keys of a model for packed tensors, at the bytes of these. A load finds them by name and
    below a prefix. A tool, which lists the keys, finds the tensors as they are stored."""

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.slots if not (key in self.scaled and self.scaled[key].packed))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_scaled(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """Return the index of a folder with its quantized tensors."""
    scaled = find(index.table, files)
    entries = [
        (key, StoredTensor(torch.uint8, of_key.shape, [StoredChunk((0, 0, 0), of_key.shape, chunk.location)]))
        for key, of_key in scaled.items()
        if of_key.packed
        for chunk in index[of_key.packed].chunks  # type: ignore[union-attr]
    ]
    if entries:
        both = joined(index, index_of(entries, index.files))
        made = _WithProducts(both.table, both.columns, both.files)
        made.strides, made.values_here, made.label = index.strides, index.values_here, index.label
        index = made
    index.scaled = scaled
    return index


def find(table: KeyColumns, files: Files) -> dict[str, Scaled]:
    """Return the quantized tensors of a folder by key. Only for a folder that has any, the configuration is read."""
    scaled, config = dict[str, Scaled](), None
    numbers = [number for number, dtype in enumerate(table.torch_dtypes) if dtype in _CANDIDATES]
    for slot in np.flatnonzero(np.isin(table.columns["dtype"], numbers)).tolist():
        key, is_small = table.keys[slot], table.itemsizes[table.columns["dtype"][slot]] == 1
        names = (
            (scale, None if name is None else key.removesuffix(end) + name)
            for end, scale_end, name in _NAMES
            if key.endswith(end) and (scale := key.removesuffix(end) + scale_end) in table.slots
            if is_small or name is not None
        )
        scale, name = next(names, ("", None))
        if scale:
            config = _configuration(files) if config is None else config
            scaled[key] = _judged(table, slot, scale, config, name is not None)
            if name is not None and name not in table.slots:
                scaled[name] = _of_gpt_oss(table, slot, scale, config) or scaled[key]
    return scaled


def _configuration(files: Files) -> dict[str, Any]:
    """Return ``config.json``. It is empty without a file, or if the file or its ``quantization_config`` is damaged."""
    try:
        config = json_object(read(files, "config.json", MOST_JSON + 1))
    except (CheckpointCorrupt, ValueError, RecursionError):
        return {}
    return config if isinstance(config.get("quantization_config"), dict) else {}


def _of_gpt_oss(table: KeyColumns, slot: int, scale: str, config: dict[str, Any]) -> Scaled | None:
    """Return the tensor that transformers' model has for matrices of gpt-oss; None if these are no such matrices."""
    match config:
        case {
            "model_type": "gpt_oss",
            "quantization_config": {"quant_method": "mxfp4"},
            "num_local_experts": int(experts),
            "hidden_size": int(hidden),
            "intermediate_size": int(inner),
        }:
            key, of_scale = table.keys[slot], table.slots[scale]
            sizes = {"gate_up_proj_blocks": (2 * inner, hidden), "down_proj_blocks": (hidden, inner)}
            rows, columns = sizes.get(key.rpartition(".")[2], (0, 0))
            found = (table.shape_of(slot), table.shape_of(of_scale), table.dtype_of(slot), table.dtype_of(of_scale))
            numbers = (experts, rows, columns // 32)
            if found == ((*numbers, 16), numbers, torch.uint8, torch.uint8) and len(table.boxes_of(slot)[0]) == 1:
                return Scaled(scale, (1, 32, 1), "", True, key, (experts, numbers[2] * 32, rows))
    return None


def _judged(table: KeyColumns, slot: int, scale: str, config: dict[str, Any], is_packed: bool) -> Scaled:
    """Return the description of a tensor with this scale."""
    config = config.get("quantization_config", {})
    key, shape, dtype = table.keys[slot], table.shape_of(slot), table.dtype_of(slot)
    scale_shape, scale_dtype = table.shape_of(table.slots[scale]), table.dtype_of(table.slots[scale])
    second = next((name for end in _FURTHER if (name := f"{key}{end}") in table.slots), "")
    strategies = _strategies(config)
    blocks = (_block(strategy, size, shape, scale_shape) for strategy, size in strategies)
    block = next((block for block in blocks if block is not None), None)
    is_number = scale_dtype is not None and (scale_dtype.itemsize > 1 or scale_dtype == torch.float8_e8m0fnu)
    faults = (
        (is_packed, f"stored as {key}"),
        (dtype not in _FLOAT8, f"with numbers of {dtype}"),
        (not strategies, f"with numbers of {dtype}"),
        (bool(second), f"with {second}"),
        (not is_number, f"with a scale of {scale_dtype}"),
        (block is None, f"with a scale of {scale_shape} for {shape} by {' or '.join(name for name, _ in strategies)}"),
    )
    method = " ".join(str(config[name])[:50] for name in ("quant_method", "quant_algo", "format") if config.get(name))
    refusal = next((f"{method}, {fault}, is not dequantized" for is_fault, fault in faults if is_fault), "")
    if refusal and not config:
        refusal = "no quantization_config in the folder's config.json says how"
    return Scaled(scale, block or (), refusal, is_packed or dtype in _FLOAT8)


def _strategies(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the strategies that a configuration names for float8 weights, with the block size of each."""
    match config:
        case {"quant_method": "fp8", "weight_block_size": size} if size is not None:
            return [("block", size)]
        case {"quant_method": "fp8"} | {"quant_method": "modelopt", "quant_algo": "FP8"}:
            return [("tensor", None)]
        case {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}:
            return [("channel", None)]
        case {"quant_method": "compressed-tensors", "config_groups": dict(groups)}:
            schemes = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
            return [
                (str(weights.get("strategy"))[:50], weights.get("block_structure"))
                for weights in schemes
                if isinstance(weights, dict) and (weights.get("type"), weights.get("num_bits")) == ("float", 8)
            ]
    return []


def _block(strategy: str, size: Any, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the elements that share a number of a scale; None if the scale does not have the strategy's shape.

    Matrices may be stacked, as those of experts are: blocks and channels are in the last two dimensions.
    """
    stacked = (1,) * (len(shape) - 2)
    match strategy, size:
        case "tensor", _:
            block, shorter = shape, [(), (1,)]
        case "channel", _ if len(shape) > 1:
            block, shorter = (*stacked, 1, shape[-1]), [shape[:-1]]
        case "block", [int(rows), int(columns)] if len(shape) > 1 and min(rows, columns) > 0:
            block, shorter = (*stacked, rows, columns), []
        case _:
            return None
    return block if scale in (grid(shape, block), *shorter) else None


def grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks in each dimension. The last block of a dimension may be smaller."""
    return tuple(-(-length // max(size, 1)) for length, size in zip(shape, block, strict=True))
