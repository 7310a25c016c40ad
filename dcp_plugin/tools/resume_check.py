"""Comparison of the live state with what a resume has loaded, once, before the first step.

A load verifies the bytes that it reads. Code that runs later may lose them: an object whose ``load_state_dict`` ignores
its argument, a hook that initialises weights, a schedule that is stepped once more. A :class:`ResumeCheck` keeps a hash
of every loaded leaf in memory, and compares it with the live objects when the framework has finished its restore.

The rule: only a difference that no correct program makes is reported. So these leaves are not compared:

- Leaves whose class, dtype or distribution has changed since, as by a quantization.
- Leaves that the object's own ``load_state_dict`` transforms. Its result is the reference, unless it took nothing.
- Later than the load: buffers, random streams and positions in the data. They may change without a step.

Large tensors are compared by a sample, on their device. Nothing is added to a save.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.errors import CheckpointMismatch, first_line, logger, some, warn
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.format.values import is_plain
from dcp_plugin.core.loading import on_delivery
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, said_by_ranks
from dcp_plugin.core.records import FittedLoad, LoadReport
from dcp_plugin.core.state.adapters import CalledLast, OptimizerAdapter, PositionAdapter, StateAdapter
from dcp_plugin.core.state.named_objects import RankAndSize, adapters_of, gather_state
from dcp_plugin.core.state.names import contains_fsdp1, parameter_names
from dcp_plugin.core.state.optimizer import flatten_tree
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value
from dcp_plugin.core.tensors._torch_modules import has_own_state_dict, has_post_load_hooks
from dcp_plugin.core.tensors.host_memory import address_of, is_plain_memory, memory_view
from dcp_plugin.core.types import OfEachRank, ShardedValue

NOT_RESTORED, OVERWRITTEN = "not restored", "overwritten after the restore"
REINITIALISED, SHIFTED = "reinitialised after the restore", "stepped once more after the restore"

_PIECE, _PIECES = 4096, 16  # bytes of a piece of a sample, and pieces of a large tensor
_LARGE = _PIECE * _PIECES
_COUNTERS = ("step", "last_epoch", "_step_count")
_ZEROS = {"0", "0.0", "False", "None", "[]", "()", "''"}


class Mark(NamedTuple):
    """What is remembered of a leaf."""

    kind: Any  # class of a value; dtype, shape, boxes and layout of a tensor. Only marks of one kind are compared.
    digest: str | int  # text of a small value; else a hash
    nbytes: int
    hashed: int  # bytes in the digest

    def is_zero(self) -> bool:
        """Return whether the leaf is zero or empty, as after an initialisation."""
        return self.digest in (*_ZEROS, xxh3_64_intdigest(bytes(self.hashed)))


Marks = dict[str, Mark]


@dataclass
class ResumeCheck:
    """Comparison of one resume: what was delivered, and the differences found.

    Args:
        mode: ``"auto"`` warns of a difference; ``"error"`` raises it, on all ranks.
        expected: Globs of keys, or of their last segments, that the program changes on purpose.
    """

    mode: str
    expected: Sequence[str] = ()
    reference: Marks = field(default_factory=dict)  # of leaves that a later comparison may compare
    sizes: dict[str, Mark] = field(default_factory=dict)  # of all leaves
    compared: set[str] = field(default_factory=set)
    differences: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # cause -> keys
    failure: str = ""
    unused: set[str] | None = None  # names in the checkpoint that no load has taken
    report: LoadReport | None = None
    prepare: Callable[[Any], Mapping[str, Any]] = dict  # state of a user -> objects under the names of the checkpoint

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "error"):
            raise ValueError(f'verify_resume is "auto", "error" or False, not {self.mode!r}')
        self.expected = (self.expected,) if isinstance(self.expected, str) else tuple(self.expected)

    @contextmanager
    def watching(self, on_load: Callable[..., Any] | None = None) -> Iterator[None]:
        """Compare what the loads in this block deliver with the objects that take it, or have ``on_load`` do it."""
        global latest
        latest, token = self, on_delivery.set(on_load or self._delivering)
        try:
            yield
        finally:
            on_delivery.reset(token)

    @contextmanager
    def _delivering(
        self, state: Mapping[str, Any], fitted: FittedLoad, ranks: Ranks, reader: CheckpointReader
    ) -> Iterator[Callable[[], None]]:
        delivered: Marks = {}
        before = self._attempt(lambda: _marks_before(fitted))
        with self.watching(lambda *load: nullcontext(lambda: None)):  # an object may load another checkpoint
            yield lambda: delivered.update(
                self._attempt(lambda: marks_of(fitted.targets, reader.checked(fitted.plan.chunks))) or {}
            )
        self._attempt(lambda: self._note(delivered, before or {}, fitted, state, ranks))
        taken = {*fitted.match.stored.values(), *fitted.opened.objects}
        names = {key.partition(".")[0] for key in set(reader.index) - taken} - {"extra"}
        unused = names - {key.partition(".")[0] for key in taken} if names else names
        self.unused = unused if self.unused is None else self.unused & unused  # a resume may load in parts

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``. A failure ends the comparison, but not the resume."""
        attempt = Attempt.of(work)
        if attempt.failure is not None:  # as text: its traceback would keep the objects alive
            self.failure = self.failure or f"{type(attempt.failure).__name__}: {first_line(attempt.failure)}"
        return attempt.value

    def _note(
        self, delivered: Marks, before: Marks, fitted: FittedLoad, state: Mapping[str, Any], ranks: Ranks
    ) -> None:
        """Compare what was delivered with the objects that may have changed it, and refer to the result.

        Other objects have it in their memory now. Reading them would take as long as a part of the load.
        """
        adapters = {each.name: each for each in fitted.opened.adapters if not isinstance(each, PositionAdapter)}
        own_code = {name for name, adapter in adapters.items() if _transforms(adapter, fitted)}
        is_known = all(adapters[name].kind != "stateful" or _is_known(adapters[name]) for name in own_code)
        # A rank may be alone with unknown code: it does not read FSDP1, which would wait for the other ranks.
        names = own_code | {
            name
            for name, each in adapters.items()
            if not is_known and (each.module is None or not contains_fsdp1(each.module))
        }
        live = Live.of(state, ranks, names) if names else Live({}, {}, ())
        others = {name: wanted for name, wanted in fitted.match.wanted.items() if name in names or name not in adapters}
        keys = {name: [join(name, key) for key in wanted.targets] for name, wanted in others.items()}
        in_memory = delivered.keys() - itertools.chain.from_iterable(keys.values())
        self.sizes |= live.marks | delivered
        self.reference |= {key: delivered[key] for key in in_memory} | live.marks
        self.compared |= in_memory
        for name in live.adapters:
            same, differing = _compared(delivered, live.marks, keys[name])
            self.compared.update(same)
            if name not in own_code:
                self._differ(OVERWRITTEN, differing)
            # A value that was equal before the load does not show that the object has taken it.
            elif adapters[name].kind == "stateful" and all(before.get(key) == delivered[key] for key in same):
                self._differ(NOT_RESTORED, differing)

    def _differ(self, cause: str, keys: Sequence[str]) -> None:
        self.differences[cause] += keys
        self.compared.update(keys)
        for key in keys:  # named once
            self.reference.pop(key, None)

    def take(self, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Make the present state the reference where there is none: what hooks of a framework have returned, applied.

        Collective if a module contains FSDP1.
        """
        if (live := self._attempt(lambda: Live.of(state, ranks))) is not None:
            self.sizes = live.marks | self.sizes
            self.reference = live.marks | self.reference

    def compare(self, state: Mapping[str, Any], ranks: Ranks, earlier: Set[str] = frozenset()) -> None:
        """Compare the live objects with the reference. Collective if a module contains FSDP1.

        Args:
            earlier: Leaves that count as compared if they are of those that are compared once, when they are set.
        """
        if (live := self._attempt(lambda: Live.of(state, ranks))) is None:
            return
        # A key below a leaf, or beside others, may be a part of a tensor that has another class now.
        alive = {text for key in live.present for text in (key, key.rpartition(".")[0])}
        known = live.by_name(self.sizes)
        for name, keys in known.items():
            settled = _settled(live.adapters[name], keys)
            keys = [key for key in keys if key in self.reference and key not in settled]
            same, differing = _compared(self.reference, live.marks, keys)
            self.compared.update(same, settled & earlier)
            gone = [key for key in keys if alive.isdisjoint((key, key.rpartition(".")[0]))]
            zeros = {*gone, *(key for key in differing if live.marks[key].is_zero())}
            if live.adapters[name].kind == "module":
                self._differ(OVERWRITTEN, [key for key in differing if key not in zeros])
                self._differ(REINITIALISED, [key for key in keys if key in zeros])
                continue
            is_shifted = any(key.rpartition(".")[2] in _COUNTERS for key in differing)
            self._differ(REINITIALISED if zeros else SHIFTED if is_shifted else OVERWRITTEN, differing + gone)
        self._differ(NOT_RESTORED, [name for name in live.by_name(live.marks) if name not in known])
        if self.differences[SHIFTED]:  # the schedule has set the rates of the optimizer
            rates = [key for key in self.differences[OVERWRITTEN] if key.endswith(".lr")]
            self.differences[OVERWRITTEN] = [key for key in self.differences[OVERWRITTEN] if key not in rates]
            self.differences[SHIFTED] += rates

    def finish(self, ranks: Ranks, report: LoadReport, when: str = "at the end of the load") -> LoadReport:
        """Agree on the result with all ranks, log it on rank 0, and return the report with it. Collective.

        Args:
            when: The moment of the comparison, for the log.

        Raises:
            CheckpointMismatch: The state differs on a rank, and the mode of any rank is ``"error"``; raised on every
                rank.
        """
        of_ranks: list[Any] = ranks.combine(
            f"compare the state with {report.path}", lambda: self._outcome(report), list
        )
        lines, failures = (said_by_ranks([outcome[number] for outcome in of_ranks]) for number in (0, 1))
        compared, delivered, hashed, nbytes, unreported, is_error = map(
            max, zip(*(outcome[2] for outcome in of_ranks), strict=True)
        )
        self.report = replace(report, exact=False if lines else True if compared and not failures else None)
        on_ranks = f" on {len(of_ranks)} ranks" if len(of_ranks) > 1 else ""
        if lines:
            text = (
                f"the resume from {report.path} is NOT exact{on_ranks}, {when}. Find the code that changes these keys "
                "after the load; if it does so on purpose, name them in expect_changed=[GLOB]:\n  " + "\n  ".join(lines)
            )
            if is_error:  # of any rank: a rank that went on alone would wait for the others
                raise CheckpointMismatch(text)
        else:
            share = 100 * hashed / nbytes if nbytes else 100
            counts = f"{compared:,} of {delivered:,} values".replace(",", " ")
            text = f"Resume is exact{on_ranks}: {counts}, {share:.{0 if share >= 1 else 2}f} % of their bytes, {when}"
            if not self.report.exact:
                reason = "; ".join(failures) or "no object of this state can be compared"
                text = f"Resume is not known to be exact{on_ranks}, {when}: {reason}"
        if ranks.rank == 0:
            # The load has reported keys that are missing, or its caller allows them: a second warning says nothing new.
            (warn if unreported else logger.info)(text)
        return self.report

    def compare_before(
        self,
        owner: Any,
        name: str,
        state: Mapping[str, Any],
        ranks: Ranks,
        report: LoadReport,
        note: Callable[[LoadReport], None],
    ) -> Callable[[], None]:
        """Compare and finish when the method ``name`` of ``owner`` is called next, before the method.

        Args:
            note: Gets the final report.

        Returns:
            A function that gives up the comparison, and frees the state.
        """

        def give_up() -> None:
            vars(owner).pop(name, None)

        def method(*args: Any, **kwargs: Any) -> Any:
            give_up()
            self.compare(state, ranks)
            note(self.finish(ranks, report, "before the first step"))
            return getattr(owner, name)(*args, **kwargs)

        vars(owner)[name] = method
        return give_up

    def _outcome(self, report: LoadReport) -> tuple[list[str], list[str], tuple[int, ...]]:
        """Return the differences of this rank as lines, why it could not compare, and its counts: leaves compared and
        delivered, bytes hashed and in the compared leaves, differing keys that the load has not reported, and whether a
        difference is an error."""
        reported = {*report.missing, *report.unexpected}
        differing = {**self.differences, NOT_RESTORED: [*self.differences[NOT_RESTORED], *sorted(reported)]}
        unexpected = {cause: [key for key in keys if not self._is_expected(key)] for cause, keys in differing.items()}
        lines = [f"{cause}: {some(keys)}" for cause, keys in unexpected.items() if keys]
        unreported = sum(key not in reported for keys in unexpected.values() for key in keys)
        marks = [self.sizes[key] for key in self.compared & self.sizes.keys()]
        sizes = sum(mark.hashed for mark in marks), sum(mark.nbytes for mark in marks)
        unused = f"no object of the state takes {some(sorted(self.unused))} of the checkpoint" if self.unused else ""
        counts = len(self.compared), len(self.sizes), *sizes, unreported, self.mode == "error"
        return lines, [*filter(None, (self.failure, unused))], counts

    def _is_expected(self, key: str) -> bool:
        return any(fnmatchcase(text, glob) for glob in self.expected for text in (key, key.rpartition(".")[2]))


@dataclass
class Live:
    """The live objects of a state, read as for a save. Loaders of torchdata are not read: that makes an iterator."""

    adapters: dict[str, StateAdapter]
    marks: Marks
    present: Collection[str]  # keys of all leaves, also of those without a mark

    @classmethod
    def of(cls, state: Mapping[str, Any], ranks: Ranks, names: Container[str] | None = None) -> Live:
        """Read the objects, or those with these names. Collective if a module contains FSDP1."""
        every = adapters_of(state, stock_aliases=False, this_rank=RankAndSize(ranks.rank, ranks.size))
        readable = [a for a in every if not isinstance(a, PositionAdapter) and (names is None or a.name in names)]
        leaves, _ = gather_state(readable)
        return cls({adapter.name: adapter for adapter in readable}, marks_of(leaves), leaves.keys())

    def by_name(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """Return the keys of each object that was read here."""
        grouped: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            name = key
            while name and name not in self.adapters:
                name = name.rpartition(".")[0]
            if name:
                grouped[name].append(key)
        return grouped


def _settled(adapter: StateAdapter, keys: Sequence[str]) -> set[str]:
    """Return the keys that may change without a step. A forward pass changes buffers, as that of an evaluation."""
    if isinstance(adapter.live, (CalledLast, OfEachRank)):
        return {*keys}
    if adapter.kind != "module" or adapter.module is None:
        return set()
    parameters = {join(adapter.name, fqn) for names in parameter_names(adapter.module).values() for fqn in names}
    buffers = {fqn.rpartition(".")[2] for fqn, _ in adapter.module.named_buffers()}
    return {key for key in keys if key.rpartition(".")[2] in buffers and key not in parameters}


def _marks_before(fitted: FittedLoad) -> Marks:
    """Return the marks of what ``Stateful`` objects have before the load."""
    contents = {each.name: getattr(each, "replaced", {}) for each in fitted.opened.adapters if each.kind == "stateful"}
    leaves = ((name, flatten_tree(content)[0]) for name, content in contents.items())
    return marks_of({join(name, key): value for name, values in leaves for key, value in values.items()})


def _transforms(adapter: StateAdapter, fitted: FittedLoad) -> bool:
    """Return whether an object's own code takes the loaded state, and may change it."""
    if isinstance(adapter, OptimizerAdapter):
        return has_own_state_dict(adapter.optimizer)
    if adapter.kind == "module" and adapter.module is not None:
        has_hooks = any(map(has_post_load_hooks, adapter.module.modules()))
        return has_hooks or any(key.startswith(f"{adapter.name}.") for key in fitted.match.deferred)
    return adapter.kind == "stateful"


def _is_known(adapter: StateAdapter) -> bool:
    """Return whether the code of a ``Stateful`` object is known to change no other object: that of torch, and ours."""
    return str(adapter.live.load_state_dict.__module__).startswith(("torch.", "dcp_plugin.", "functools"))


def _compared(then: Marks, now: Marks, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the keys whose marks are equal, and those whose marks differ. Marks of two kinds are neither."""
    pairs = [key for key in keys if key in then and key in now and then[key].kind == now[key].kind]
    same = [key for key in pairs if then[key].digest == now[key].digest]
    return same, [key for key in pairs if then[key].digest != now[key].digest]


def marks_of(leaves: Mapping[str, Any], checked: Mapping[int, int] | None = None) -> Marks:
    """Return the marks of tensors and plain values. Other leaves have none, nor have tensors without memory.

    Args:
        checked: Known hashes of tensors by their ``id``, see
            :meth:`~dcp_plugin.core.storage.reader.CheckpointReader.checked`.
    """
    marks: Marks = {}
    for key, leaf in leaves.items():
        value = Attempt.of(functools.partial(sharded_value, leaf)).value if is_tensor(leaf) else leaf
        if isinstance(value, ShardedValue) and not value.stored_whole:
            marks[key] = _mark_of_tensor(value, checked or {})
        elif is_plain(leaf):
            text = repr(leaf)
            digest = text if len(text) <= 64 else xxh3_64_intdigest(text.encode())
            marks[key] = Mark(type(leaf), digest, len(text), len(text))
    return marks


def _mark_of_tensor(value: ShardedValue, checked: Mapping[int, int]) -> Mark:
    chunks = value.chunks
    # A state may have thousands of small tensors. The load has just hashed the bytes of most of them. For others, a
    # view that keeps its tensor alive takes six times as long as the hash. Here ``value`` keeps the tensor alive.
    if len(chunks) == 1 and (nbytes := chunks[0].tensor.nbytes) <= _LARGE:
        digest = checked.get(id(chunks[0].tensor))
        if digest is None and is_plain_memory(chunks[0].tensor):
            digest = xxh3_64_intdigest((ctypes.c_ubyte * nbytes).from_address(address_of(chunks[0].tensor)))
        if digest is not None:
            return Mark((value.dtype, value.shape, (*chunks[0][:2], True)), digest, nbytes, nbytes)
    layouts = [(*chunk[:2], chunk.tensor.is_contiguous() or chunk.tensor.stride()) for chunk in chunks]
    sample = b"".join([_sample(chunk.tensor) for chunk in chunks])
    return Mark(
        (value.dtype, value.shape, *layouts),
        xxh3_64_intdigest(sample),
        sum([chunk.tensor.nbytes for chunk in chunks]),
        len(sample),
    )


def _sample(tensor: torch.Tensor) -> bytes | memoryview:
    """Return the bytes of a tensor, or pieces of a large tensor. Only the pieces leave a device: they are the same
    before and after a move to a device."""
    step = (tensor.nbytes - _PIECE) // (_PIECES - 1) if tensor.nbytes > _LARGE else 0
    if not is_plain_memory(tensor):  # dense memory in another order is read as it is
        tensor = tensor.detach().resolve_conj().resolve_neg()
        order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
        tensor = tensor.permute(order).contiguous()
        if step:
            data = tensor.view(-1).view(torch.uint8)
            tensor = data.as_strided((_PIECES, _PIECE), (step, 1), data.storage_offset()).contiguous()
        return memory_view(tensor.cpu())
    memory = memory_view(tensor)
    return b"".join([memory[at * step : at * step + _PIECE] for at in range(_PIECES)]) if step else memory


latest: ResumeCheck | None = None
"""The check of the last resume of this process, for :func:`verify_resume`. It has hashes, and no object."""


def verify_resume(
    state: Mapping[str, Any], *, expect_changed: Sequence[str] = (), on_difference: Literal["auto", "error"] = "auto"
) -> LoadReport | None:
    """Compare ``state`` with what the last resume of this process has loaded. Collective.

    Call this function before the loop, after everything that prepares the training. A resume compares at its own end.

    Args:
        state: The state of the resume, with the objects that the loop will use.
        expect_changed: Globs of keys, or of their last segments, that the program changes on purpose, such as ``"lr"``.
        on_difference: ``"auto"`` warns, ``"error"`` raises.

    Returns:
        The report of the resume. Its ``exact`` is True, False, or None if nothing could be compared. None if this
        process has resumed nothing, or with ``verify_resume=False``.

    Raises:
        CheckpointMismatch: With ``"error"``, the state differs on a rank; raised on every rank. The message names keys
            and causes.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"model": torch.nn.Linear(2, 2)}
        >>> dcp_plugin.save(state, "run/step-1")
        >>> _ = dcp_plugin.resume_or_init(state, "run")
        >>> dcp_plugin.verify_resume(state).exact
        True
        >>> torch.nn.init.zeros_(state["model"].bias).sum().item()
        0.0
        >>> dcp_plugin.verify_resume(state, expect_changed=["*.bias"]).exact
        True
    """
    if (last := latest) is None or last.report is None:
        return None
    with closing(Checkpointer()) as checkpointer:
        ranks = Internals(checkpointer).ranks
        asked, objects = ranks.agree(
            "begin a comparison", lambda: (ResumeCheck(on_difference, expect_changed), last.prepare(state))
        )
        check = replace(
            last,
            mode=asked.mode,
            expected=[*last.expected, *asked.expected],
            reference=dict(last.reference),
            compared=last.compared - last.reference.keys(),
            differences=defaultdict(list, {cause: [*keys] for cause, keys in last.differences.items()}),
        )
        check.compare(objects, ranks, last.compared)
        return check.finish(ranks, last.report, "before the first step")
