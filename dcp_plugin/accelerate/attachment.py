"""``attach(accelerator)``: the methods ``save_state`` and ``load_state`` call the core, on all ranks.

Accelerate has no public hook for this: its own hooks cannot replace the optimizer, or a model under FSDP. The instance
therefore gets a subclass of its class that replaces these methods; a script needs no change. ``model`` and ``optim``
are the prepared models and optimizers, with numbers if there are several. :mod:`dcp_plugin.accelerate.extra_state` has
all other state.

Users' hooks run as in stock Accelerate, and what they leave in their lists is saved and loaded. Save hooks run before
models are saved (under FSDP stock runs them after), load hooks before models are loaded, under FSDP after. Hooks get
the directory in which the checkpoint is being made, and their files are published with it. With a URL each rank has a
local directory of its own instead: the files of its save hooks are uploaded, and load hooks find all files in it.
"""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex, cast

from accelerate import Accelerator
from torch import nn

from dcp_plugin.accelerate import _accelerate, extra_state, stock_format
from dcp_plugin.accelerate._accelerate import refuse_silent_fallbacks
from dcp_plugin.accelerate.attendance import Attendance
from dcp_plugin.accelerate.dataloader_state import Tracker, untracked_sampler
from dcp_plugin.accelerate.extra_state import Training
from dcp_plugin.accelerate.stock_format import Project
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.config import CheckpointConfig, has_local_tier
from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, logger
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, Where, as_local, as_path, is_link, on_file_system, resolved, text_of
from dcp_plugin.core.ranks.collectives import Attempt
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.runs.foreign import ACCELERATE
from dcp_plugin.core.sources import SourceFiles, source_of
from dcp_plugin.core.state.random_streams import capture, restore
from dcp_plugin.core.types import public_class
from dcp_plugin.integration import (
    EXTRA,
    BaseAttachment,
    FrameworkCheckpointer,
    keys_by_name,
    local_copy,
    names_for,
    names_in,
    that_waits,
)
from dcp_plugin.start import Start, StartOptions, begin_check, watching

_ATTRIBUTE = "dcp_plugin_attachment"
_STEP = re.compile(r"(?:.*[-_.])?(?:global_?)?step[-_=]?(\d+)|checkpoint-(\d+)", re.IGNORECASE)
"""The training step in the name of a directory: step_500, step-500, global_step500, epoch_1_step_500, or checkpoint-500
of transformers. Accelerate records no step; the automatic checkpoint_0, checkpoint_1 count saves."""
_REPLACED = ("save_state", "load_state", "prepare_data_loader", "skip_first_batches", "end_training")


def attach(
    accelerator: Accelerator,
    config: CheckpointConfig | None = None,
    *,
    verify_resume: Literal["auto", "error", False] = "auto",
    expect_changed: Sequence[str] = (),
    **overrides: Any,
) -> Attachment:
    """Make ``accelerator.save_state`` and ``accelerator.load_state`` sharded, atomic and, on request, asynchronous.

    Call this function before the training loop, before or after ``prepare``. A second call with the same settings, or
    without settings, returns the same attachment.

    Args:
        accelerator: Object whose methods are replaced, until :meth:`Attachment.detach`.
        config: Settings of saves and loads; the defaults if omitted.
        verify_resume: Compare the live state with the loaded one at the end of ``load_state``, see
            :func:`dcp_plugin.resume_or_init`.
        expect_changed: Globs of keys that load hooks change on purpose.
        overrides: Fields of :class:`~dcp_plugin.CheckpointConfig`, such as ``async_save=True``.

    Returns:
        An object that waits for saves, has the report of the last load, and undoes the attachment.

    Raises:
        CheckpointError: Accelerate trains in another way than the user asked for, or in an unsupported way.
        ValueError: The accelerator is attached with other settings, or a tracker would write its files to a URL.

    Example:
        >>> from accelerate import Accelerator
        >>> from dcp_plugin.accelerate import attach
        >>> accelerator = Accelerator(cpu=True)
        >>> with attach(accelerator, async_save=True) as checkpoints:
        ...     path = accelerator.save_state("run/step-1")
        ...     checkpoints.wait()  # from here on it is there
    """
    wanted = CheckpointConfig.merge(config, ("verify_resume", "expect_changed"), **overrides)
    attachment: Attachment | None = vars(accelerator).get(_ATTRIBUTE)
    if attachment is None:
        attachment = Attachment(accelerator, wanted)
        accelerator.__class__ = _attached_class(type(accelerator))  # type: ignore[arg-type]  # Accelerate has no types
        vars(accelerator)[_ATTRIBUTE] = attachment
    elif attachment.config != wanted and (config is not None or overrides):
        raise ValueError(f"{attachment.config} is attached already: detach() first to attach {wanted}.")
    if (verify_resume, expect_changed) != ("auto", ()):  # a second call without them keeps those of the first
        attachment.check_options = verify_resume, expect_changed
    return attachment


