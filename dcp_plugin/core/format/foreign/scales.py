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
======================  ================================================  =============================================

A tensor of another method, or with another scale, has a ``refusal``. A load never fills a target from it without the
scale. Scales of activations and caches (:data:`NOT_OF_WEIGHTS`) belong to no tensor, and are never applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt
from dcp_plugin.core.format import MOST_JSON, Files, json_object, read
from dcp_plugin.core.format.columns import KeyColumns
from dcp_plugin.core.types import Shape

_CONFIG = "config.json"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_INTEGERS = (torch.uint8, torch.int8)
_CANDIDATES = (*_FLOAT8, *_INTEGERS, torch.int16, torch.int32)
_SCALES = (
    *(("", "_scale_inv"), ("", "_scale"), ("", "_scales"), ("weight", "scale"), ("weight", "qscale_weight")),
    *(("weight", "scale_weight"), ("weight", "SCB"), ("", ".absmax")),
)
"""End of a quantized tensor's key -> the end of its scale's. The last two are those of bitsandbytes."""
_PACKED = {
    "_blocks": ("_scales", ""),
    "_packed": ("_scale", ""),
    "qweight": ("scales", "weight"),
    "W_q": ("scale", "weight"),
    "._data": ("._scale", ""),
    "_weight_qdata": ("_weight_scale", "weight"),
}
"""End of a packed tensor's key -> the end of its scale's, and the end of the key that a model has for both."""
_FURTHER = ("_global_scale", "_scale_2", "_zero_point")
"""Ends of a second scale's key. The first scale alone would be wrong."""

NOT_OF_WEIGHTS = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale")
"""Last segments of the keys of scales that are never applied to a weight."""


@dataclass(frozen=True)
class Scaled:
    """A quantized tensor, or the key that a model has for a packed one."""

    scale: str
    """Key of the scale."""
    block: Shape = ()
    """Elements in each dimension that share a number of the scale."""
    refusal: str = ""
    """The reason why a load does not apply the scale; empty if it does."""
    needs_scale: bool = True
    """False if a target of the stored dtype may be filled alone: layers of bitsandbytes find their scale."""


def find(table: KeyColumns, files: Files) -> dict[str, Scaled]:
    """Return the quantized tensors of a folder by key. Only for a folder that has any, the configuration is read."""
    scaled: dict[str, Scaled] = {}
    numbers = [number for number, dtype in enumerate(table.torch_dtypes) if dtype in _CANDIDATES]
    candidates = np.flatnonzero(np.isin(table.columns["dtype"], numbers)).tolist()
    config: dict[str, Any] | None = None
    for slot in candidates:
        key, dtype = table.keys[slot], table.torch_dtypes[table.columns["dtype"][slot]]
        packed = next((end for end in _PACKED if key.endswith(end)), "")
        names = [key.removesuffix(packed) + _PACKED[packed][0]] if packed else _scales_of(key, dtype)
        scale = next((name for name in names if name in table.slots), "")
        if not scale:
            continue
        config = _configuration(files) if config is None else config
        if packed:
            scaled[key] = Scaled(scale, refusal=_refusal(config, f", stored as {key},"))
            if (name := key.removesuffix(packed) + _PACKED[packed][1]) not in table.slots:
                scaled[name] = scaled[key]
        else:
            scaled[key] = _judged(table, slot, scale, config)
    return scaled


def _scales_of(key: str, dtype: torch.dtype) -> Iterator[str]:
    if dtype in _FLOAT8 or dtype in _INTEGERS:
        yield from (key.removesuffix(end) + scale for end, scale in _SCALES if key.endswith(end))


def _configuration(files: Files) -> dict[str, Any]:
    """Return ``quantization_config``; empty without one. A damaged file counts as none."""
    try:
        config = json_object(read(files, _CONFIG, MOST_JSON + 1)).get("quantization_config")
    except (CheckpointCorrupt, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _refusal(config: dict[str, Any], what: str = "") -> str:
    """Return the sentence that the method of a configuration is not dequantized."""
    if not config:
        return f"no quantization_config in the folder's {_CONFIG} says how"
    method = " ".join(str(config[name])[:50] for name in ("quant_method", "quant_algo", "format") if config.get(name))
    return f"{method}{what} is not dequantized"


def _judged(table: KeyColumns, slot: int, scale: str, config: dict[str, Any]) -> Scaled:
    """Return the description of a tensor that is not packed."""
    key, shape, dtype = table.keys[slot], table.shape_of(slot), table.dtype_of(slot)
    scale_shape, scale_dtype = table.shape_of(at := table.slots[scale]), table.dtype_of(at)
    strategies = list(_strategies(config))
    second = next((name for end in _FURTHER if (name := f"{key}{end}") in table.slots), "")
    if dtype not in _FLOAT8:
        return Scaled(scale, refusal=_refusal(config, ", with integers,"), needs_scale=False)
    if second or not strategies:
        return Scaled(scale, refusal=_refusal(config, second and f" with {second}"))
    if scale_dtype is None or not (scale_dtype.itemsize > 1 or scale_dtype == torch.float8_e8m0fnu):
        return Scaled(scale, refusal=_refusal(config, f" with a scale of {scale_dtype}"))
    blocks = (_block(*strategy, shape, scale_shape) for strategy in strategies)
    block = next((block for block in blocks if block is not None), None)
    names = " or ".join(name for name, _ in strategies)
    misfit = f"the scale's shape {scale_shape} is not that of {config['quant_method']} by {names} for {shape}"
    return Scaled(scale, refusal=misfit) if block is None else Scaled(scale, block)


def _strategies(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the strategies that a configuration names for float8 weights, with the block size of each."""
    method, algorithm = config.get("quant_method"), config.get("quant_algo")
    if method == "fp8":
        size = config.get("weight_block_size")
        yield ("tensor", None) if size is None else ("block", size)
    elif method == "compressed-tensors":
        groups = config.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and (weights.get("type"), weights.get("num_bits")) == ("float", 8):
                yield str(weights.get("strategy"))[:50], weights.get("block_structure")
    elif method == "modelopt" and algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        yield "tensor" if algorithm == "FP8" else "channel", None


def _block(strategy: str, size: Any, shape: Shape, scale: Shape) -> Shape | None:
    """Return the elements that share a number of a scale; None if the scale does not have the strategy's shape.

    Matrices may be stacked, as those of experts are: blocks and channels are in the last two dimensions.
    """
    if 0 in shape:
        return None
    if strategy == "tensor":
        return shape if prod(scale) == 1 and len(scale) <= max(1, len(shape)) else None
    if strategy == "channel" and len(shape) > 1:
        if scale == shape[:1]:
            return 1, *shape[1:]
        return (*(1 for _ in shape[1:]), shape[-1]) if scale == (*shape[:-1], 1) else None
    if strategy == "block" and len(shape) > 1 and _is_pair(size):
        block = (*(1 for _ in shape[2:]), *size)
        return block if scale == grid(shape, block) else None
    return None


def _is_pair(size: Any) -> bool:
    return isinstance(size, list) and [type(number) for number in size] == [int, int] and min(size) > 0


def grid(shape: Shape, block: Shape) -> Shape:
    """Return the number of blocks in each dimension. The last block of a dimension may be smaller."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
