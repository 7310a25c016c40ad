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

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, first_line, logger, some, warn
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.format.values import is_plain
from dcp_plugin.core.loading import on_delivery
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, said_by_ranks
from dcp_plugin.core.records import FittedLoad, LoadReport
from dcp_plugin.core.state.adapters import CalledLast, OptimizerAdapter, PositionAdapter, StateAdapter
from dcp_plugin.core.state.named_objects import RankAndSize, adapters_of, gather_state
from dcp_plugin.core.state.names import parameter_names
from dcp_plugin.core.state.optimizer import flatten_tree
from dcp_plugin.core.tensors._torch import is_tensor, sharded_value
from dcp_plugin.core.tensors._torch_modules import has_own_state_dict, has_post_load_hooks
from dcp_plugin.core.tensors.host_memory import is_plain_memory, memory_view
from dcp_plugin.core.types import OfEachRank, ShardedValue

VerifyResume = Literal["auto", "error", False]

_PIECE, _PIECES = 4096, 16
"""Bytes of a piece of a sample, and pieces of a tensor that has more bytes than all of them."""
_SAMPLE = _PIECE * _PIECES
_MOST_NAMED = 100
"""Keys of one cause that a rank sends to the others."""
_COUNTERS = ("step", "last_epoch", "_step_count")
"""Last segments of the counters of optimizers and schedules."""

NOT_RESTORED, OVERWRITTEN, REINITIALISED, SHIFTED, CONVERTED = (
    "not restored",
    "overwritten after the restore",
    "reinitialised after the restore",
    "stepped once more after the restore",
    "converted to another dtype by the load",
)


class Mark(NamedTuple):
    """What is remembered of a leaf."""

    kind: Any
    """Class of a value; dtype, shape and boxes of a tensor. Only marks of one kind are compared."""
    digest: Any
    nbytes: int
    hashed: int
    """Bytes in the digest."""
    number: float | None = None
    """The number, if the leaf is one."""


