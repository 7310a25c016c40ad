"""This project, as it comes and with other options."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import dcp_plugin
from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks.peers import stock


def save(state: State, path: Path, **io: bool) -> None:
    dcp_plugin.save({"state": state}, path, io={"threads": IO_THREADS, **io})


def load(state: State, path: Path, **io: bool) -> None:
    dcp_plugin.load({"state": state}, path, io={"threads": IO_THREADS, **io})


PEERS = [
    Peer(OURS, save, load),
    Peer("dcp_plugin, past the page cache", partial(save, direct=True), load, only="save"),
    Peer("dcp_plugin, not verifying", save, partial(load, verify=False), only="load"),
    Peer("dcp_plugin on stock's checkpoint", stock.save, load, only="load"),
]
