"""A misspelt setting is told by every integration, with what was meant and everything that this integration takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.launch import on_ranks


@on_ranks(1)
def test_a_misspelt_setting_is_told_with_all_that_the_door_takes() -> None:
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    import dcp_plugin as dcp
    from dcp_plugin import accelerate, fabric, lightning

    integrations: list[tuple[Any, tuple[Any, ...], str, str]] = [
        (lightning.DCPCheckpointIO, (), "initfrom", "init_from"),
        (fabric.attach, (Fabric(accelerator="cpu"),), "confg", "config"),
        (accelerate.attach, (Accelerator(cpu=True),), "trainable", "trainable_only"),
        (dcp.Checkpointer, (), "dolo", "solo"),
        (dcp.save, ({}, "nowhere"), "stepp", "step"),
        (dcp.load, ({}, "nowhere"), "strickt", "strict"),
        (dcp.resume_or_init, ({}, "nowhere"), "parital", "partial"),
    ]
    for integration, arguments, typo, meant in integrations:
        with pytest.raises(TypeError, match="config must be a CheckpointConfig, not a dict"):
            integration(*arguments, config={"async_save": True})
        with pytest.raises(TypeError) as caught:
            integration(*arguments, asinc_save=True, **{typo: 1}, qux=1)
        said = f"unknown setting 'asinc_save' (did you mean 'async_save'?), '{typo}' (did you mean '{meant}'?), 'qux'. "
        assert said in str(caught.value)
        listed = str(caught.value).partition("The settings are ")[2].rstrip(".").split(", ")
        given = list(inspect.signature(integration).parameters.values())[len(arguments) :]
        assert set(listed) >= {one.name for one in given if one.kind != one.VAR_KEYWORD} | {"config", "async_save"}
