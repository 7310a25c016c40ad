"""The configuration of every integration: plain Python, Lightning, Accelerate, Hydra and the command line.

Each field is documented only here, by the text under its definition. A group of fields is a small frozen dataclass.
Where a configuration takes a group, it also takes a mapping of the group's fields.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

from dcp_plugin.core.paths import StoreOptions, absolute, as_local, folder_of_proof
from dcp_plugin.core.types import public_class

if TYPE_CHECKING:
    from dcp_plugin.core.retention import Retention

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def refusing_typos(cls: C) -> C:
    """Make the constructor of ``cls`` refuse unknown fields, with the nearest field as a suggestion."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **fields: Any) -> None:
        cls._refuse_unknown(fields)  # type: ignore[attr-defined]
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@dataclass(frozen=True)
class Options:
    """Base of options: values of a wrong type and unknown names are refused with the full name of the option."""

    _prefix: ClassVar[str] = ""
    """Text before the names of these options in messages."""
    _groups: ClassVar[Mapping[str, type[Options]]] = {}
    """The fields that are groups of options."""

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = self._prefix + item.name, getattr(self, item.name)
            # item.type is the text of the annotation, since this package postpones the evaluation of annotations.
            wanted, fits = _TYPES.get(str(item.type), ("", lambda value: True))
            if not fits(value):
                shown = repr(value) if item.repr else f"a {type(value).__name__}"
                raise TypeError(f"{name} must be {wanted}, got {shown}.")
            wanted, is_in_range = _RANGES.get(item.name, ("", lambda value: True))
            if not is_in_range(value):
                raise ValueError(f"{name} must be {wanted.format(value)}.")

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, without access to a store."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(type(self), name)]
        return f"{type(self).__name__}({', '.join(changed)})"

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str], besides: tuple[str, ...] = ()) -> None:
        """Refuse names that are not fields.

        Raises:
            TypeError: A name is not a field. The message suggests the nearest field.
        """
        known, kinds = {*besides, *(item.name for item in fields(cls))}, (cls, *cls._groups.values())
        settings = [*besides, *(kind._prefix + item.name for kind in kinds for item in fields(kind))]
        unknown = [cls._prefix + name for name in names if name not in known]
        near = {name: difflib.get_close_matches(name, settings, n=1) for name in unknown}
        if texts := [f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name) for name, close in near.items()]:
            raise TypeError(f"unknown setting {', '.join(texts)}. The settings are {', '.join(settings)}.")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _one_of(*choices: object) -> tuple[str, Callable[[Any], bool]]:
    return f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {{!r}}", choices.__contains__


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: value in (True, False)),
    "int": ("a whole number", _is_int),
    "int | None": ("a whole number or None", lambda value: value is None or _is_int(value)),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda value: value is None or _is_number(value)),
    "Mapping[str, Any] | None": (
        "a mapping or None",
        lambda value: value is None or isinstance(value, (Mapping, StoreOptions)),
    ),
    "str | None": ("a path or None", lambda value: value is None or isinstance(value, (str, os.PathLike))),
    "tuple[str, ...]": (
        "a sequence of keys",
        lambda value: isinstance(value, tuple) and all(isinstance(key, str) for key in value),
    ),
    "int | Retention | None": (
        "a whole number, a Retention or None",
        lambda value: value is None or _is_int(value) or hasattr(value, "select"),
    ),
    "Keeper | None": (
        "a Keeper, a mapping of its fields or None",
        lambda value: value is None or isinstance(value, Keeper),
    ),
    "IO": ("an IO or a mapping of its fields", lambda value: isinstance(value, IO)),
}
"""Description and check of a value's type, by the annotation of its field."""

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "staging": _one_of("blocking", "lazy"),
    "when_busy": _one_of("wait", "skip"),
    **dict.fromkeys(("direct", "broadcast", "progress", "stock_aliases"), _one_of(True, False, "auto")),
    "threads": ("at least 1, got {}: with 0 no thread would write", lambda value: value >= 1),
    "keep": ("at least 1, got {}", lambda value: value >= 1),
    "replicas": ("at least 0, got {}", lambda value: value >= 0),
    "durable_every": (
        "at least 1, or None for never, got {}: it counts saves",
        lambda value: value is None or value >= 1,
    ),
    "bandwidth": ("positive bytes per second or None, got {}", lambda value: value is None or value > 0),
    "linger": ("0 or more seconds, got {}", lambda value: value >= 0),
    "timeout": ("positive, got {}: with 0 every save would fail", lambda value: value > 0),
    "save_interval": ("positive seconds or None, got {}", lambda value: value is None or value > 0),
    "keep_last": (
        "at least 1 or None, got {}: 0 would delete what was just saved",
        lambda value: value is None or hasattr(value, "select") or value >= 1,
    ),
}
"""Description and check of a value's range, by the name of its field. The checks refuse NaN as well."""


