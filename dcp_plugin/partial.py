"""What the user asks of a partial load: which keys, under which names the checkpoint has them, what may be missing.

:mod:`dcp_plugin.loading.matching` applies it to a state and a checkpoint, before the first byte is overwritten.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

Policy = Literal["error", "warn", "ignore"]

PATTERN = "re:"
"""Prefix of those keys of ``rename`` that are regular expressions."""


@dataclass(frozen=True, eq=False)
class Submodule:
    """A module that is somewhere in the state, and the prefix of its keys in the checkpoint."""

    module: nn.Module
    source: str

    def __repr__(self) -> str:
        return f"Submodule({type(self.module).__name__}, source={self.source!r})"


@dataclass(frozen=True)
class PartialLoad:
    """Load a part of a checkpoint; only the bytes of what is selected are read, and the rest keeps its values.

    Globs are matched against the *target's* keys: ``model.encoder.*``, ``optim.state.*``; a ``*`` goes across dots. A
    glob or a rename that matches nothing is an error, and so is a rename to a prefix that the checkpoint does not have.

    Raises:
        ValueError: A pattern is no pattern, a policy no policy, or nothing could be selected.

    Example:
        >>> import tempfile, torch, dcp_plugin
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> _ = dcp_plugin.save({"model": torch.nn.Linear(2, 2)}, path)
        >>> partial = dcp_plugin.PartialLoad(include="net.weight", rename={"net.": "model."})
        >>> dcp_plugin.load({"net": torch.nn.Linear(2, 2)}, path, partial=partial).loaded
        ['net.weight']
    """

    include: tuple[str, ...] = ("*",)
    """What to load: globs, or a single one."""

    exclude: tuple[str, ...] = ()
    """What to leave out of that."""

    rename: Mapping[str, str] = field(default_factory=dict, hash=False)
    r"""Prefix of the target's keys -> prefix in the checkpoint, ``{"model.pretrain.": "model."}``. Plain text, so write
    the dots; the longest prefix that fits a key decides, alone.

    With a regular expression: ``{r"re:model\.h\.(\d+)\.(.*)": r"model.layers.\1.\2"}``. It has to match the *whole* key
    of a target, and gives the whole key in the checkpoint, with ``\1`` or ``\g<name>`` for groups. It goes before
    prefixes; of several that match a key, the first given.

    An optimizer follows its module, parameter by parameter, unless a prefix names the optimizer's own keys
    (``optim.state.`` …). Regular expressions are for modules and data."""

    missing: Policy = "error"
    """About selected keys that the checkpoint does not have. ``strict=False`` of a load makes ``"error"`` ``"ignore"``;
    parameters that only the optimizer's checkpoint lacks are a warning at most, because trainable parts change."""

    unexpected: Policy = "error"
    """About keys of the checkpoint that would be selected if the target had them."""

    cast: bool = False
    """Whether values may be converted to the target's dtype. Otherwise another dtype is an error."""

    of: Submodule | None = None
    """Set by :meth:`submodule`; decides about include and rename."""

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
        """Load a module that is a part of a module of the state, and nothing else.

        It is found by identity, through any wrapper; as it was before wrapping, or its wrapper. How it is sharded
        makes no difference: with its parent, alone, or not at all.

        Args:
            module: The part, ``model.pretrain``.
            source: What its keys start with in the checkpoint: ``"model."`` if it was saved alone as ``model``, ``""``
                for bare names.
            exclude: Globs over the target's keys.
            missing: About keys of the module that the checkpoint does not have.
            unexpected: About keys of the checkpoint below ``source`` that the module does not have.
            cast: Whether values may be converted to the module's dtype.

        Returns:
            The partial load; the load fails with a ``CheckpointMismatch`` if the module is not in its state.

        Raises:
            ValueError: ``module`` is no module, or a glob or policy is none.

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
        """The same, once it is known what the keys of the sub-module start with in the target."""
        assert self.of is not None
        return replace(self, include=(f"{glob.escape(prefix)}*",), rename={prefix: self.of.source})

    def selects(self, key: str) -> bool:
        return _matches(key, self.include) and not _matches(key, self.exclude)

    def idle(self, keys: Iterable[str]) -> list[str]:
        """Return the globs that match none of these keys. ``*`` is never one of them, even where there are no keys."""
        keys = list(keys)
        globs = (glob for glob in (*self.include, *self.exclude) if glob != "*")
        return [glob for glob in globs if not any(fnmatchcase(key, glob) for key in keys)]


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _texts(name: str, given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"PartialLoad: {name} has {text!r}, which is no glob")
    return texts


def _renames(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"PartialLoad: rename is a {type(given).__name__}; it maps prefixes to prefixes")
    renames = {here: given[here] for here in given}
    for here, there in renames.items():
        if not isinstance(here, str) or not isinstance(there, str):
            raise ValueError(f"PartialLoad: rename maps {here!r} to {there!r}; both have to be text")
        if here.startswith(PATTERN):
            try:
                re.compile(here.removeprefix(PATTERN)).sub(there, "")  # looks at the groups of the replacement, too
            except (re.error, IndexError) as error:
                raise ValueError(f"PartialLoad: rename {here!r} -> {there!r}: {error}") from error
    return renames
