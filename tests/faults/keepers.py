"""Faults of trainings whose saves keepers write: processes, hosts, memory, disks, links and stores that fail.

Trainings live on hosts of :mod:`tests.hosts`; a life is :func:`tests.faults.kept.live`. What has to hold: a save whose
call has returned survives the death of the training; a step that a rank was told to be complete locally survives as
many lost hosts as it has copies; what is loaded is what was saved, byte by byte; the training never stops.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dcp_plugin as dcp
from tests import object_server
from tests.faults.campaign import Campaign, Parts
from tests.faults.kept import ALL, Life, live, noted
from tests.host_process import Process
from tests.hosts import Host, Hosts, hosts
from tests.limits import HANG

CALLS = {"": 16_000, "/tiers/": 270}
"""Of functions of ours in five saves, about: of all modules, and of those that hand over to the keeper."""
CALLS_OF_A_KEEPER = 3000
"""Of functions of a keeper's stages in six saves, about."""


@dataclass
class Training:
    """Lives of one training on hosts, and what it was told."""

    hosts: Hosts
    folder: Path
    keeper: dict[str, Any]
    """Options of the keeper that differ from those of :meth:`life`."""
    layout: str = "fsdp2"
    timeout: float = 60.0
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""
    """All three of the life before."""
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    """The folder of checkpoints, if it is in a bucket."""
    told: dict[str, int] = field(default_factory=dict)
    """The newest step of which a rank was told so: ``"returned"``, ``"local"``, ``"durable"``."""
    promised: str = "returned"
    """What of what was told has to be there in the next life."""
    from_durable: bool = False
    """Whether the next life may read from the durable storage."""
    _count: Iterator[int] = field(default_factory=itertools.count)

    @property
    def root(self) -> Path:
        return self.hosts.shared.path / "run"

    def set_clock(self, host: int, hours: float) -> None:
        """Have the processes of a host read a time that is so many hours off."""
        (self.folder / f"{self.hosts[host].name}.clock").write_text(str(3600.0 * hours))

    def life(self, **what: Any) -> Life:
        notes = self.folder / f"life-{next(self._count)}"
        notes.mkdir()
        local = str(self.hosts[0].memory / "local")
        keeper = {"dir": local, "linger": 60.0, **self.keeper, **what.pop("keeper", {})}
        config = {"keeper": keeper, "timeout": self.timeout}
        root = self.url or str(self.root)
        return Life(root, notes, **{"layout": self.layout, "config": config, "in_keeper": self.folder, **what})

    def run(self, life: Life, on: Sequence[int] | None = None, ranks_per_host: int = 1, **does: Any) -> list[str]:
        """A life to its end; what is wrong. ``does`` is what its commands mean.

        If one rank was to be killed or stopped, the others are killed when it is, as launchers do it.
        """
        ranks = self.hosts.launch(live, life, on=on, ranks_per_host=ranks_per_host, env=self.env)
        while does and is_alive(ranks[0]):
            for name in [name for name in does if (life.notes / name).exists()]:
                does.pop(name)()
                (life.notes / f"{name}.done").touch()
        first = [ranks[life.dies[0]]] if life.dies is not None and life.dies[0] != ALL else []
        if life.stops is not None:
            first = [ranks[1 - life.stops[0]]]
        for rank in [*first, *ranks]:
            if (rank.wait(HANG) and life.dies is not None) or life.stops is not None:
                for other in ranks:
                    other.kill()
        wrong = self.learn(life)
        meant = life.dies is not None or life.stops is not None or not life.ends
        for rank in ranks:
            said = rank.log.read_text()
            alone = meant and any(text in said for text in ("RankFailure", "closed by peer", "reset by peer"))
            if rank.returncode not in ((0, -9) if meant else (0,)) and not alone:
                wrong.append(f"{rank.log.name}: {rank.returncode}: {said[-3000:]}")
        self.said = "".join(rank.log.read_text() for rank in ranks)
        self.results = [rank.result() for rank in ranks] if not any(rank.returncode for rank in ranks) else []
        if self.results and (error := self.results[0]["error"]) is not None:
            wrong.append(f"close: {error}")
        return wrong

    def wait_for_keepers(self) -> None:
        """Until none is left, which they are not for long with ``linger=0``."""
        for host in self.hosts:
            while host.processes():
                time.sleep(0.01)

    def not_published(self, step: int) -> list[str]:
        """What is wrong if the newest save at its path is not of this step."""
        newest = dcp.latest(self.root)
        if newest is not None and newest.name == f"step-{step}":
            return []
        return [f"published is {newest}, not step {step}, and {self.told} were told"]

    def learn(self, life: Life) -> list[str]:
        """From what a life has noted; what is wrong with what it has resumed."""
        wrong, before = [], dict(self.told)
        self.notes = noted(life.notes)
        for one in self.notes:
            if "resumed" in one:
                if one["resumed"] < before.get(self.promised, 0):
                    wrong.append(f"resumed {one}, and before {before}")
                if not one["equal"]:
                    wrong.append(f"bytes differ: {one}")
                if "durable" in one["sources"] and not self.from_durable:
                    wrong.append(f"read from the durable storage: {one}")
            for what in ("returned", "local", "durable"):
                if what in one:
                    self.told[what] = max(self.told.get(what, 0), one[what])
        return wrong


