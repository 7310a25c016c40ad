"""Bugs of loops with Fabric."""

from __future__ import annotations

from pathlib import Path

from lightning.fabric import Fabric

import dcp_plugin as dcp
from dcp_plugin.fabric import attach
from tests.campaigns.parts import adam, inputs, loss, net


def prefix_of_weights(out: Path) -> None:
    """The names of the weights have a prefix, and ``strict=False`` loads none of them without a word.

    https://github.com/MakazhanAlpamys/Soup/issues/351, https://github.com/karpathy/nanoGPT/issues/325
    """
    fabric = Fabric(accelerator="cpu", devices=1)
    attach(fabric)
    model = net()
    model, optimizer = fabric.setup(model, adam(model))
    state = {"model": model, "optim": optimizer, "step": 0}
    if newest := dcp.latest(out):
        rest = {"optim": optimizer, "step": 0}
        fabric.load(newest, rest, strict=False)
        state["step"] = rest["step"]
        model.load_state_dict(dcp.read(newest, include="model.*"), strict=False)  # the bug: "model.0.weight"
    for step in range(state["step"], 6):
        optimizer.zero_grad()
        fabric.backward(loss(model, inputs(step)))
        optimizer.step()
        state["step"] = step + 1
        fabric.save(out / f"step-{step + 1}", state)
