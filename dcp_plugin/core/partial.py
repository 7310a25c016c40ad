"""The rules of a partial load: the keys to load, their names in the checkpoint, and the keys that may be missing.

:mod:`dcp_plugin.core.loading.matching` applies the rules to a state and a checkpoint before the first byte is
overwritten.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from dcp_plugin.core.types import public_class

Policy = Literal["error", "warn", "ignore"]

PATTERN = "re:"
"""Prefix that marks a key of ``rename`` as a regular expression."""


@dataclass(frozen=True, eq=False)
class Submodule:
    """A module inside the state, and the prefix of its keys in the checkpoint."""

    module: nn.Module
    source: str

    def __repr__(self) -> str:
        return f"Submodule({type(self.module).__name__}, source={self.source!r})"


@public_class()
@dataclass(frozen=True)
class PartialLoad:
    """Rules for loading a part of a checkpoint. Only bytes of selected keys are read; other targets keep their values.

    Globs are matched against the *target's* keys: ``model.encoder.*``, ``optim.state.*``; a ``*`` also matches dots. A
    glob or a rename that matches no key is an error, and so is a rename to a prefix that the checkpoint does not have.

    Raises:
        ValueError: A pattern or a policy is invalid, or ``include`` is empty.

    Example:
        >>> import tempfile, torch, dcp_plugin
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> _ = dcp_plugin.save({"model": torch.nn.Linear(2, 2)}, path)
        >>> partial = dcp_plugin.PartialLoad(include="net.weight", rename={"net.": "model."})
        >>> dcp_plugin.load({"net": torch.nn.Linear(2, 2)}, path, partial=partial).loaded
        ['net.weight']
    """

    include: tuple[str, ...] = ("*",)
    """Keys to load: globs, or a single glob."""

    exclude: tuple[str, ...] = ()
    """Keys to leave out of ``include``: globs, or a single glob."""

    rename: Mapping[str, str] = field(default_factory=dict, hash=False)
    r"""Prefix of the target's keys -> prefix in the checkpoint, ``{"model.pretrain.": "model."}``. Prefixes are plain
    text and include the final dot. Only the longest prefix that fits a key applies.

    With a regular expression: ``{r"re:model\.h\.(\d+)\.(.*)": r"model.layers.\1.\2"}``. It must match the *complete*
    key of a target. The replacement is the complete key in the checkpoint, with ``\1`` or ``\g<name>`` for groups.
    Regular expressions take precedence over prefixes; if several match a key, the first one applies.

    An optimizer follows its module, parameter by parameter, unless a prefix names the optimizer's own keys
    (``optim.state.`` …). Regular expressions are for modules and data."""

    missing: Policy = "error"
    """Policy for selected keys that the checkpoint does not have. ``strict=False`` of a load turns ``"error"`` into
    ``"ignore"``. Parameters that only the stored optimizer lacks are at most a warning, because the set of trained
    parameters may change."""

    unexpected: Policy = "error"
    """Policy for keys of the checkpoint that would be selected if the target had them."""

    cast: bool = False
    """Allow conversion to the target's dtype. Without it, a different dtype is an error."""

    of: Submodule | None = None
    """Sub-module to load, set by :meth:`submodule`. It determines ``include`` and ``rename``."""

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not self.include:
            raise ValueError("PartialLoad: include is empty, so nothing would be loaded")
        object.__setattr__(self, "rename", _renames(self.rename))
        for name in ("missing", "unexpected"):
            if getattr(self, name) not in get_args(Policy):
                raise ValueError(
                    f"PartialLoad: {name}={getattr(self, name)!r} is none of {', '.join(get_args(Policy))}"
                )

    @classmethod
    def submodule(
        cls,
        module: nn.Module,
        source: str = "model.",
        *,
        exclude: Iterable[str] = (),
        missing: Policy = "error",
        unexpected: Policy = "error",
        cast: bool = False,
    ) -> PartialLoad:
        """Make the rules for loading only one module, which is a part of a module of the state.

        The module is found by identity, through any wrapper; ``module`` may be the module itself or its wrapper. It may
        be sharded with its parent, alone, or not at all.

        Args:
            module: The part, such as ``model.pretrain``.
            source: Prefix of its keys in the checkpoint: ``"model."`` if it was saved alone as ``model``, ``""`` for
                bare names.
            exclude: Globs over the target's keys.
            missing: Policy for keys of the module that the checkpoint does not have.
            unexpected: Policy for keys of the checkpoint below ``source`` that the module does not have.
            cast: Allow conversion to the module's dtype.

        Returns:
            The partial load. A load with it raises ``CheckpointMismatch`` if the module is not in the state.

        Raises:
            ValueError: ``module`` is not a module, or a glob or policy is invalid.

        Example:
            >>> import torch, dcp_plugin
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
            >>> dcp_plugin.PartialLoad.submodule(model[0], source="model").of
            Submodule(Linear, source='model.')
        """
        if not isinstance(module, nn.Module):
            raise ValueError(f"PartialLoad.submodule takes a module, not a {type(module).__name__}")
        source = f"{source}." if source and not source.endswith(".") else source
        return cls(
            exclude=_texts("exclude", exclude),
            missing=missing,
            unexpected=unexpected,
            cast=cast,
            of=Submodule(module, source),
        )

    def located(self, prefix: str) -> PartialLoad:
        """Return the rules with the prefix of the sub-module's keys in the target filled in."""
        assert self.of is not None
        return replace(self, include=(f"{glob.escape(prefix)}*",), rename={prefix: self.of.source})

    def selects(self, key: str) -> bool:
        return matches(key, self.include) and not matches(key, self.exclude)

    def idle(self, keys: Iterable[str]) -> list[str]:
        """Return the globs that match none of these keys. The result never has ``*``, even if ``keys`` is empty."""
        keys = list(keys)
        globs = (glob for glob in (*self.include, *self.exclude) if glob != "*")
        return [glob for glob in globs if not any(fnmatchcase(key, glob) for key in keys)]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Return whether a key matches one of the globs."""
    return any(fnmatchcase(key, glob) for glob in globs)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"PartialLoad: {name} has {text!r}, which is not a glob")
    return texts


def _renames(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"PartialLoad: rename must map prefixes to prefixes, not be a {type(value).__name__}")
    renames = {target: value[target] for target in value}
    for target, source in renames.items():
        if not isinstance(target, str) or not isinstance(source, str):
            raise ValueError(f"PartialLoad: rename maps {target!r} to {source!r}; both must be text")
        if target.startswith(PATTERN):
            try:
                re.compile(target.removeprefix(PATTERN)).sub(source, "")  # also checks the groups of the replacement
            except (re.error, IndexError) as error:
                raise ValueError(f"PartialLoad: rename {target!r} -> {source!r}: {error}") from error
    return renames