def is_alive(process: Process) -> bool:
    """Asked again at once: what comes first, a command or its end."""
    return not select.select([process._descriptor], [], [], 0.01)[0]


@contextmanager
def training(
    number: int, folder: Path, layout: str = "fsdp2", memory: str = "512M", timeout: float = 60.0, **keeper: Any
) -> Iterator[Training]:
    with hosts(number, folder, memory=memory) as h:
        yield Training(h, folder, keeper, layout, timeout)


def killed(folder: Path, count: int, seed: int, **keeper: Any) -> Iterator[list[str]]:
    """Ranks killed at moments by chance, one or all; each life resumes what the one before has left."""
    chance = random.Random(seed)
    with training(2, folder, **keeper) as trained:
        for _ in range(count):
            victim = chance.choice([ALL, 0, 1])
            counted = chance.choice(list(CALLS))
            life = trained.life(dies=(victim, chance.randrange(1, CALLS[counted])), counted=counted, saves=12)
            yield trained.run(life)
        yield trained.run(trained.life())


def after_save(folder: Path, count: int, **keeper: Any) -> Iterator[list[str]]:
    """All ranks are killed when the last save has returned; keepers that wait for nobody publish it and end."""
    with training(2, folder, linger=0.0, **keeper) as trained:
        trained.from_durable = not keeper.get("dir", True)
        for _ in range(count):
            wrong = trained.run(trained.life(saves=3, ends=False))
            trained.wait_for_keepers()
            yield wrong + trained.not_published(trained.told["returned"])
        yield trained.run(trained.life(saves=0))


def lost(folder: Path, numbers: Sequence[int], seed: int) -> Iterator[list[str]]:
    """So many of three hosts are lost with memory and disk: a neighbour has what one had, else the path has."""
    chance = random.Random(seed)
    with training(3, folder, "fsdp2@3", replicas=1, durable_every=3) as trained:
        for number in numbers:
            gone = chance.sample(range(3), number)
            wrong = trained.run(trained.life(saves=5, ends=False, waits="end"))
            for one in gone:
                trained.hosts[one].lose()
            trained.promised, trained.from_durable = ("local", False) if number == 1 else ("durable", True)
            wrong += trained.run(trained.life(saves=1))
            for one in trained.results:  # what was at its path alone is not told by place
                if number == 1 and one["rank"] in gone and set(one["sources"]) <= {"this node"}:
                    wrong.append(f"{gone} lost, and {one['sources']}")
            yield wrong
            trained.told = {"local": trained.results[0]["step"] + 1} if trained.results else {}
            trained.promised, trained.from_durable = "local", True


def reshaped(folder: Path, layouts: Sequence[tuple[str, Sequence[int], int]]) -> Iterator[list[str]]:
    """A host less, and other layouts, ``(layout, hosts, ranks on each)``: each loads what the first one has saved."""
    with training(3, folder, "fsdp2@3", replicas=1, durable_every=None) as trained:
        yield trained.run(trained.life(saves=3, ends=False, waits="local"))
        trained.hosts[2].lose()
        for layout, on, ranks_per_host in layouts:
            wrong = trained.run(trained.life(saves=0, layout=layout), on, ranks_per_host)
            yield wrong + [f"{layout}: {one}" for one in trained.results if one["step"] != 3]