@functools.cache
def _attached_class(kind: type[Accelerator]) -> type[Accelerator]:
    """Make the subclass of ``kind`` whose methods in ``_REPLACED`` are those of :class:`Attachment`.

    Methods on the instance would refer to it, and the cycle would keep its models in memory until the collector runs.
    """

    def replaced(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def method(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
            return getattr(vars(self)[_ATTRIBUTE], name)(*args, **kwargs)

        return method

    def pickled(self: Accelerator, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle or copy the accelerator as one that is not attached."""
        return object.__new__, (kind,), {name: value for name, value in vars(self).items() if name != _ATTRIBUTE}

    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    names["__reduce_ex__"] = pickled
    return type(kind.__name__, (kind,), {**names, **{name: replaced(name) for name in _REPLACED}})


@public_class("dcp_plugin.accelerate")
class Attachment(BaseAttachment):
    """Saves and loads of one accelerator, until :meth:`detach`. The end of its ``with`` block detaches.

    The accelerator refers to this object, which refers to the accelerator weakly. An accelerator without other
    references is therefore freed at once, with its models and optimizers.
    """

    def __init__(self, accelerator: Accelerator, config: CheckpointConfig) -> None:
        refuse_silent_fallbacks(accelerator)
        _refuse_trackers_at_url(accelerator)
        Project.of(accelerator, config.storage_options)  # raises for a project_dir that is no path
        super().__init__(that_waits(config, "the rotation of checkpoints"))
        self._reference = weakref.ref(accelerator)
        self._alone = FrameworkCheckpointer(config, solo=True, keeper=None if has_local_tier(config) else config.keeper)
        """Saves of rank 0 without the other ranks, directly to their paths: in a local tier, other nodes would have no
        part of the checkpoint."""
        Internals(self._alone).share_timing(self.checkpointer)
        is_durable = config.keeper is None or config.keeper.durable_every is not None
        may_be_alone = accelerator.num_processes > 1 and is_durable
        self._attendance = Attendance(accelerator, config.timeout) if may_be_alone else None
        self._has_announced = False
        self._track()

    @property
    def _accelerator(self) -> Accelerator:
        accelerator = self._reference()
        if accelerator is None:
            raise CheckpointError("The attached Accelerator no longer exists: keep it as long as you save and load.")
        return accelerator

    @property
    def world_size(self) -> int:
        return int(self._accelerator.num_processes)

    # Methods in place of the accelerator's

    def save_state(
        self,
        output_dir: PathLike | None = None,
        safe_serialization: bool = True,
        metrics: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Save in place of ``Accelerator.save_state``. Return the checkpoint's directory, which exists when the save is
        complete; of a checkpoint at a URL, the URL.

        Every rank calls this method. If each rank has the complete model, rank 0 may call it alone: rank 0 first waits
        for the others, and then saves without them (:mod:`dcp_plugin.accelerate.attendance`).

        Args:
            metrics: Numbers by name, or tensors of one element, that are recorded in the checkpoint, see
                :meth:`dcp_plugin.Checkpointer.save`.

        Raises:
            SaveFailed: This save, or an earlier save in the background, failed; raised on every calling rank.
        """
        self.internals.wait_until_kept()
        accelerator = self._accelerator
        earlier = Attempt.of(self._alone.wait)
        project = self._project()
        training = Training.of(accelerator)
        attendance = self._attendance
        path = self._given(output_dir) if project is None else project.current_path
        path = resolved(path) if project is None and is_link(path) else path
        # A rank that has saved alone has counted more automatic names, so all ranks compare the project's directory.
        folder = path if project is None else project.root
        alone = attendance is not None and training.is_replicated and attendance.rank_0_saves_alone(folder)
        if alone and not accelerator.is_main_process:
            accelerator.project_configuration.iteration += 1
            return _returned(path, project, output_dir)
        if project is not None:
            next_path = functools.partial(project.next_path, source_of(self.config))
            path = next_path() if alone else self._decide(next_path)
        internals = Internals(self._alone) if alone else self.internals
        self._announce_background_save(path)
        accelerator_step = self._accelerator_step()
        state: dict[str, Any] = dict(training.optimizers)
        # Stock Accelerate reads directories only, and does not recognise a copy of a checkpoint in a store.
        for_stock = bool(self.config.stock_aliases) and training.sharded and on_file_system(path) is not None

        def before(directory: Path) -> None:
            if attendance is not None and not alone:
                attendance.all_have_come()
            earlier.get()  # raises an earlier failure here, so that all ranks raise it
            state.update(extra_state.run_save_hooks(accelerator, training, directory) | training.shared_names)
            if for_stock:
                stock_format.write_small_files(accelerator, directory, training.registered, accelerator_step)
            # The state is gathered after the hooks, which may draw random numbers.
            loaders, with_rng = self._track(), self.config.rng
            state.update(extra_state.gather(accelerator, loaders, training.registered, accelerator_step, with_rng))

        views = stock_format.views(training.models, training.optimizers) if for_stock else None
        named = _STEP.fullmatch(path.name)
        step = int(named[1] or named[2]) if named else None
        handle = internals.save(state, path, step, files=before, views=views, metrics=metrics)
        if project is not None and accelerator.is_main_process:
            delete = self.checkpointer.remove
            handle.on_published(lambda event: project.rotate(event, delete))
        accelerator.project_configuration.iteration += 1
        return _returned(path, project, output_dir)

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        map_location: str | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load in place of ``Accelerator.load_state``, by default the newest committed checkpoint of the project.

        ``strict=False`` loads all matching keys. ``map_location`` and ``load_kwargs`` are for Accelerate's own files,
        which are read completely and then copied to the device. From our checkpoints every rank reads directly into
        the objects.

        Raises:
            TypeError: The ``map_location`` is unknown, or a keyword argument is.
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch: The checkpoint cannot be
                loaded; raised on every rank.
        """
        self.internals.wait_until_kept()
        self.internals.ranks.from_zero("finish the saves of rank 0 alone", self._alone.wait)
        project = self._project()
        if project is not None:
            project = project.with_local(self.internals.surviving(project.root))
        path = self._decide(project.newest) if project is not None and input_dir is None else self._given(input_dir)
        with self.internals.shown(path) as files:
            self._load_from(path, files, load_kwargs, strict, map_location, load_model_func_kwargs)
        if project is not None:
            project.continue_numbering()

    def _load_from(
        self,
        path: Where,
        files: SourceFiles | None,
        load_kwargs: dict[str, Any] | None,
        strict: bool,
        map_location: str | None,
        others: Collection[str],
    ) -> None:
        """Load a checkpoint of this package or of stock Accelerate, with the hooks around it.

        Args:
            others: The names of other arguments, which are for models that Accelerate itself shards.
        """
        accelerator = self._accelerator
        if map_location not in (None, "cpu", "on_device"):
            raise TypeError(f"map_location={map_location!r}: Accelerate has 'cpu', 'on_device' and None.")
        training = Training.of(accelerator)
        if others and not training.sharded:
            raise TypeError(f"load_state has no argument {min(others)!r}: strict and map_location are for the models.")
        ranks = self.internals.ranks
        is_stock = ranks.from_zero(f"look at {path}", lambda: files is None and stock_format.is_stock(path))
        # The keys are read before the hooks, which may take an incomplete checkpoint for the name of a model on a hub.
        extra_keys = [] if is_stock else ranks.agree(f"open {path}", lambda: _extra_keys(path, files, training, strict))
        if is_stock or any(key.startswith("accelerate.") for key in extra_keys):
            extra_state.refuse_other_registered(
                ranks, path, lambda: names_in(path) if is_stock else extra_keys, training.registered
            )
        models = training.models if training.sharded else self._run_load_hooks(training, path, files)
        check = None if is_stock else begin_check(*self.check_options)
        if is_stock:
            self.last_load = None
            remaining = replace(training, models=models)
            accelerator.step = stock_format.load(
                accelerator, self.internals, path, remaining, strict, map_location, load_kwargs
            )
        else:
            self._restore(path, training, models, extra_keys, strict, check)
        if training.sharded:
            streams = capture(accelerator.device)  # stock restores them after the hooks
            left = self._run_load_hooks(training, path, files)
            restore(streams, accelerator.device)
            if not is_stock and (added := {name: left[name] for name in left if name not in training.models}):
                # Without a rename, a single module would be filled from the single module of the checkpoint.
                under_own_names = PartialLoad(rename={f"{name}.": f"{name}." for name in added})
                self.internals.restore(added, path, under_own_names, strict=strict)
        if check is not None and self.last_load is not None:
            if training.sharded:  # hooks have run since
                check.compare({**training.models, **training.shared_names, **training.optimizers}, ranks)
            self.last_load = check.finish(ranks, self.last_load)

    def resume_or_init(
        self,
        root: PathLike | None = None,
        *,
        resume: str | PathLike = "auto",
        init_from: PathLike | None = None,
        partial: PartialLoad | None = None,
        strict: bool = True,
    ) -> Start:
        """Load the run's own newest checkpoint; without any, load the models' weights from ``init_from``. Collective.

        Call this method after ``prepare``, which gives the accelerator its models.

        Args:
            root: Directory of this run's checkpoints; if omitted, the project's directory of automatic naming.
            resume, init_from, partial, strict: See :func:`dcp_plugin.resume_or_init`; the weights are the models'.

        Returns:
            The start of the run, see :func:`dcp_plugin.resume_or_init`.

        Raises:
            CheckpointError: No model is prepared; see also :func:`dcp_plugin.resume_or_init`.
            ValueError: See :func:`dcp_plugin.resume_or_init`.
        """
        models = Training.of(self._accelerator).models
        if not models:
            raise CheckpointError(
                "no model is prepared yet, so none would be loaded: call resume_or_init after accelerator.prepare(…)."
            )
        self.wait()
        options = StartOptions(resume, init_from, partial, strict, self.config.storage_options)
        project = self._project() if root is None else None
        folder = self._given(root) if project is None else project.root
        options = options.with_local(self.checkpointer, folder)
        if project is not None:
            project = project.with_local(options.local)

        def find(damaged: Collection[Where]) -> Where | None:
            if project is not None and resume in ("auto", "must"):
                must = resume == "must"
                return project.newest(must, damaged) if must or project.paths() else None
            return options.find(folder, (ACCELERATE,), damaged)

        def load(path: Where) -> LoadReport | None:
            self.load_state(path, strict=strict)
            return self.last_load

        return options.start(self.checkpointer, models, find, load)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        with untracked_sampler(data_loader):
            prepared = self._original("prepare_data_loader")(data_loader, *args, **kwargs)
        self._track()
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        skipping = self._original("skip_first_batches")(dataloader, num_batches)
        for tracker in self._track():
            if tracker.loader is dataloader:
                tracker.follow(skipping, num_batches)
        return skipping

    def end_training(self) -> None:
        """Finish the save in flight before Accelerate destroys the process group."""
        self.close()
        self._original("end_training")()

    # Methods for scripts

    def wait(self) -> None:
        super().wait()
        self._alone.wait()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._alone.close()

    def detach(self) -> None:
        """Restore the accelerator's own methods, and wait for the save in flight.

        Raises:
            SaveFailed: A save failed, as in :meth:`wait`.
        """
        accelerator = self._reference()
        if accelerator is not None and vars(accelerator).get(_ATTRIBUTE) is self:
            del vars(accelerator)[_ATTRIBUTE]
            accelerator.__class__ = type(accelerator).__base__
            for tracker in self._track():
                tracker.untrack()
            if self._attendance is not None:
                self._attendance.close()
        self.close()

    # Save

    def _announce_background_save(self, path: Where) -> None:
        """Log once that the directory of an asynchronous save does not exist until the save is complete."""
        if self.config.async_save and not self._has_announced and self._accelerator.is_main_process:
            self._has_announced = True
            logger.info(
                "%s does not exist until its save is complete. Before the script writes files of its own into it: "
                "checkpoints.wait(), or os.makedirs(path, exist_ok=True), and the files stay.",
                path,
            )

    def _accelerator_step(self) -> int:
        """Return Accelerate's count of batches at the last optimizer step, since no checkpoint has gradients."""
        accelerator = self._accelerator
        step: int = accelerator.step
        within = 0 if accelerator.sync_gradients else step % accelerator.gradient_accumulation_steps
        if within:
            warnings.warn(
                f"this save is in the middle of gradient accumulation, after {within} of "
                f"{accelerator.gradient_accumulation_steps} batches. Gradients are not saved: a resumed training "
                "starts with the first batch of the window. To continue exactly, save if accelerator.sync_gradients.",
                stacklevel=3,
            )
        return step - within

    # Load

    def _run_load_hooks(self, training: Training, path: Where, files: SourceFiles | None) -> dict[str, nn.Module]:
        """Run the hooks. Return the models that they leave to be loaded, by name."""
        run = functools.partial(extra_state.run_load_hooks, self._accelerator, training, local_copy(path, files=files))
        return self.internals.ranks.agree(f"run the hooks for {path}", run)

    def _restore(
        self,
        path: Where,
        training: Training,
        models: dict[str, nn.Module],
        extra_keys: list[str],
        strict: bool,
        check: Any,
    ) -> None:
        """Load a checkpoint of this package into ``models``, which hooks may have changed, and all other objects."""
        extra, messages = extra_state.to_restore(self._accelerator, self._track(), training.registered, extra_keys)
        names = {**names_for(training.models, models.values()), **training.shared_names}
        state = {**models, **names, **training.optimizers, **extra}
        with watching(check):
            self.last_load = self.internals.restore(state, path, strict=strict)
        if check is not None and any(messages):  # schedules may have been replayed for another number of processes
            check.expected += extra_state.SCHEDULED
        for message in filter(None, messages if self._accelerator.is_main_process else ()):
            logger.warning("%s: %s", path, message)

    def _original(self, name: str) -> Callable[..., Any]:
        """Return the accelerator's own method, which :func:`attach` has replaced."""
        return cast("Callable[..., Any]", getattr(super(type(self._accelerator), self._accelerator), name))

    def _track(self) -> list[Tracker]:
        """Track the loaders that are new. Return the trackers of all loaders, in the order of ``prepare``."""
        return [Tracker.of(loader) for loader in _accelerate.dataloaders(self._accelerator)]

    def _project(self) -> Project | None:
        return Project.of(self._accelerator, self.config.storage_options)

    def _decide(self, choose: Callable[[], Where]) -> Where:
        """Return the path that rank 0 chooses, on all ranks. If rank 0 fails, raise on all ranks."""
        return self._given(self.internals.ranks.from_zero("choose a checkpoint", lambda: str(choose())))

    def _given(self, path: PathLike | None) -> Where:
        if path is None:
            raise ValueError("A directory is needed, or a ProjectConfiguration with automatic_checkpoint_naming.")
        return as_path(path, self.config.storage_options)


def _returned(path: Where, project: Project | None, output_dir: PathLike | None) -> Path | str:
    """Return the path in the form that stock returns: relative if the user's path is. A URL is returned as text."""
    own = path if project is not None or output_dir is None else Path(text_of(output_dir))
    return str(path) if on_file_system(path) is None else Path(own)


def _extra_keys(path: Where, files: SourceFiles | None, training: Training, strict: bool) -> list[str]:
    """Return the keys of the checkpoint's extra state, without the leading ``extra.``.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: The checkpoint cannot be opened.
        CheckpointMismatch: The checkpoint has a model, and no model is prepared yet.
    """
    keys = keys_by_name(path, files)
    if strict and "model" in keys and not training.models:
        raise CheckpointMismatch(
            f"{path} has a model, and the accelerator has none: call load_state after accelerator.prepare(…)."
        )
    return keys.get(EXTRA, [])


def _refuse_trackers_at_url(accelerator: Accelerator) -> None:
    """Refuse a URL as the ``logging_dir``, below which Accelerate makes a directory for trackers."""
    folder = accelerator.logging_dir
    if folder is not None and (trackers := _accelerate.trackers_in_files(accelerator)):
        as_local(
            folder,
            f"the logging_dir of {', '.join(trackers)}",
            "Give a local one: ProjectConfiguration(project_dir=URL, logging_dir=DIRECTORY).",
        )
