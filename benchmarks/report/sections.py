"""What ``make bench-report`` runs: the sections of the page, and the command lines behind each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One section of the page. Its explanation is ``benchmarks/notes/NAME.md``."""

    title: str
    runs: tuple[str, ...]
    """``NAME options``, as after ``python -m benchmarks``."""


SECTIONS = {
    "save": Section(
        "Saving",
        (
            "save --state mixed --ranks 1 --where outputs",
            "save --state mixed --ranks 2 --where outputs /dev/shm",
            "save --state 4000 --ranks 1 --where outputs",
        ),
    ),
    "load": Section(
        "Loading",
        (
            "load --state mixed --ranks 1 --where outputs --caches warm cold saved",
            "load --state mixed --ranks 1 2 --where /dev/shm --caches warm",
            "load --state mixed --ranks 2 --where outputs --caches warm",
            "load --state 4000 --ranks 1 2 --where outputs --caches warm",
        ),
    ),
    "reshard": Section("Loading onto another layout", ("reshard",)),
    "hsdp": Section(
        "Replicas: who writes, and reading once", ("hsdp --mib 128 --ranks 4 --media disk mount --rates 400",)
    ),
    "async_save": Section(
        "In the background",
        (
            (
                "async_save --mib 256 --saves 10 --where outputs --peers "
                "'stock async_save, thread' 'stock async_save, process' torch_checkpointing memcpy"
            ),
        ),
    ),
    "plan": Section(
        "Plans and tables of contents",
        ("plan --ranks 1024 --mesh fsdp", "plan --ranks 16384 --tensors 1000 --mesh fsdp --repeats 2"),
    ),
    "reuse": Section("Not writing what has not changed", ("reuse --mib 512 --ranks 1 --where outputs",)),
    "recovery": Section(
        "Coming back after a kill",
        (
            (
                "recovery --gib 0.5 --questions restore --only "
                "'dcp_plugin, memory' 'dcp_plugin, disk, cold' 'stock, disk, cold' raw"
            ),
        ),
    ),
    "objects": Section("Object stores", ("objects --scenes loopback --mib 128 --questions save load unchanged",)),
    "exporting": Section("Exporting", ("exporting --mib 512 --where outputs",)),
    "comparing": Section("Comparing", ("comparing --mib 512 --state mixed --where outputs",)),
    "copying": Section("Copying", ("copying --mib 256 --where outputs --repeats 3",)),
    "foreign": Section("Reading others' files", ("foreign --mib 512 --state mixed --ranks 1 --where outputs",)),
    "state_memory": Section("Gathering the state", ("state_memory --mib 256",)),
    "mlperf": Section(
        "The pattern of MLPerf Storage", ("llama --wrappers MLPerf --size 8b/8 --ranks 8 --repeats 5 --where outputs",)
    ),
    "llama": Section("Larger than memory caches", ("llama",)),
}
LARGE = {"llama"}
"""Run only when they are named: they need a machine for themselves."""