@public_class()
@refusing_typos
@dataclass(frozen=True, repr=False)
class Keeper(Options):
    """Settings of the *keeper*, one helper process per node that writes the saves. The keeper has the host copies in
    shared memory. A save that has returned is published even if the complete training is killed right after. The
    keeper never takes the training's interpreter lock. Linux only.

    Raises:
        ValueError: A value is out of range. The message names the field and the reason.
        TypeError: A value has the wrong type, or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(async_save=True, keeper=dcp_plugin.Keeper(dir="/dev/shm/me", replicas=1))
        CheckpointConfig(async_save=True, keeper=Keeper(dir='/dev/shm/me', replicas=1))
    """

    _prefix = "keeper."

    dir: str | None = None
    """A directory on each node, on a local disk or in memory (``/dev/shm/...``), that has the newest checkpoints. Each
    node stores the part of its ranks. A restart reads the surviving parts from there, and all other parts from
    ``path``. None: there is no local tier. Ranks on one host with equal ``dir`` form one node."""

    keep: int = 2
    """Number of the newest checkpoints to keep in ``dir``. While a save is written, it needs room for one more."""

    replicas: int = 0
    """Number of other nodes that store a copy of each node's part in their ``dir``. That many nodes may be lost with
    all their data."""

    durable_every: int | None = 1
    """Copy each N-th save of the run from ``dir`` to ``path``, in the background. Saves are counted over restarts.
    ``close`` copies the newest save in any case. ``None``: copy no save, for clusters without storage that all nodes
    share; ``path`` is then only the checkpoint's name."""

    bandwidth: float | None = None
    """Largest rate at which each node reads from ``dir`` to copy to ``path``, in bytes per second. None: no limit."""

    linger: float = 600.0
    """Seconds for which a keeper waits for a dead training to restart, before it frees its memory and ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dir is not None:
            local = as_local(self.dir, "keeper.dir", "Give a directory of each node, and the URL as the path.")
            private = "" if (proof := folder_of_proof()) is None else f"{proof}/local"
            object.__setattr__(self, "dir", private + str(absolute(local)).removeprefix(private))
        elif self.replicas or self.durable_every != 1:
            raise ValueError(
                "keeper.replicas and keeper.durable_every apply to the checkpoints in keeper.dir: set keeper.dir, too."
            )


@public_class()
@refusing_typos
@dataclass(frozen=True, repr=False)
class IO(Options):
    """Settings of reading and writing files.

    Raises:
        ValueError: A value is out of range. The message names the field and the reason.
        TypeError: A value has the wrong type, or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(io=dcp_plugin.IO(threads=4))
        CheckpointConfig(io=IO(threads=4))
    """

    _prefix = "io."

    threads: int = 2
    """Threads per rank that write or read files. A rank writes at most as many data files per checkpoint, plus files
    for tensors that are not expected to change."""

    direct: bool | Literal["auto"] = "auto"
    """Bypass the page cache when writing data files (``O_DIRECT``). ``"auto"``: only for files above 1/32 of the
    available memory, if a trial shows that the file system supports it. Smaller files stay in the page cache, from
    which a restart on the same host reads them. ``True``: for all files; a file system that refuses is an error."""

    verify: bool = True
    """Compare every block that a load reads with its hash. The exception is a load of narrow columns of a stored
    tensor: a block of which only a part is wanted is not checked. The check would require the columns of all other
    ranks."""

    broadcast: bool | Literal["auto"] = "auto"
    """If several ranks want the same bytes, let one rank read and broadcast them. ``"auto"``: always from an object
    store; from a file system, only bytes that at least 8 hosts want. Sharing never pays on one host, because the page
    cache has the bytes that the first rank has read."""


_PRESETS: dict[str, dict[str, Any]] = {
    "local": {"async_save": True, "keep_last": 3},
    "cluster": {"async_save": True, "keep_last": 3, "finish_on_sigterm": True},
    "bucket": {"async_save": True, "keep_last": 3, "keeper": Keeper()},
}
"""Fields that each preset sets."""


@public_class()
@refusing_typos
@dataclass(frozen=True, repr=False)
class CheckpointConfig(Options):
    """Settings for saving and loading checkpoints. A configuration is frozen, so several integrations may share it.

    Raises:
        ValueError: A value is out of range. The message names the field and the reason.
        TypeError: A value has the wrong type, as text from YAML or the environment may have; or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(async_save=True, keep_last=3).keep_last
        3
        >>> dcp_plugin.CheckpointConfig(keep_last=0)
        Traceback (most recent call last):
        ValueError: keep_last must be at least 1 or None, got 0: 0 would delete what was just saved.
        >>> dcp_plugin.CheckpointConfig(io=dcp_plugin.IO(threads=4))
        CheckpointConfig(io=IO(threads=4))
    """

    _groups: ClassVar[Mapping[str, type[Options]]] = {"keeper": Keeper, "io": IO}

    async_save: bool = False
    """Return from a save when the state is copied to host memory, and write it in a background thread. The host copy is
    as large as this rank's part of the state. The next save reuses its memory."""

    staging: Literal["blocking", "lazy"] = "blocking"
    """When a background save copies the state. ``"blocking"``: before ``save`` returns. ``"lazy"``: trained parameters
    and optimizer state are copied during the next forward and backward pass, and the optimizer's step waits for the
    copy; all other state (buffers, values, averaged weights) is copied before ``save`` returns. If code other than a
    ``torch.optim`` step or ``load_state_dict`` changes a tensor during the copy, that save fails with the tensor's
    name, and later saves copy before they return. Such code must call ``handle.wait_staged()`` first. A write through
    ``.data`` to a few rows of one tensor may stay undetected. Under Lightning the copy is complete before any callback
    or module hook that may write weights. Needs ``async_save``.
    """

    when_busy: Literal["wait", "skip"] = "wait"
    """Action of a background save while the previous save is not on disk yet. ``"wait"``: wait for the previous save.
    ``"skip"``: skip the new save with a warning, on every rank (``handle.skipped``). Lightning, Accelerate and
    transformers accept only ``"wait"``, since they delete and record checkpoints after each save."""

    keeper: Keeper | None = None
    """Settings of the process that writes the staged data (:class:`~dcp_plugin.Keeper`). ``None``: a thread of this
    process writes it."""

    finish_on_sigterm: bool = False
    """On SIGTERM (preemption on SLURM or Kubernetes) finish the save in flight, and then do what the process would have
    done without this option. The training continues meanwhile. The wait takes at most ``timeout`` seconds, so that a
    hanging save does not keep the process alive. The grace period must be long enough for a save, since SIGKILL ends
    the save. The first save in the main thread installs the handler, and ``close`` removes it."""

    save_interval: float | None = None
    """Seconds of training between two saves, applied by ``checkpointer.due(step)`` and by the integrations. None: only
    the caller decides when to save."""

    events: str | None = None
    """A file to which rank 0 appends a JSON object for each save (path, step, bytes, seconds, rates, or the error)."""

    io: IO = IO()
    """Settings of reading and writing files (:class:`~dcp_plugin.IO`)."""

    reuse: bool = True
    """Hard-link items that have not changed since the last checkpoint of the run instead of writing them again. Each
    checkpoint stays complete: it can be copied, loaded and deleted without the others."""

    trainable_only: bool = False
    """Leave frozen parameters out of checkpoints. This applies to parameters that still have the bytes of one
    checkpoint outside of the run, which this process has loaded with ``init_from`` or before the training. Every start
    of the run must load that checkpoint again, so it must be kept. Buffers and other frozen parameters are saved."""

    exclude: tuple[str, ...] = ()
    """Keys (globs) to leave out of saves. A pattern that matches no key is an error at the first save."""

    rng: bool = True
    """Save and restore the random number generators of every rank, in the framework integrations."""

    keep_last: int | Retention | None = None
    """After a save, delete committed checkpoints next to it. A number N keeps the newest N of them, a
    :class:`~dcp_plugin.Retention` those that its rules keep. ``None`` deletes none."""

    timeout: float = 1800.0
    """Seconds that a rank waits for the others in one step of a save or load before it raises."""

    progress: bool | Literal["auto"] = "auto"
    """Show a progress line on rank 0 for a save that blocks for longer than a second. A background save writes a
    separate line every ten seconds, which leaves progress bars intact. ``"auto"``: if stderr is a terminal."""

    stock_aliases: bool | Literal["auto"] = "auto"
    """Store additional keys for stock code. An optimizer's param groups are also stored as a list. Lightning's sharded
    strategies also store every key under the name that stock Lightning expects, so that Lightning resumes without this
    package. The keys take a few bytes; the tensors are shared. A tool that converts a complete directory
    (``dcp_to_torch_save``) converts shared tensors twice."""

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """Options for access to the object store of a URL, with the names of `obstore
    <https://developmentseed.org/obstore>`_ (``{"endpoint": …, "region": …, "client_options": {…}}``), in addition to
    the environment and the machine's role. The options are never shown or saved. A pickle has them only if it is made
    to start a process."""

    allow_pickle: tuple[str, ...] = ()
    """Keys (globs) whose values may be stored as pickles and loaded by executing pickled code. Never allow this for a
    checkpoint from an untrusted source."""

    def __post_init__(self) -> None:
        # YAML and the command line give lists and mappings. object.__setattr__, because the class is frozen.
        for name in ("allow_pickle", "exclude"):
            keys: object = getattr(self, name)
            if isinstance(keys, Iterable) and not isinstance(keys, str):
                object.__setattr__(self, name, tuple(keys))
        for name, group in self._groups.items():
            if isinstance(changes := getattr(self, name), Mapping):
                object.__setattr__(self, name, group(**changes))
        super().__post_init__()
        if self.async_save and getattr(self.keep_last, "newest", self.keep_last) == 1:
            raise ValueError(
                f"keep_last={self.keep_last} with async_save=True: keep at least 2, since the newest may still be on "
                f"its way to disk."
            )
        if self.staging == "lazy" and not self.async_save:
            raise ValueError(
                "staging='lazy' needs async_save=True: a save that waits for the disk makes no copy, so it would "
                "gain nothing. Pass async_save=True, or leave out staging."
            )
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StoreOptions(self.storage_options))
        if self.events is not None:
            local = as_local(self.events, "the file of events", "Give a local file, and copy it when the job ends.")
            object.__setattr__(self, "events", local)

    @classmethod
    def preset(cls, name: Literal["local", "cluster", "bucket"], /, **overrides: Any) -> CheckpointConfig:
        """Return the configuration for a kind of place, with the fields in ``overrides`` replaced.

        Each preset saves in the background, and keeps the newest three checkpoints.

        Args:
            name: ``"local"``: one machine and its disk. ``"cluster"``: a shared file system and jobs that may be ended;
                SIGTERM finishes the save in flight. ``"bucket"``: an object store; a keeper uploads, so that a save
                that has returned is published even if the training is killed.

        Raises:
            ValueError: There is no preset of this name, or a value is out of range.
            TypeError: An override is not a field.

        Example:
            >>> import dcp_plugin
            >>> dcp_plugin.CheckpointConfig.preset("cluster", keep_last=5)
            CheckpointConfig(async_save=True, finish_on_sigterm=True, keep_last=5)
        """
        if name not in _PRESETS:
            raise ValueError(f"the presets are {', '.join(map(repr, _PRESETS))}, not {name!r}.")
        return cls.merge(cls(**_PRESETS[name]), **overrides)

    @classmethod
    def merge(
        cls, config: CheckpointConfig | None, besides: tuple[str, ...] = (), /, **overrides: Any
    ) -> CheckpointConfig:
        """Return ``config``, or the defaults, with the fields in ``overrides`` replaced.

        A mapping for a group (``keeper``, ``io``) replaces single fields of the group. If ``config`` has
        ``keeper=None``, the fields are replaced in the default :class:`~dcp_plugin.Keeper`. The override
        ``async_save=False`` also resets ``staging``, because lazy staging needs a background save.

        Args:
            config: The configuration to change; the defaults if None.
            besides: Further arguments of the caller, which the error lists together with the fields.

        Returns:
            A new configuration; ``config`` itself is unchanged.

        Raises:
            TypeError: An override is not a field, or ``config`` is not a configuration.
            ValueError: A value is out of range.

        Example:
            >>> import dcp_plugin
            >>> base = dcp_plugin.CheckpointConfig(keep_last=3)
            >>> dcp_plugin.CheckpointConfig.merge(base, io={"threads": 4})
            CheckpointConfig(io=IO(threads=4), keep_last=3)
        """
        cls._refuse_unknown(overrides, ("config", *besides))
        if config is not None and not isinstance(config, cls):
            raise TypeError(
                f"config must be a CheckpointConfig, not a {type(config).__name__}. Pass a dict of settings as "
                f"keyword arguments."
            )
        if overrides.get("async_save") is False:
            overrides = {"staging": "blocking", **overrides}
        config = config or cls()
        for name, group in cls._groups.items():
            if isinstance(changes := overrides.get(name), Mapping):
                overrides[name] = replace(getattr(config, name) or group(), **changes)
        return replace(config, **overrides)


