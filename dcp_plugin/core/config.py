"""The configuration of every integration: plain Python, Lightning, Accelerate, Hydra and the command line.

Each field is documented only where it is defined, by the text under its definition; those of groups in ``options.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

from dcp_plugin.core.options import IO, Keeper, Options, refusing_typos
from dcp_plugin.core.paths import StoreOptions, as_local
from dcp_plugin.core.types import public_class

if TYPE_CHECKING:
    from dcp_plugin.core.retention import Retention

F = TypeVar("F", bound=Callable[..., Any])

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
