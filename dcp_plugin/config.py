"""The configuration of every integration: plain Python, Lightning, Accelerate, Hydra and the command line.

Each field is documented only here, by the text under its definition.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

from dcp_plugin.paths import StoreOptions, absolute, as_local, text_of

if TYPE_CHECKING:
    from dcp_plugin.retention import Retention

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def _refusing_typos(cls: C) -> C:
    """Make the constructor of ``cls`` refuse unknown fields, with the nearest field as a suggestion."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **fields: Any) -> None:
        cls.refuse_unknown(fields)  # type: ignore[attr-defined]
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


_PRESETS: dict[str, dict[str, Any]] = {
    "local": {"async_save": True, "keep_last": 3},
    "cluster": {"async_save": True, "keep_last": 3, "finish_on_sigterm": True},
    "bucket": {"async_save": True, "keep_last": 3, "writer": "process"},
}
"""Fields that each preset sets."""


@_refusing_typos
@dataclass(frozen=True, repr=False)
class CheckpointConfig:
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
        >>> dcp_plugin.CheckpointConfig(io_threads=4)
        CheckpointConfig(io_threads=4)
    """

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

    when_busy: Literal["wait", "skip", "queue"] = "wait"
    """Action of a background save while the previous save is not on disk yet. ``"wait"``: wait for the previous save.
    ``"skip"``: skip the new save with a warning, on every rank (``handle.skipped``). ``"queue"``: return when the state
    is copied into a second host copy; a third save waits for the first. Lightning, Accelerate and transformers accept
    only ``"wait"``, since they delete and record checkpoints after each save."""

    writer: Literal["thread", "process"] = "thread"
    """Writer of the staged data. ``"thread"``: a thread of this process. ``"process"``: a *keeper*, one helper process
    per node, which has the host copies in shared memory. A save that has returned is published even if the complete
    training is killed right after, and the keeper never takes the training's interpreter lock. Linux only. With
    ``local_dir`` the writer is always a keeper."""

    local_dir: str | None = None
    """A directory on each node, on a local disk or in memory (``/dev/shm/...``), that has the newest checkpoints. Each
    node stores the part of its ranks. A restart reads the surviving parts from there, and all other parts from
    ``path``. None: there is no local tier. Ranks on one host with equal ``local_dir`` form one node."""

    local_keep: int = 2
    """Number of the newest checkpoints to keep in ``local_dir``. While a save is written, it needs room for one
    more."""

    replicas: int = 0
    """Number of other nodes that store a copy of each node's part in their ``local_dir``. That many nodes may be lost
    with all their data."""

    durable_every: int | None = 1
    """Copy each N-th save of the run from ``local_dir`` to ``path``, in the background. Saves are counted over
    restarts. ``close`` copies the newest save in any case. ``None``: copy no save, for clusters without storage that
    all nodes share; ``path`` is then only the checkpoint's name."""

    drain_bandwidth: float | None = None
    """Largest rate at which each node reads from ``local_dir`` to copy to ``path``, in bytes per second. None: no
    limit."""

    keeper_linger: float = 600.0
    """Seconds for which a keeper waits for a dead training to restart, before it frees its memory and ends."""

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

    io_threads: int = 2
    """Threads per rank that write or read files. A rank writes at most as many data files per checkpoint, plus files
    for tensors that are not expected to change."""

    direct_io: bool | Literal["auto"] = "auto"
    """Bypass the page cache when writing data files (``O_DIRECT``). ``"auto"``: only for files above 1/32 of the
    available memory, if a trial shows that the file system supports it; smaller files stay in the page cache, from
    which a restart on the same host reads them. ``True``: for all files; a file system that refuses is an error."""

    verify_on_load: bool = True
    """Check every block that a load reads against its checksum. If only narrow columns of a stored tensor are wanted,
    blocks that are only partly wanted are not checked, since the check would require the columns of all other ranks."""

    read_broadcast: bool | Literal["auto"] = "auto"
    """If several ranks want the same bytes, let one rank read and broadcast them. ``"auto"``: always from an object
    store; from a file system only bytes that at least 8 hosts want. On one host sharing never pays, however slow the
    storage is, because the page cache has the bytes that the first rank has read."""

    reuse: bool = True
    """Hard-link items that have not changed since the last checkpoint of the run instead of writing them again. Each
    checkpoint stays complete: it can be copied, loaded and deleted without the others."""

    trainable_only: bool = False
    """Leave frozen parameters out of checkpoints while the *base* has the same bytes. The base is the checkpoint that
    was loaded before training, or the checkpoint named in ``base``. A load reads the missing parameters from the base,
    so the base must be kept. Buffers, and frozen parameters that have changed, are always saved."""

    base: str | None = None
    """The checkpoint on which others build. For a save with ``trainable_only``: the checkpoint with the frozen
    parameters, needed only if it was not loaded through the same checkpointer. With ``reuse``: the checkpoint from
    which the first save links. For a load: the new location of the base, if it was moved."""

    exclude: tuple[str, ...] = ()
    """Keys (globs) to leave out of saves. A pattern that matches no key is an error at the first save."""

    rng: bool = True
    """Save and restore the random number generators of every rank, in the framework integrations."""

    keep_last: int | None = None
    """After a save, delete all but the newest N committed checkpoints next to it. ``None`` keeps all. Short for
    ``retention=Retention(newest=N)``."""

    retention: Retention | None = None
    """After a save, delete the committed checkpoints next to it that these rules do not keep
    (:class:`~dcp_plugin.Retention`). ``None`` keeps all."""

    timeout: float = 1800.0
    """Seconds that a rank waits for the others in one step of a save or load before it raises."""

    progress: bool | Literal["auto"] = "auto"
    """Show a progress line on rank 0 for a save that blocks for longer than a second. A background save writes a
    separate line every ten seconds, which leaves progress bars intact. ``"auto"``: if stderr is a terminal."""

    stock_aliases: bool | Literal["auto"] = "auto"
    """Store additional keys for stock code: an optimizer's param groups as a list and, through Lightning's sharded
    strategies, the keys of everything, so that Lightning resumes without this package. The keys take a few bytes; the
    tensors are shared. A tool that converts a complete directory (``dcp_to_torch_save``) converts shared tensors
    twice."""

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """Options for access to the object store of a URL, with the names of `obstore
    <https://developmentseed.org/obstore>`_ (``{"endpoint": …, "region": …, "client_options": {…}}``), in addition to
    the environment and the machine's role. The options are never shown or saved. A pickle has them only if it is made
    to start a process."""

    allow_pickle: tuple[str, ...] = ()
    """Keys (globs) whose values may be stored as pickles and loaded by executing pickled code. Never allow this for a
    checkpoint from an untrusted source."""

    def __post_init__(self) -> None:
        for name in ("allow_pickle", "exclude"):
            keys: object = getattr(self, name)
            if isinstance(keys, Iterable) and not isinstance(keys, str):
                object.__setattr__(self, name, tuple(keys))
        for item in fields(self):
            wanted, fits = _TYPES.get(str(item.type), ("", lambda value: True))
            value = getattr(self, item.name)
            if not fits(value):
                shown = repr(value) if item.repr else f"a {type(value).__name__}"
                raise TypeError(f"{item.name} must be {wanted}, got {shown}.")
        self._check_ranges()
        if self.base is not None:
            object.__setattr__(self, "base", text_of(self.base))
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StoreOptions(self.storage_options))
        if self.local_dir is not None:
            local = as_local(self.local_dir, "local_dir", "Give a directory of each node, and the URL as the path.")
            object.__setattr__(self, "local_dir", str(absolute(local)))
        if self.events is not None:
            local = as_local(self.events, "the file of events", "Give a local file, and copy it when the job ends.")
            object.__setattr__(self, "events", local)

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, without access to a store."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(type(self), name)]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _check_ranges(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                options = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
                raise ValueError(f"{name} must be {options}, got {getattr(self, name)!r}.")
        if self.io_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {self.io_threads}: with 0 no thread would write.")
        if not self.timeout > 0:  # refuses NaN as well, unlike timeout <= 0
            raise ValueError(f"timeout must be positive, got {self.timeout}: with 0 every save would fail.")
        if self.save_interval is not None and not self.save_interval > 0:
            raise ValueError(f"save_interval must be positive seconds or None, got {self.save_interval}.")
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last must be at least 1 or None, got {self.keep_last}: 0 would delete what was just saved."
            )
        if self.keep_last is not None and self.retention is not None:
            raise ValueError("keep_last and retention exclude each other: keep_last=N is Retention(newest=N).")
        newest = self.keep_last if self.retention is None else self.retention.newest
        if self.async_save and newest == 1:
            rule = "keep_last=1" if self.retention is None else "Retention(newest=1)"
            raise ValueError(
                f"{rule} with async_save=True: keep at least 2, since the newest may still be on its way to disk."
            )
        self._check_tiers()
        if self.staging == "lazy" and not self.async_save:
            raise ValueError(
                "staging='lazy' needs async_save=True: a save that waits for the disk makes no copy, so it would "
                "gain nothing. Pass async_save=True, or leave out staging."
            )

    def _check_tiers(self) -> None:
        if self.local_keep < 1 or self.replicas < 0:
            raise ValueError(
                f"local_keep must be at least 1 and replicas at least 0, got {self.local_keep} and {self.replicas}."
            )
        if self.durable_every is not None and self.durable_every < 1:
            raise ValueError(
                f"durable_every must be at least 1, or None for never, got {self.durable_every}: it counts saves."
            )
        if self.drain_bandwidth is not None and not self.drain_bandwidth > 0:
            raise ValueError(f"drain_bandwidth must be positive bytes per second or None, got {self.drain_bandwidth}.")
        if not self.keeper_linger >= 0:
            raise ValueError(f"keeper_linger must be 0 or more seconds, got {self.keeper_linger}.")
        if self.local_dir is None and (self.replicas or self.durable_every != 1):
            raise ValueError("replicas and durable_every apply to the checkpoints in local_dir: set local_dir, too.")

    @property
    def has_keeper(self) -> bool:
        """True if a keeper writes the saves."""
        return self.writer == "process" or self.has_local_tier

    @property
    def has_local_tier(self) -> bool:
        """True if a save is first complete in ``local_dir`` of the nodes. Some saves are never copied to their
        paths."""
        return self.local_dir is not None

    def policy(self) -> Retention | None:
        """Return the rules for the checkpoints that stay after a save; None if all do."""
        if self.keep_last is None:
            return self.retention
        from dcp_plugin.retention import Retention  # few configurations need it

        return Retention(newest=int(self.keep_last))

    def without_local_tier(self) -> CheckpointConfig:
        """Return this configuration with saves directly to their paths, for a rank that saves alone."""
        return replace(self, local_dir=None, replicas=0, durable_every=1)

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
        return cls.merge(None, **{**_PRESETS[name], **overrides})

    @classmethod
    def merge(
        cls, config: CheckpointConfig | None, besides: tuple[str, ...] = (), /, **overrides: Any
    ) -> CheckpointConfig:
        """Return ``config``, or the defaults, with the fields in ``overrides`` replaced.

        The override ``async_save=False`` also resets ``staging``.

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
            >>> dcp_plugin.CheckpointConfig.merge(base, io_threads=4).keep_last
            3
        """
        cls.refuse_unknown(overrides, ("config", *besides))
        if config is not None and not isinstance(config, cls):
            raise TypeError(
                f"config must be a CheckpointConfig, not a {type(config).__name__}. Pass a dict of settings as "
                f"keyword arguments."
            )
        if overrides.get("async_save") is False:
            overrides = {"staging": "blocking", **overrides}
        return replace(config or cls(), **overrides)

    @classmethod
    def refuse_unknown(cls, names: Iterable[str], besides: tuple[str, ...] = ()) -> None:
        """Refuse names that are not fields.

        Raises:
            TypeError: A name is not a field. The message suggests the nearest field.
        """
        settings = [*besides, *(item.name for item in fields(cls))]
        near = {name: difflib.get_close_matches(name, settings, n=1) for name in names if name not in settings}
        if unknown := [
            f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name) for name, close in near.items()
        ]:
            raise TypeError(f"unknown setting {', '.join(unknown)}. The settings are {', '.join(settings)}.")

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the fields that determine where ranks wait for each other, and so must be equal on all ranks."""
        names = ("async_save", "when_busy", "read_broadcast", "trainable_only", "exclude", "has_keeper", "replicas")
        return {name: getattr(self, name) for name in (*names, "save_interval")}

    def that_waits(self, integration: str) -> CheckpointConfig:
        """Return this configuration, for an integration that deletes and records checkpoints after each save.

        Args:
            integration: Name of the integration, for the message.

        Raises:
            ValueError: ``when_busy`` skips or queues saves.
        """
        if self.when_busy != "wait":
            raise ValueError(
                f"when_busy={self.when_busy!r} is for the plain API and Fabric. Here {integration} decides after each "
                f"save which checkpoints to delete, and would take a skipped save for the newest checkpoint."
            )
        return self


def fields_in_signature(init: F) -> F:
    """Replace ``**overrides`` in the signature of ``init`` by the fields, for tools such as jsonargparse
    (LightningCLI).

    The parameter ``config`` is left out. These tools pass every default explicitly, which would override the fields of
    a ``config``.
    """
    from dcp_plugin.retention import Retention  # as in policy()

    hints = get_type_hints(CheckpointConfig, localns={"Retention": Retention})
    parameters = signature(init, eval_str=True).parameters.values()
    own = [item for item in parameters if item.name != "config" and item.kind != item.VAR_KEYWORD]
    added = [
        Parameter(item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for item in fields(CheckpointConfig)
    ]
    init.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]
    return init


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_keys(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(key, str) for key in value)


_CHOICES: dict[str, tuple[object, ...]] = {
    "staging": ("blocking", "lazy"),
    "writer": ("thread", "process"),
    "when_busy": ("wait", "skip", "queue"),
    **dict.fromkeys(("direct_io", "read_broadcast", "progress", "stock_aliases"), (True, False, "auto")),
}

_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: value in (True, False)),
    "int": ("a whole number", _is_int),
    "int | None": ("a whole number or None", lambda value: value is None or _is_int(value)),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda value: value is None or _is_number(value)),
    "float | Literal['auto'] | None": (
        "a number of seconds, 'auto' or None",
        lambda value: value in ("auto", None) or _is_number(value),
    ),
    "Mapping[str, Any] | None": (
        "a mapping or None",
        lambda value: value is None or isinstance(value, (Mapping, StoreOptions)),
    ),
    "str | None": ("a path or None", lambda value: value is None or isinstance(value, (str, os.PathLike))),
    "tuple[str, ...]": ("a sequence of keys", _are_keys),
    "Retention | None": ("a Retention or None", lambda value: value is None or hasattr(value, "select")),
}
"""Description and check of a field's value, by the field's annotation. Choices are in :data:`_CHOICES`."""