def has_local_tier(config: CheckpointConfig) -> bool:
    """Return whether a save is first complete in ``keeper.dir`` of the nodes. Some saves are never copied to their
    paths."""
    return config.keeper is not None and config.keeper.dir is not None


def settings_of_all_ranks(config: CheckpointConfig) -> dict[str, Any]:
    """Return the fields that determine where ranks wait for each other, and so must be equal on all ranks."""
    names = ("async_save", "when_busy", "trainable_only", "exclude", "save_interval")
    return {name: getattr(config, name) for name in names} | {
        "keeper": config.keeper is not None,
        "keeper.replicas": config.keeper and config.keeper.replicas,
        "io.broadcast": config.io.broadcast,
    }


def fields_in_signature(init: F) -> F:
    """Replace ``**overrides`` in the signature of ``init`` by the fields, for tools such as jsonargparse
    (LightningCLI).

    The parameter ``config`` is left out. These tools pass every default explicitly, which would override the fields of
    a ``config``.
    """
    from dcp_plugin.core.retention import Retention  # few configurations have one

    hints = get_type_hints(CheckpointConfig, localns={"Retention": Retention})
    parameters = signature(init, eval_str=True).parameters.values()
    own = [item for item in parameters if item.name != "config" and item.kind != item.VAR_KEYWORD]
    added = [
        Parameter(item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for item in fields(CheckpointConfig)
    ]
    init.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]
    return init