def without_keepers(folder: Path, count: int, seed: int, **keeper: Any) -> Iterator[list[str]]:
    """Keepers are killed at moments by chance while the training goes on."""
    chance = random.Random(seed)
    with training(2, folder, **keeper) as trained:
        for _ in range(count):
            at = tuple(sorted(chance.sample(range(1, 9 * CALLS[""] // 5), 3)))
            wrong = trained.run(trained.life(saves=10, kills_keeper=at))
            # A keeper that dies while a newer save waits leaves the older one without copies, and says so.
            yield wrong + [end for end in unfinished(trained) if "without its copies" not in end]
        yield trained.run(trained.life(saves=0))


def unfinished(trained: Training) -> list[str]:
    """Saves of the life before that did not end as they should."""
    return [
        f"step {step}: {end}"
        for one in trained.results
        for step, end in one["ends"].items()
        if end not in ("local", "durable")
    ]


def full(folder: Path, what: str) -> list[str]:
    """The ``"memory"`` or the ``"disk"`` of a host, where ``keeper.dir`` is, fills up for some saves."""
    with training(2, folder, replicas=1, durable_every=2, keep=1) as trained:
        host = trained.hosts[1]
        place, fill = (host.memory, host.fill_memory) if what == "memory" else (host.disk, host.fill_disk)
        trained.keeper["dir"] = str(place / "local")
        life = trained.life(saves=8, commands={3: "fill", 6: "free"}, waits="end")
        wrong = trained.run(life, fill=fill, free=host.free) + unfinished(trained)
        if "No space left" not in trained.said:
            wrong.append(f"nothing of it is said: {trained.said}")
        trained.from_durable = True  # a training that has ended leaves nothing in memory
        return wrong + not_local(trained, 6) + trained.run(trained.life(saves=1))


def not_local(trained: Training, start: int) -> list[str]:
    """Saves from some on that were never complete locally in the life before."""
    local = {one.get("local") for one in trained.notes}
    steps = [int(step) for one in trained.results for step in one["ends"]]
    return [f"step {step} was not complete locally" for step in steps if step >= start and step not in local]


def slow(folder: Path) -> list[str]:
    """A link gets slow while copies go over it, and is so when a host reads what it has lost."""
    with training(2, folder, replicas=1, durable_every=2) as trained:
        host = trained.hosts[1]
        life = trained.life(saves=6, commands={2: "slow", 5: "mend"}, ends=True)
        wrong = trained.run(life, slow=lambda: host.slow(4), mend=host.mend) + unfinished(trained)
        wrong += trained.run(trained.life(saves=3, ends=False, waits="local"))
        host.lose()
        host.slow(4)
        return wrong + trained.run(trained.life(saves=1)) + unfinished(trained)


def cut(folder: Path, stage: str) -> list[str]:
    """The cable is out while the keepers of a dead training copy, and in again when one has noticed."""
    with training(2, folder, replicas=1, durable_every=1, linger=0.0) as trained:
        life = trained.life(saves=3, commands={4: "cut"}, ends=False)
        wrong = trained.run(life, cut=trained.hosts[1].cut)
        if stage == "noticed":
            _await_word(trained.hosts[0], "is tried again")
        trained.hosts[1].mend()
        trained.wait_for_keepers()
        return wrong + trained.not_published(trained.told["returned"]) + trained.run(trained.life(saves=1))


def _await_word(host: Host, word: str) -> None:
    """Until a keeper of a host, if one lives, has said so."""
    spools = host.at(host.memory)
    while host.processes():
        if any(word in log.read_text() for log in spools.glob("dcp_plugin-*/*/keeper.log")):
            return
        time.sleep(0.05)


def store_down(folder: Path, seconds: float = 0.0) -> list[str]:
    """The shared folder is away for some saves, and for at least so many seconds, and comes back."""
    with training(2, folder, replicas=1, durable_every=1, keep=3, timeout=60.0 + 2 * seconds) as trained:
        away = trained.hosts.shared
        life = trained.life(saves=8, commands={3: "away", 5: "later", 7: "back"}, waits="local")
        wrong = trained.run(life, away=away.take_away, later=lambda: time.sleep(seconds), back=away.give_back)
        wrong += [one for one in unfinished(trained) if "newer" not in one] + not_local(trained, 1)
        wrong += trained.not_published(8)
        trained.from_durable = True  # a training that has ended leaves nothing in memory
        return wrong + trained.run(trained.life(saves=0))


def stale(folder: Path, what: str) -> list[str]:
    """What is in the memory of hosts is of another run, another user, or another version: passed over, and told."""
    with training(2, folder, replicas=1, durable_every=1) as trained:
        wrong = trained.run(trained.life(saves=3, ends=False, waits="end"))
        trained.from_durable = True
        for host in trained.hosts:
            local = host.at(host.memory / "local")
            if what == "run" and host.number == 0:
                shutil.rmtree(trained.root)
                trained.root.mkdir()  # a folder that is gone with all around it may be one that is not mounted
                trained.told.clear()
            elif what == "user":
                for path in (*local.glob("*"), *local.glob("*/*")):
                    os.chown(path, 12345, 12345)
            elif what == "format":
                for path in local.rglob("dcp_plugin.node"):
                    path.write_bytes(re.sub(rb'"format": \d+', b'"format": 0', path.read_bytes()))
        wrong += trained.run(trained.life(saves=2))
        words = {"run": "another run", "user": "another user", "format": "another version"}
        if words[what] not in trained.said:
            wrong.append(f"not told: {trained.said}")
        expected = 0 if what == "run" else 3
        wrong += [f"{one}" for one in trained.results if one["step"] != expected or one["sources"].get("this node")]
        return wrong + unfinished(trained)


def leaks(folder: Path, lives: int, seed: int) -> list[str]:
    """What keepers hold after many lives, killed ones among them; and what is left when the last one has ended."""
    chance = random.Random(seed)
    with training(2, folder, replicas=1, durable_every=5) as trained:
        held: list[dict[str, int]] = []
        wrong: list[str] = []
        for number in range(lives):
            at = chance.choice([ALL, 0, 1]), chance.randrange(CALLS["/tiers/"] // 2, CALLS["/tiers/"])
            life = trained.life(saves=6, dies=None if number % 4 == 0 else at, counted="/tiers/", ends=False)
            wrong += trained.run(life)
            if found := [one["holds"] for one in trained.notes if "holds" in one]:
                held.append({name: max(one.get(name, 0) for one in found) for name in found[0]})
        allowed = {
            "files of a spool": 140,
            "fd of a keeper": 4,
            "task of a keeper": 4,
            "fd of a rank": 2,
            "task of a rank": 2,
        }
        early = held[min(1, len(held) - 1)]
        for name, count in held[-1].items():
            if count > early.get(name, 0) + allowed[name]:
                wrong.append(f"{name}: {count}, and at first {early}")
        wrong += trained.run(trained.life(saves=1, keeper={"linger": 0.0}))
        trained.wait_for_keepers()
        for host in trained.hosts:
            left = [path for path in host.at(host.memory).rglob("*") if path.is_file() and ".door" not in path.parts]
            wrong += [f"left in memory: {path}" for path in left]
        return wrong


def stopped(folder: Path, count: int, seed: int) -> Iterator[list[str]]:
    """A keeper or a rank is stopped (SIGSTOP) at a moment by chance. The keeper goes on after the training's end.

    Beside a stopped keeper the training goes on. Beside a stopped rank it ends within the timeout.
    """
    chance = random.Random(seed)
    with training(2, folder, replicas=1, durable_every=2, timeout=10.0, keep=3) as trained:
        trained.from_durable = True
        for number in range(count):
            host = trained.hosts[chance.randrange(2)]
            if number % 4 == 3:
                stops = host.number, chance.randrange(1, CALLS[""])
                yield trained.run(trained.life(saves=6, stops=stops)) + trained.run(trained.life(saves=0))
            else:
                yield _with_a_stopped_keeper(trained, host, chance.randrange(1, CALLS_OF_A_KEEPER))


def _with_a_stopped_keeper(trained: Training, host: Host, at: int) -> list[str]:
    host.do(":")  # the file is named by the host
    host.kill()  # a new keeper looks for the file
    stop = trained.folder / f"{host.name}.stop"
    stop.write_text(str(at))
    wrong = [text for text in trained.run(trained.life(saves=6)) if "not durable" not in text]
    stop.unlink(missing_ok=True)
    if (stopped := stop.with_suffix(".stopped")).exists():
        print(f"the keeper of {host.name} was stopped at {stopped.read_text()}")
        stopped.unlink()
    for process in (process for other in trained.hosts for process in other.processes()):
        os.kill(process, signal.SIGCONT)
    return wrong + trained.run(trained.life(saves=0))


def clocks(folder: Path, tier: str) -> list[str]:
    """A clock is set back by three hours between two saves, between two starts, and on one of two hosts."""
    is_local = "local" in tier
    keeper: dict[str, Any] = {"durable_every": 2} if is_local else {"dir": None}
    with ExitStack() as opened:
        trained = opened.enter_context(training(2, folder, **keeper))
        trained.hosts[0].do(":")  # clocks are those of host names
        if "bucket" in tier:
            server = opened.enter_context(object_server.serving())
            store, port = trained.hosts.reach(int(server.url.rpartition(":")[2]))
            trained.env = {**server.environment(f"http://{store}:{port}"), "NO_PROXY": "*"}
            trained.url = f"{server.new_bucket().url}/run"
        trained.from_durable, wrong, newest = True, [], 0
        for on, hours, back in (
            [(0, 1), 0, -3],
            [(0, 1), -6, -9],
            [(1, 0), -9, -12],
            [(0, 1), -12, 3],
            [(0, 1), 3, 0],
        ):
            trained.set_clock(0, hours)
            life = trained.life(saves=4, commands={3: "set"}, ends=False, one_path="one path" in tier)
            wrong += trained.run(life, on, set=lambda back=back: trained.set_clock(0, back))
            wrong += [f"resumed {one}, not {newest}" for one in trained.notes if one.get("resumed", newest) != newest]
            newest += 4
        return wrong + trained.run(trained.life(saves=0, one_path="one path" in tier))


def abandoned(folder: Path) -> list[str]:
    """A host with later steps of a branch that the others have left comes back: its saves are the older ones."""
    with training(2, folder, "ddp", durable_every=3) as trained:
        trained.from_durable, trained.promised = True, "durable"
        wrong = trained.run(trained.life(saves=5, waits="end", ends=False), (0,))
        wrong += trained.run(trained.life(saves=1, waits="end", ends=False), (1,))
        if trained.notes[0]["resumed"] != 3:
            wrong.append(f"the other branch began with {trained.notes[0]}, not with the save at its path")
        trained.promised = "nothing"
        wrong += trained.run(trained.life(saves=0), (0, 1))
        found = {one["resumed"] for one in trained.notes if "resumed" in one}
        return wrong + [f"resumed {found}, not 4"] * (found != {4})


TIERS = ("disk", "one path", "bucket", "local", "local, one path", "local, bucket", "local, bucket, one path")
LAYOUTS = (("tp", (0, 1), 1), ("ddp", (0, 1), 1), ("fsdp2_tp", (0, 1), 2), ("fsdp2_hsdp", (0, 1), 2))


def _parts(chosen: Any) -> Parts:
    count, seed = chosen.count, chosen.seed
    chance, few = random.Random(seed), max(1, count // 20)
    losses = [chance.choice([1, 1, 2]) for _ in range(few)]
    parts: dict[str, Callable[[Path], Iterable[list[str]]]] = {
        "ranks killed": partial(killed, count=count // 2, seed=seed, replicas=1, durable_every=5),
        "ranks killed, no durable storage": partial(killed, count=count - count // 2, seed=seed, durable_every=None),
        "killed after save": partial(after_save, count=few),
        "killed after save, no local tier": partial(after_save, count=few, dir=None),
        "hosts lost": partial(lost, numbers=losses, seed=seed),
        "a host fewer, other layouts": partial(reshaped, layouts=LAYOUTS),
        "keepers killed": partial(without_keepers, count=few, seed=seed, replicas=1, durable_every=3),
        "memory full": _once(full, "memory"),
        "disk full": _once(full, "disk"),
        "link slow": _once(slow),
        "link cut": _once(cut, "at once"),
        "link cut until that is noticed": _once(cut, "noticed"),
        "durable storage down": _once(store_down),
        "durable storage down for ten minutes": _once(store_down, 600.0),
        "stopped": partial(stopped, count=count // 2, seed=seed),
        **{f"clocks set back, {tier}": _once(clocks, tier) for tier in TIERS},
        "a branch abandoned": _once(abandoned),
        "of another run": _once(stale, "run"),
        "of another user": _once(stale, "user"),
        "of another version": _once(stale, "format"),
        "leaks": _once(leaks, max(8, count // 4), seed),
    }
    return ((name, _in_a_folder(run)) for name, run in parts.items())


def _once(run: Callable[..., list[str]], *args: Any) -> Callable[[Path], list[list[str]]]:
    return lambda folder: [run(folder, *args)]


def _in_a_folder(run: Callable[[Path], Iterable[list[str]]]) -> Iterator[str]:
    """What is wrong each time; the folder stays if anything is."""
    folder, is_wrong = Path(tempfile.mkdtemp(prefix="dcp-keepers-")), False
    try:
        for wrong in run(folder):
            is_wrong = is_wrong or bool(wrong)
            yield "\n".join(wrong)
    except Exception as error:
        is_wrong = True
        yield f"{type(error).__name__}: {error}"
    if not is_wrong:
        shutil.rmtree(folder, ignore_errors=True)


CAMPAIGN = Campaign(__doc__, _parts, {"count": 200, "seed": 0})
