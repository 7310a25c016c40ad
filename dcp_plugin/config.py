"""The one configuration of every integration: plain Python, Lightning, Accelerate, Hydra and the command line.

A field is documented once, here, as the text under its definition.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_type_hints

from dcp_plugin.paths import StoreOptions, as_local, text_of

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def _refusing_typos(cls: C) -> C:
    """A field that does not exist is refused with the nearest one."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **fields: Any) -> None:
        cls.refuse_unknown(fields)  # type: ignore[attr-defined]
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@_refusing_typos
@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are saved and loaded. Frozen: one may be shared by several integrations.

    Raises:
        ValueError: A value is out of range; the message says which and why.
        TypeError: A value is of another type, as text from YAML or the environment may be; or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(async_save=True, keep_last=3).keep_last
        3
        >>> dcp_plugin.CheckpointConfig(keep_last=0)
        Traceback (most recent call last):
        ValueError: keep_last must be at least 1 or None, got 0: 0 would delete what was just saved.
    """

    async_save: bool = False
    """Return from a save as soon as the state is copied to host memory, and write it in a background thread. The
    host copy is as large as this rank's part of the state and is reused by the next save."""

    staging: Literal["blocking", "lazy"] = "blocking"
    """When a background save copies the state. ``"blocking"``: before ``save`` returns. ``"lazy"``: trained parameters
    and optimizer state are copied while the next forward and backward run, and the optimizer's step waits for the copy;
    everything else (buffers, values, averaged weights) before ``save`` returns. A tensor that changes meanwhile in
    another way than by a ``torch.optim`` step or ``load_state_dict`` fails that save, naming it, and later saves copy
    before they return; call ``handle.wait_staged()`` first. A write through ``.data`` to a few rows of one tensor may
    go unnoticed. Under Lightning the copy is complete before any callback or module hook that may write weights. Needs
    ``async_save``.
    """

    when_busy: Literal["wait", "skip", "queue"] = "wait"
    """What a background save does while the one before is not on disk yet. ``"wait"`` for it. ``"skip"`` this one, with
    a warning, on every rank (``handle.skipped``). ``"queue"``: go on as soon as the state is copied, into a second host
    copy; a third save waits for the first. Lightning, Accelerate and transformers take ``"wait"`` alone, since what
    they delete and note down next depends on the save."""

    writer: Literal["thread", "process"] = "thread"
    """Who writes what a save has staged. ``"thread"``: this process. ``"process"``: a *keeper*, one helper process per
    node, which has the host copies in shared memory: what a save has returned for is published even if the whole
    training is killed right after, and nothing that it does takes the interpreter's lock of the training. Linux only.
    With ``local_dir`` it is always a keeper."""

    local_dir: str | None = None
    """A directory of each node, on a disk of its own or in memory (``/dev/shm/...``), that has the newest checkpoints:
    each node the part of its ranks. A restart reads from there what survives, and the rest from ``path``. None: there
    is no such tier. Ranks of one host with equal ``local_dir`` are one node."""

    local_keep: int = 2
    """How many of the newest checkpoints stay in ``local_dir``. One more has room there while it is written."""

    replicas: int = 0
    """How many other nodes hold a copy of each node's part in their ``local_dir``: so many may be lost with all they
    have."""

    durable_every: int | None = 1
    """Which saves go on from ``local_dir`` to ``path``, in the background: each N-th of the run, counted over restarts.
    ``close`` brings the newest there in any case. ``None``: none, for clusters without any storage that all nodes
    share; then ``path`` is but the name of a checkpoint."""

    drain_bandwidth: float | None = None
    """Bytes per second that each node reads from ``local_dir`` to bring them to ``path``, at most. None: no limit."""

    keeper_linger: float = 600.0
    """Seconds that a keeper waits for a training that has died to come back, before it gives its memory back."""

    finish_on_sigterm: bool = False
    """On SIGTERM (preemption on SLURM or Kubernetes) finish the save in flight, then do what would have been done
    without us; the training goes on meanwhile. For at most ``timeout`` seconds, so that a save that hangs does not keep
    the process alive; the grace period has to be long enough for a save, since SIGKILL ends it. The handler is
    installed by the first save, in the main thread, and given back by ``close``."""

    save_interval: float | Literal["auto"] | None = None
    """Seconds of training between two saves, kept by ``checkpointer.due(step)`` and by the integrations. ``"auto"``:
    the cheapest interval, by what saves cost the training and how often the job has failed so far, which a small file
    beside the checkpoints tells. None: the caller alone decides when to save."""

    events: str | None = None
    """A file to which rank 0 appends one JSON object per save: path, step, bytes, seconds, rates, or the error; and one
    per proposed interval."""

    io_threads: int = 2
    """Threads per rank that write or read files. A rank writes as many data files per checkpoint at most, and more only
    for what is not expected to change."""

    direct_io: bool | Literal["auto"] = "auto"
    """Write data files past the page cache (``O_DIRECT``). ``"auto"``: those above 1/32 of the available memory, where
    the file system takes it, which is found out by trying; smaller ones stay in the page cache, where a restart on the
    same host finds them. ``True``: all, and a file system that refuses is an error."""

    checksum: bool = True
    """Store CRC32 checksums of every item in the index, by blocks, so that parts can be checked too."""

    verify_on_load: bool = True
    """Check every block that a load reads against its checksum. Where only narrow columns of a stored tensor are
    wanted, the blocks that lie partly in them are not: that would mean to read the columns of all other ranks."""

    read_broadcast: bool | Literal["auto"] = "auto"
    """When several ranks want the same bytes, let one of them read them and pass them on to the others. ``"auto"``:
    from an object store, always; from a file system, what at least 8 hosts want, and what 2 to 7 hosts want if the
    first 16 MiB show that it is faster. On one host it is not, however slow the storage: the page cache has what the
    first rank has read."""

    reuse: bool = True
    """Hard-link what has not changed since the last checkpoint of the run instead of writing it again. Each checkpoint
    stays whole: it can be copied, loaded and deleted without the others."""

    trainable_only: bool = False
    """Leave frozen parameters out of checkpoints as long as the *base* has the same: the checkpoint that was loaded
    before training, or the one named in ``base``. A load completes such a checkpoint from its base, which must
    therefore be kept. Buffers, and frozen parameters that have changed, are always saved."""

    base: str | None = None
    """The checkpoint that others build on. For a save with ``trainable_only``: the one that completes what is saved,
    needed only if it was not loaded through the same checkpointer. With ``reuse``: what the first save links from. For
    a load: where the base is, if it was moved."""

    exclude: tuple[str, ...] = ()
    """Keys (globs) that are not saved. One that matches nothing is an error at the first save."""

    rng: bool = True
    """The framework integrations save and restore the random number generators of every rank."""

    keep_last: int | None = None
    """After a save, delete all but the newest N committed checkpoints next to it. ``None`` keeps all."""

    timeout: float = 1800.0
    """Seconds that a rank waits for the others in one step of a save or load before it raises."""

    progress: bool | Literal["auto"] = "auto"
    """Show a progress line on rank 0 for a save that blocks for longer than a second; for one in the background, a
    line of its own every ten seconds, which leaves progress bars as they are. ``"auto"``: when stderr is a
    terminal."""

    stock_aliases: bool | Literal["auto"] = "auto"
    """Give what is stored also the keys under which stock code looks for it: an optimizer's param groups as a list;
    through Lightning's sharded strategies everything, so that Lightning resumes without this package. A few bytes; the
    tensors are shared. What converts a whole directory (``dcp_to_torch_save``) then finds them twice."""

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """How the object store of a URL is reached, as `obstore <https://developmentseed.org/obstore>`_ names it
    (``{"endpoint": …, "region": …, "client_options": {…}}``), beyond what the environment and the machine's role say.
    It is never shown, nor saved; nor is it in a pickle, but for that with which a process is started."""

    allow_pickle: tuple[str, ...] = ()
    """Keys (globs) whose values may be stored with, and loaded by, executing pickled code. Never allow this for a
    checkpoint from somebody else."""

    def __post_init__(self) -> None:
        for name in ("allow_pickle", "exclude"):
            keys: object = getattr(self, name)
            if isinstance(keys, Iterable) and not isinstance(keys, str):
                object.__setattr__(self, name, tuple(keys))
        for one in fields(self):
            wanted, fits = _TYPES.get(str(one.type), ("", lambda value: True))
            value = getattr(self, one.name)
            if not fits(value):
                given = repr(value) if one.repr else f"a {type(value).__name__}"
                raise TypeError(f"{one.name} must be {wanted}, got {given}.")
        self._check_ranges()
        if self.base is not None:
            object.__setattr__(self, "base", text_of(self.base))
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StoreOptions(self.storage_options))
        if self.local_dir is not None:
            local = as_local(self.local_dir, "local_dir", "Give a directory of each node, and the URL as the path.")
            object.__setattr__(self, "local_dir", os.path.abspath(local))
        if self.events is not None:
            local = as_local(self.events, "the file of events", "Give a local file, and copy it when the job ends.")
            object.__setattr__(self, "events", local)

    def _check_ranges(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}.")
        if self.io_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {self.io_threads}: somebody has to write.")
        if not self.timeout > 0:  # nor is NaN
            raise ValueError(f"timeout must be positive, got {self.timeout}: with 0 every save would fail.")
        if isinstance(self.save_interval, (int, float)) and not self.save_interval > 0:
            raise ValueError(f"save_interval must be positive seconds, 'auto' or None, got {self.save_interval}.")
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last must be at least 1 or None, got {self.keep_last}: 0 would delete what was just saved."
            )
        if self.async_save and self.keep_last == 1:
            raise ValueError(
                "keep_last=1 with async_save=True: keep at least 2, since the newest may still be on its way to disk."
            )
        self._check_tiers()
        if self.staging == "lazy" and not self.async_save:
            raise ValueError(
                "staging='lazy' needs async_save=True: a save that waits for the disk would copy nothing, and block as "
                "long as ever. Give async_save=True, or leave staging out."
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
            raise ValueError("replicas and durable_every say what becomes of what is in local_dir: give one.")
        if self.local_dir is not None and not self.checksum:
            raise ValueError("local_dir needs checksum=True: what survives a failure is not believed without.")

    @property
    def has_keeper(self) -> bool:
        """Whether saves are written by a keeper."""
        return self.writer == "process" or self.has_local_tier

    @property
    def has_local_tier(self) -> bool:
        """Whether a save is complete on the nodes before it is at its path, which it may never reach."""
        return self.local_dir is not None

    def without_local_tier(self) -> CheckpointConfig:
        """Return the same with saves that go to their paths at once: for a rank that saves alone."""
        return replace(self, local_dir=None, replicas=0, durable_every=1)

    @classmethod
    def merge(
        cls, config: CheckpointConfig | None, besides: tuple[str, ...] = (), /, **overrides: Any
    ) -> CheckpointConfig:
        """``config`` (or the defaults) with the fields named in ``overrides`` replaced.

        ``async_save=False`` takes back what ``config`` says of staging.

        Args:
            config: The configuration to change; the defaults if None.
            besides: Further names that the caller takes beside the ``overrides``, for the error.

        Returns:
            A new configuration; ``config`` itself is unchanged.

        Raises:
            TypeError: An override is no field, or ``config`` is no configuration.
            ValueError: A value is out of range.

        Example:
            >>> import dcp_plugin
            >>> base = dcp_plugin.CheckpointConfig(keep_last=3)
            >>> dcp_plugin.CheckpointConfig.merge(base, io_threads=4).keep_last
            3
        """
        cls.refuse_unknown(overrides, ("config", *besides))
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config is a CheckpointConfig, not a {type(config).__name__}; a dict of settings: **it.")
        if overrides.get("async_save") is False:
            overrides = {"staging": "blocking", **overrides}
        return replace(config or cls(), **overrides)

    @classmethod
    def refuse_unknown(cls, given: Iterable[str], besides: tuple[str, ...] = ()) -> None:
        """Refuse names that are no field.

        Raises:
            TypeError: One of these is no field. The message names the nearest.
        """
        known = [*besides, *(one.name for one in fields(cls))]
        near = {name: difflib.get_close_matches(name, known, n=1) for name in given if name not in known}
        if unknown := [f"{name!r} (did you mean {one[0]!r}?)" if one else repr(name) for name, one in near.items()]:
            raise TypeError(f"there is no setting {', '.join(unknown)}. The settings are {', '.join(known)}.")

    def of_all_ranks(self) -> dict[str, Any]:
        """The fields that decide where ranks wait for each other: these have to be the same everywhere."""
        names = ("async_save", "when_busy", "read_broadcast", "trainable_only", "exclude", "has_keeper", "replicas")
        return {name: getattr(self, name) for name in (*names, "save_interval")}

    def that_waits(self, who: str) -> CheckpointConfig:
        """This configuration, for an integration in which ``who`` deletes and records checkpoints after each save.

        Raises:
            ValueError: It would skip saves or let them wait in line.
        """
        if self.when_busy != "wait":
            raise ValueError(
                f"when_busy={self.when_busy!r} is for the plain API and Fabric: here {who} decides after each save "
                f"what to delete, and would take a checkpoint that does not exist for the newest one."
            )
        return self


def fields_in_signature(init: F) -> F:
    """For tools that read signatures, such as jsonargparse (LightningCLI): the fields in place of ``**overrides``.

    They pass on every default that they know, which would override the fields of a ``config``: it is left out.
    """
    hints = get_type_hints(CheckpointConfig)
    known = signature(init, eval_str=True).parameters.values()
    own = [one for one in known if one.name != "config" and one.kind != one.VAR_KEYWORD]
    added = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(CheckpointConfig)
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
}
"""What a field must be, by its annotation. Choices are in :data:`_CHOICES`."""