@dataclass
class Outcome:
    """Result of the comparison on one rank."""

    differences: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Cause -> keys."""
    compared: int = 0
    delivered: int = 0
    hashed: int = 0
    nbytes: int = 0
    problem: str = ""
    """The reason why this rank could not compare; empty if it could."""

    def lines(self) -> list[str]:
        return [f"{cause}: {some(keys)}" for cause, keys in self.differences.items() if keys]


class ResumeCheck:
    """Comparison of one resume: what was delivered, and the differences found.

    Args:
        mode: ``"error"`` raises for a difference, on all ranks; ``"auto"`` warns.
        expect_changed: Globs of keys, or of their last segments, that the program changes on purpose.
    """

    def __init__(self, mode: VerifyResume, expect_changed: Sequence[str] = ()) -> None:
        if mode not in ("auto", "error"):
            raise ValueError(f'verify_resume is "auto", "error" or False, not {mode!r}')
        self.mode = mode
        self.expected = (expect_changed,) if isinstance(expect_changed, str) else tuple(expect_changed)
        self.reference: dict[str, Mark] = {}
        self.settled: set[str] = set()
        """Keys in ``reference`` that are compared only when they are set."""
        self.differences: dict[str, list[str]] = defaultdict(list)
        self.compared: set[str] = set()
        self.failure: Exception | None = None
        self.names: dict[str, str] = {}
        """Names in the state of a user -> names in the reference, where they differ."""
        self.report: LoadReport | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the marks of what the loads in this block deliver."""
        token = on_delivery.set(self._delivering)
        try:
            yield
        finally:
            on_delivery.reset(token)

    @contextmanager
    def _delivering(self, state: Mapping[str, Any], fitted: FittedLoad, ranks: Ranks) -> Iterator[Callable[[], None]]:
        """Mark the targets of a load before their objects take them, and compare them with the objects afterwards."""
        delivered: dict[str, Mark] = {}
        before = self._attempt(lambda: _before(fitted))
        yield lambda: delivered.update(self._attempt(lambda: marks_of(fitted.targets)) or {})
        live = self._attempt(lambda: Live.of(state, ranks))
        if live is not None and self.failure is None:
            self._attempt(lambda: self._note(delivered, before, live, fitted))

    def _attempt(self, work: Any) -> Any:
        """Return the result of ``work``. A failure is raised or logged by :meth:`finish`, on all ranks."""
        attempt = Attempt.of(work)
        self.failure = self.failure or attempt.failure
        return attempt.value

    def _note(self, delivered: dict[str, Mark], before: dict[str, Mark], live: Live, fitted: FittedLoad) -> None:
        own_code = {a.name for a in live.adapters if _transforms(a, fitted)}
        for name, keys in live.by_name(delivered).items():
            pairs = {key: (delivered[key], live.marks[key]) for key in keys if _comparable(delivered, live.marks, key)}
            differing = [key for key, (wanted, now) in pairs.items() if wanted.digest != now.digest]
            # Values that were equal before the load prove nothing.
            telling = [key for key in pairs if key not in before or before[key].digest != delivered[key].digest]
            if differing and name in own_code and (name not in live.stateful or set(telling) - set(differing)):
                pairs = {key: pair for key, pair in pairs.items() if key not in differing}
            elif differing:
                cause = NOT_RESTORED if name in own_code else OVERWRITTEN
                self.differences[cause] += differing
            self.compared |= pairs.keys()
        self.differences[CONVERTED] += [key for key in fitted.match.report.cast if _loses_bits(fitted, key)]
        self.reference |= delivered | live.marks
        self.settled |= live.settled

    def take(self, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Make the present state the reference: what hooks of a framework have returned, after it is applied."""
        live = self._attempt(lambda: Live.of(state, ranks))
        if live is not None:
            self.reference |= live.marks
            self.settled |= live.settled

    def expect(self, name: str, state: Mapping[str, Any]) -> None:
        """Add the state of an object to the reference that a framework passes to it after this call."""
        leaves = self._attempt(lambda: {join(name, key): value for key, value in flatten_tree(state)[0].items()})
        self.reference |= self._attempt(lambda: marks_of(leaves)) or {}

    def compare(self, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Compare the live objects with the reference. Collective if a module contains FSDP1."""
        live = self._attempt(lambda: Live.of(state, ranks))
        if live is None:
            return
        known = {key for keys in self.differences.values() for key in keys}
        for name, keys in live.by_name(self.reference).items():
            keys = [key for key in keys if key not in self.settled and key not in known]
            now = live.marks
            gone = [key for key in keys if key not in now and name not in live.unreadable]
            pairs = [key for key in keys if _comparable(self.reference, now, key)]
            differing = [key for key in pairs if self.reference[key].digest != now[key].digest]
            self.compared |= {*pairs, *gone}
            for cause, members in self._causes(name, differing, gone, live).items():
                self.differences[cause] += members
        if self.differences[SHIFTED]:  # the rates that the schedule has set
            for cause in (OVERWRITTEN, REINITIALISED):
                rates = [key for key in self.differences[cause] if key.endswith(".lr")]
                self.differences[cause] = [key for key in self.differences[cause] if key not in rates]
                self.differences[SHIFTED] += rates

    def _causes(self, name: str, differing: list[str], gone: list[str], live: Live) -> dict[str, list[str]]:
        """Return the differences of one object by cause."""
        numbers = {key: (self.reference[key].number, live.marks[key].number) for key in differing}
        shifts = {
            now - then
            for key, (then, now) in numbers.items()
            if key.rpartition(".")[2] in _COUNTERS and then is not None and now is not None
        }
        zeros = [key for key in differing if _is_empty(live.marks[key])]
        if shifts and all(shift > 0 for shift in shifts) and not gone:
            return {SHIFTED: differing}
        if name in live.modules:
            return {REINITIALISED: zeros + gone, OVERWRITTEN: [key for key in differing if key not in zeros]}
        return {REINITIALISED if zeros or gone or shifts else OVERWRITTEN: differing + gone}

    def finish(self, ranks: Ranks, report: LoadReport, when: str) -> LoadReport:
        """Agree on the result with all ranks, log it on rank 0, and return the report with it. Collective.

        Args:
            when: The moment of the comparison, for the log.

        Raises:
            CheckpointMismatch: The state differs on a rank and the mode is ``"error"``; raised on every rank.
        """
        outcomes: list[Outcome] = ranks.combine(f"compare the state with {report.path}", self._outcome(report), list)
        lines = said_by_ranks([outcome.lines() for outcome in outcomes])
        compared = max(outcome.compared for outcome in outcomes)
        exact = False if lines else True if compared else None
        problems = said_by_ranks([[outcome.problem] * bool(outcome.problem) for outcome in outcomes])
        if exact and problems:
            exact = None
        self.report = replace(report, exact=exact)
        on_ranks = f" on {len(outcomes)} ranks" if len(outcomes) > 1 else ""
        if exact is False:
            text = (
                f"the resume from {report.path} is NOT exact{on_ranks}, {when}. Find the code that changes these keys "
                "after the load; if it does so on purpose, name them in expect_changed=[GLOB]:\n  " + "\n  ".join(lines)
            )
            if self.mode == "error":
                raise CheckpointMismatch(text)
            if ranks.rank == 0:
                warn(text)
        elif ranks.rank == 0:
            logger.info("%s", _summary(outcomes, compared, exact, on_ranks, when, problems))
        return self.report

    def at_end_of_load(self, ranks: Ranks, report: LoadReport) -> LoadReport:
        """Finish with what was compared during the load, and keep the reference for :func:`verify_resume`."""
        keep(self)
        return self.finish(ranks, report, "at the end of the load")

    def _outcome(self, report: LoadReport) -> Any:
        def outcome() -> Outcome:
            result = Outcome(compared=len(self.compared), delivered=len(self.reference))
            for key in self.compared & self.reference.keys():
                result.hashed += self.reference[key].hashed
                result.nbytes += self.reference[key].nbytes
            not_loaded = [*report.missing, *report.unexpected]
            for cause, keys in {**self.differences, NOT_RESTORED: self.differences[NOT_RESTORED] + not_loaded}.items():
                result.differences[cause] = [key for key in keys if not self._is_expected(key)][:_MOST_NAMED]
            if self.failure is not None:
                result.problem = f"{type(self.failure).__name__}: {first_line(self.failure)}"
            return result

        return outcome

    def _is_expected(self, key: str) -> bool:
        return any(fnmatchcase(text, glob) for glob in self.expected for text in (key, key.rpartition(".")[2]))


def _summary(
    outcomes: list[Outcome], compared: int, exact: bool | None, on_ranks: str, when: str, problems: list[str]
) -> str:
    if exact is None:
        reason = "; ".join(problems) or "no value of the checkpoint is in an object that can be read again"
        return f"Resume was not compared{on_ranks}, {when}: {reason}"
    hashed, nbytes = sum(o.hashed for o in outcomes), sum(o.nbytes for o in outcomes)
    share = 100 * hashed / nbytes if nbytes else 100
    delivered = max(outcome.delivered for outcome in outcomes)
    counts = f"{compared:,} of {delivered:,} values".replace(",", " ")
    return f"Resume is exact{on_ranks}: {counts}, {share:.{0 if share >= 1 else 2}f} % of their bytes, {when}"


@dataclass
class Live:
    """The live objects of a state, read as for a save."""

    adapters: list[StateAdapter]
    marks: dict[str, Mark]
    settled: set[str]
    """Keys that are compared only when they are set: buffers and random streams."""
    unreadable: set[str]
    """Names of objects whose state is not read here."""

    @classmethod
    def of(cls, state: Mapping[str, Any], ranks: Ranks) -> Live:
        """Read the objects. Collective if a module contains FSDP1."""
        adapters = adapters_of(state, stock_aliases=False, this_rank=RankAndSize(ranks.rank, ranks.size))
        readable = [adapter for adapter in adapters if not isinstance(adapter, PositionAdapter)]
        leaves, _ = gather_state(readable)
        marks = marks_of(leaves)
        settled = set[str]()
        for adapter in readable:
            below = f"{adapter.name}."
            if isinstance(adapter.live, (CalledLast, OfEachRank)):
                settled.update(key for key in marks if key.startswith(below))
            elif adapter.kind == "module" and adapter.module is not None:
                settled.update(_buffers(adapter.name, adapter.module, marks))
        return cls(adapters, marks, settled, {a.name for a in adapters if isinstance(a, PositionAdapter)})

    @property
    def modules(self) -> set[str]:
        return {adapter.name for adapter in self.adapters if adapter.kind == "module"}

    @property
    def stateful(self) -> set[str]:
        return {adapter.name for adapter in self.adapters if adapter.kind == "stateful"}

    def by_name(self, marks: Mapping[str, Mark]) -> dict[str, list[str]]:
        """Return the keys of each object of this state. Keys of other objects are left out."""
        names = {adapter.name for adapter in self.adapters}
        depths = range(max((name.count(".") for name in names), default=0) + 1, 0, -1)
        keys: dict[str, list[str]] = defaultdict(list)
        for key in marks:
            parts = key.split(".", depths[0])
            name = next((above for depth in depths if (above := ".".join(parts[:depth])) in names), None)
            if name is not None:
                keys[name].append(key)
        return keys


def _buffers(name: str, module: nn.Module, marks: Mapping[str, Mark]) -> set[str]:
    """Return the keys of buffers. A forward pass changes them, as an evaluation before the training has."""
    parameters = {join(name, fqn) for names in parameter_names(module).values() for fqn in names}
    buffers = {fqn.rpartition(".")[2] for fqn, _ in module.named_buffers()}
    return {key for key in marks if key.rpartition(".")[2] in buffers and key not in parameters}


def _before(fitted: FittedLoad) -> dict[str, Mark]:
    """Return the marks of what ``Stateful`` objects have before the load."""
    leaves: dict[str, Any] = {}
    for adapter in fitted.opened.adapters:
        if adapter.kind == "stateful":
            replaced, _ = flatten_tree(getattr(adapter, "replaced", {}))
            leaves |= {join(adapter.name, key): value for key, value in replaced.items()}
    return marks_of(leaves)


def _transforms(adapter: StateAdapter, fitted: FittedLoad) -> bool:
    """Return whether an object's own code takes the loaded state, and may change it."""
    if adapter.kind == "stateful":
        return True
    if adapter.kind == "module" and any(key.startswith(f"{adapter.name}.") for key in fitted.match.deferred):
        return True
    if isinstance(adapter, OptimizerAdapter):
        return has_own_state_dict(adapter.optimizer)
    return (
        adapter.kind == "module"
        and adapter.module is not None
        and any(map(has_post_load_hooks, adapter.module.modules()))
    )


def _comparable(first: Mapping[str, Mark], second: Mapping[str, Mark], key: str) -> bool:
    return key in first and key in second and first[key].kind == second[key].kind


def _loses_bits(fitted: FittedLoad, key: str) -> bool:
    target = fitted.targets.get(key)
    return isinstance(target, ShardedValue) and target.dtype.itemsize < 4


def _is_empty(mark: Mark) -> bool:
    """Return whether a leaf is zero, None or empty, as after an initialisation."""
    if isinstance(mark.kind, type):
        return mark.digest in ("0", "0.0", "None", "False", "[]", "()")
    return all(digest in (0, xxh3_64_intdigest(bytes(size))) for digest, size in mark.digest)


def marks_of(leaves: Mapping[str, Any]) -> dict[str, Mark]:
    """Return the marks of tensors and plain values. Other leaves have none.

    Digests of tensors on a device are computed there. One copy per device brings them to the host.
    """
    marks: dict[str, Mark] = {}
    for key, leaf in leaves.items():
        if is_tensor(leaf):
            try:
                leaf = sharded_value(leaf)
            except CheckpointMismatch:  # without memory, as of a lazy module
                continue
        if isinstance(leaf, ShardedValue):
            if not leaf.stored_whole:
                marks[key] = _mark_of_tensor(leaf)
        elif is_plain(leaf):
            text = repr(leaf)
            number = float(leaf) if type(leaf) in (int, float) else None
            digest = text if len(text) < 64 else xxh3_64_intdigest(text.encode())
            marks[key] = Mark(type(leaf), digest, len(text), len(text), number)
    on_device = [d for mark in marks.values() if mark.hashed for d, _ in _pairs(mark) if isinstance(d, torch.Tensor)]
    if on_device:
        numbers = _numbers(on_device)
        for key, mark in marks.items():
            digest = tuple((numbers.get(id(d), d), size) for d, size in _pairs(mark))
            marks[key] = mark._replace(digest=digest) if digest else mark
    return marks


def _pairs(mark: Mark) -> Any:
    return mark.digest if isinstance(mark.digest, tuple) else ()


def _numbers(digests: Sequence[torch.Tensor]) -> dict[int, int]:
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for digest in digests:
        by_device[digest.device].append(digest)
    return {
        id(digest): number
        for group in by_device.values()
        for digest, number in zip(group, torch.stack(group).tolist(), strict=True)
    }


def _mark_of_tensor(value: ShardedValue) -> Mark:
    chunks = [chunk for chunk in value.chunks if chunk.tensor.numel()]
    kind = (value.dtype, value.shape, tuple((chunk.offsets, chunk.sizes) for chunk in chunks))
    digest = tuple(_digest(chunk.tensor) for chunk in chunks)
    nbytes = sum(chunk.tensor.nbytes for chunk in chunks)
    number = None
    if nbytes <= 8 and len(chunks) == 1 and chunks[0].tensor.numel() == 1 and chunks[0].tensor.is_cpu:
        number = float(chunks[0].tensor.item()) if not value.dtype.is_complex else None
    return Mark(kind, digest, nbytes, sum(size for _, size in digest), number)


def _digest(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return a hash of a sample of the tensor's bytes, and the bytes of the sample."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():  # dense memory in another order is read as it is
        order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
        tensor = tensor.permute(order).contiguous()
    if is_plain_memory(tensor):
        memory = memory_view(tensor)
        if len(memory) <= _SAMPLE:
            return xxh3_64_intdigest(memory), len(memory)
        step = (len(memory) - _PIECE) // (_PIECES - 1)
        pieces = b"".join([memory[at * step : at * step + _PIECE] for at in range(_PIECES)])
        return xxh3_64_intdigest(pieces), _SAMPLE
    data = tensor.view(-1).view(torch.uint8)
    if data.numel() > _SAMPLE:
        step = (data.numel() - _PIECE) // (_PIECES - 1)
        data = data.as_strided((_PIECES, _PIECE), (step, 1), data.storage_offset()).reshape(-1)
    # A sum of products with odd factors, modulo 2**64: it is the same in whatever order a device adds.
    factors = torch.arange(data.numel(), dtype=torch.int64, device=data.device) * 0x1E3779B97F4A7C15 | 1
    return (data.to(torch.int64) * factors).sum(), data.numel()


latest: ResumeCheck | None = None
"""The check of the last resume of this process, for :func:`verify_resume`. It has hashes, and no object."""


def keep(check: ResumeCheck) -> None:
    """Keep the check of a resume for :func:`verify_resume`."""
    global latest
    latest = check


def verify_resume(
    state: Mapping[str, Any], *, expect_changed: Sequence[str] = (), on_difference: Literal["auto", "error"] = "auto"
) -> LoadReport:
    """Compare ``state`` with what the last resume of this process has loaded. Collective.

    Call this function before the loop, after everything that prepares the training. A resume compares at its own end.

    Args:
        state: The state of the resume, with the objects that the loop will use.
        expect_changed: Globs of keys, or of their last segments, that the program changes on purpose, such as ``"lr"``.
        on_difference: ``"auto"`` warns, ``"error"`` raises.

    Returns:
        The report of the resume. Its ``exact`` is True, False, or None if nothing could be compared.

    Raises:
        CheckpointMismatch: With ``"error"``, the state differs on a rank; raised on every rank. The message names keys
            and causes.
        CheckpointError: This process has resumed nothing, or with ``verify_resume=False``.

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
    if latest is None or latest.report is None:
        raise CheckpointError(
            "verify_resume compares with the last resume of this process, and there was none: call resume_or_init, "
            "with verify_resume other than False, first."
        )
    check = ResumeCheck(on_difference, [*latest.expected, *_globs(expect_changed)])
    check.reference, check.settled, check.failure = latest.reference, latest.settled, latest.failure
    check.compared, check.differences = {*latest.settled} & latest.compared, defaultdict(list, latest.differences)
    named = {latest.names.get(name, name): value for name, value in state.items()}
    with closing(Checkpointer()) as checkpointer:
        ranks = Internals(checkpointer).ranks
        check.compare(named, ranks)
        return check.finish(ranks, latest.report, "before the first step")


def _globs(globs: Sequence[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)
