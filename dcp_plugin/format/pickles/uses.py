"""Uses of the unpickler, and the globals that each accepts.

==================  ==============================================  ================================================
use                 is for                                          another global
==================  ==============================================  ================================================
``STOCK_METADATA``  ``.metadata``                                   is refused
``TENSOR``          a tensor stored as one item of its own class    is refused
``VALUE``           a value, or the note of another planner         is described, and rebuilt or refused afterwards
``FILE``            a file of another tool                          has a stand-in that keeps nothing
==================  ==============================================  ================================================

``STOCK_METADATA`` is in :mod:`~dcp_plugin.format.stock_metadata`, with the records that replace its classes.
"""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict
from typing import Any

import torch

from dcp_plugin.format.pickles.rebuild import Described
from dcp_plugin.format.pickles.unpickler import StandIn, Use
from dcp_plugin.tensors._torch import TENSOR_GLOBALS

_TENSORS: dict[str, Any] = {
    **TENSOR_GLOBALS,
    "torch.Size": torch.Size,
    "torch.Tensor": torch.Tensor,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": codecs.encode,  # for bytes
    "builtins.bytearray": bytearray,
    "builtins.complex": complex,
    "builtins.set": set,
}
"""Globals of tensors, and of their attributes that are plain values."""

TENSOR = Use(_TENSORS)
VALUE = Use({**_TENSORS, "collections.Counter": Counter}, Described)
FILE = Use(VALUE.globals, StandIn)
