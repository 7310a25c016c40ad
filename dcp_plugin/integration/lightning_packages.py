"""Lightning's two packages of equal content and different classes: ``lightning.pytorch`` and ``pytorch_lightning``.

Which one is meant is read from the object at hand, the class of a trainer or a strategy. So this door works with the
one that is installed, and imports neither by itself: ``import dcp_plugin.lightning`` costs nothing until a Trainer
is there. Only names that users ask for before there is an object (``DCPCallback``) go by what has been imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Package:
    """One of the two. Each brings its own Fabric, where ``CheckpointIO`` is."""

    name: str
    fabric_name: str
    classes: str
    """Our module of classes that derive from its classes."""

    @property
    def pytorch(self) -> Any:
        return importlib.import_module(self.name)

    @property
    def strategies(self) -> Any:
        return self.module("strategies")

    @property
    def imported(self) -> bool:
        return self.name in sys.modules

    @property
    def fabric_imported(self) -> bool:
        return self.fabric_name in sys.modules

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def fabric(self, name: str) -> Any:
        return importlib.import_module(f"{self.fabric_name}.{name}")


LIGHTNING = Package("lightning.pytorch", "lightning.fabric", "dcp_plugin.lightning.of_lightning")
PYTORCH_LIGHTNING = Package("pytorch_lightning", "lightning_fabric", "dcp_plugin.lightning.of_pytorch_lightning")
PACKAGES = (LIGHTNING, PYTORCH_LIGHTNING)


def package_of(cls: type) -> Package | None:
    """The package that a class, or the first of its bases that does, comes from."""
    return next((package for base in cls.__mro__ if (package := home_of(base)) is not None), None)


def home_of(cls: type) -> Package | None:
    """The package that a class itself is defined in."""
    module = f"{cls.__module__}."
    homes = [package for package in PACKAGES if module.startswith((f"{package.name}.", f"{package.fabric_name}."))]
    return homes[0] if homes else None


def package_behind(value: object) -> Package:
    """The package of a trainer, a strategy, a LightningModule."""
    package = package_of(type(value))
    assert package is not None, f"{type(value)} is not Lightning's"
    return package


def has_base(cls: type, name: str) -> bool:
    """Whether a class is Lightning's class of this name, of either package, or derives from it."""
    return any(base.__name__ == name and home_of(base) is not None for base in cls.__mro__)


def installed() -> list[Package]:
    """The packages that could be imported.

    Raises:
        ImportError: None.
    """
    found = [package for package in PACKAGES if importlib.util.find_spec(package.name.partition(".")[0]) is not None]
    if not found:
        raise ImportError(
            "dcp_plugin.lightning needs Lightning, as `lightning` or as `pytorch_lightning`, and neither is installed: "
            'pip install "dcp-plugin[lightning]"'
        )
    return found


def in_use() -> Package:
    """The package that the program has imported; ``lightning`` if it is both, the one that is installed if neither."""
    return next((package for package in PACKAGES if package.imported), installed()[0])
