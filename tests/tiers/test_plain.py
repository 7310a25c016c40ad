"""Messages and journals: what they carry comes back as it was, and other bytes run nothing."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_plugin.core.config import IO, CheckpointConfig, Keeper
from dcp_plugin.core.paths import ObjectPath
from dcp_plugin.core.retention import Retention
from dcp_plugin.errors import SaveFailed
from dcp_plugin.tiers.journal_records import End, Go, Peer, State
from dcp_plugin.tiers.plain import decode, encode
from dcp_plugin.tiers.wire import KeeperLost
from tests.compare import same_bytes


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -2.5, True, "text \ud800 and \0"],
        float("inf"),
        {1: (2, "a"), "b": {"c": b"bytes"}, None: []},
        frozenset({"a", "b"}),
        Path("/run/step-1"),
        ObjectPath("s3://bucket/run"),
        torch.bfloat16,
        timedelta(seconds=1.5),
        {"client_options": {"timeout": timedelta(minutes=5), "allow_http": True}},
        Go("token", [Peer(0, "node", "host", ("127.0.0.1", 7))]),
        State(tries=2, messages=("slow",), end=End(True, False, bytes={0: (1, 2)})),
        CheckpointConfig(exclude=("a*",), keep_last=Retention(newest=2, best=("loss", "min", 1))),
        CheckpointConfig(keeper=Keeper(dir="/node", durable_every=None), io=IO(threads=4)),
    ],
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    decoded = decode(encode(value))
    assert decoded == value and type(decoded) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(7, dtype=torch.int16),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_a_tensor_comes_back_with_its_bytes(tensor: torch.Tensor) -> None:
    assert same_bytes(decode(encode([tensor, "after it"]))[0], tensor.resolve_conj().contiguous())


@pytest.mark.parametrize("column", [np.arange(6).reshape(2, 3)[:, ::2], np.zeros((0, 2), np.uint32), np.array(True)])
def test_a_column_comes_back_with_its_type_and_shape(column: Any) -> None:
    decoded, after = decode(encode((column, b"after it")))
    assert decoded.dtype == column.dtype and decoded.shape == column.shape and (decoded == column).all()
    assert after == b"after it"


@pytest.mark.parametrize(
    "error", [SaveFailed("no room"), KeeperLost("stopped"), FileNotFoundError(2, "gone", "/run"), OSError("text")]
)
def test_an_exception_comes_back_as_one_of_its_class(error: Exception) -> None:
    decoded = decode(encode(error))
    assert type(decoded) is type(error) and str(error) in str(decoded)


def test_an_exception_of_another_class_comes_back_as_a_failed_save() -> None:
    decoded = decode(encode(KeyError("weights")))
    assert type(decoded) is SaveFailed and "KeyError: 'weights'" in str(decoded)


def test_an_object_that_does_not_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="a Event cannot be handed to another process"):
        encode({"credential_provider": __import__("threading").Event()})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps([1]),
        encode(b"bytes")[:-1] + b"",
        encode([1])[:6],
        encode((1,)).replace(b"[1]", b"[x]"),
        encode({"a": 1}).replace(b"mapping", b"Popen__"),
        encode(np.arange(3))[:-1],
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is damaged, or of another version"):
        decode(data)
