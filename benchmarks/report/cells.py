"""The cells of the table of wins and losses: where each figure is found, who is compared, and what is aimed at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.report.figures import Table, median

OURS = "dcp_plugin"
BESIDE = re.compile(r"dcp_plugin|ceiling|raw|memcpy|reuse=|frozen|cp\b|without")
"""Rows that are no peers: ways of our own, and what bounds everybody."""


@dataclass(frozen=True)
class Cell:
    """One question and the answer that is aimed at."""

    name: str
    section: str
    table: str = ""
    """Expression that is found in the title of its table."""
    ours: str = OURS
    column: str = "seconds"
    peers: str = "."
    """Expression for those that count, of all who are not in :data:`BESIDE`."""
    theirs: str = ""
    """The column of the peer, where that is in the same row."""
    ceiling: str = "ceiling"
    """Beginning of the name of the row that bounds us."""
    lead: float = 1.0
    """Peer ÷ ours at the least, for each peer that is not in ``leads``."""
    leads: Mapping[str, float] = field(default_factory=dict)
    of_ceiling: float | None = None
    """Ours ÷ ceiling, at most."""
    at_most: float | None = None
    """Of our figure itself."""
    unit: str = "s"

    @property
    def target(self) -> str:
        said = []
        if self.at_most is not None:
            said.append(f"≤ {self.at_most:g} {self.unit}".rstrip())
        if self.of_ceiling is not None:
            said.append(f"≤ {self.of_ceiling:g} of the ceiling")
        if self.peers or self.theirs:
            said.append(f"≥ {self.lead:g} x best peer")
        said += [f"≥ {least:g} x {name}" for name, least in self.leads.items()]
        return ", ".join(said)


@dataclass(frozen=True)
class Standing:
    """How a cell stands in the figures that there are."""

    cell: Cell
    ours: list[float]
    peer: str = ""
    theirs: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of all ranks."""
    extra: list[float] = field(default_factory=list)
    """MiB of memory over what was in use before, on the rank that took the most."""
    behind: tuple[str, ...] = ()
    """What is aimed at and not reached."""
    before: Standing | None = None
    """The cell in the run before, between which and this one other benchmarks ran."""

    @property
    def ratio(self) -> float | None:
        """The best peer's median over ours: above 1 we are ahead."""
        return median(self.theirs) / median(self.ours) if self.theirs and median(self.ours) else None

    @property
    def of_ceiling(self) -> float | None:
        return median(self.ours) / median(self.ceiling) if self.ceiling else None

    @property
    def each_of_ceiling(self) -> list[float]:
        """Ours ÷ ceiling in each repetition, whose two runs are neighbours in time.

        Fewer than five figures are least, median and most in some tables, which belong to no repetition.
        """
        if len(self.ours) != len(self.ceiling) or len(self.ours) < 5:
            return []
        return [ours / ceiling for ours, ceiling in zip(self.ours, self.ceiling, strict=True)]

    @property
    def verdict(self) -> str:
        """Won or lost against the best peer, in words."""
        if not self.ours:
            return "not measured"
        if self.ratio is None:
            return "no peer"
        apart = max(self.ours) < min(self.theirs) or max(self.theirs) < min(self.ours)
        return ("won" if self.ratio >= 1 else "**lost**") + ("" if apart else ", within the spread")

    @property
    def reached(self) -> str:
        if not self.ours:
            return ""
        if self.behind:
            return "**no**: " + ", ".join(self.behind)
        lacks = (self.cell.of_ceiling is not None and not self.ceiling) or (self.cell.peers and not self.theirs)
        if lacks:
            return "as far as measured"
        if self.before is None or not self.before.ours:
            return "once"
        return "in one of two runs: " + ", ".join(self.before.behind) if self.before.behind else "yes"


CELLS = (
    Cell("save, disk, 1 rank", "save", r"MiB.* 1 rank.*outputs", of_ceiling=1.10),
    Cell("save, disk, 2 ranks", "save", r"MiB.* 2 rank.*outputs", of_ceiling=1.15),
    Cell("save, /dev/shm, 2 ranks", "save", r"MiB.* 2 rank.*/dev/shm", of_ceiling=1.2),
    Cell("load, warm", "load", r"warm, \d+ MiB.* 1 rank.*outputs", ceiling="raw read and hash", of_ceiling=1.25),
    Cell("load, warm, 2 ranks", "load", r"warm, \d+ MiB.* 2 rank.*outputs", ceiling="raw read and hash",
         of_ceiling=1.25),
    Cell("load, /dev/shm, 1 rank", "load", r"warm, \d+ MiB.* 1 rank.*/dev/shm", ceiling="raw read and hash",
         of_ceiling=1.25),
    Cell("load, /dev/shm, 2 ranks", "load", r"warm, \d+ MiB.* 2 rank.*/dev/shm", ceiling="raw read and hash",
         of_ceiling=1.25),
    *(
        Cell(f"load, not verifying, {where}, {ranks} rank(s)", "load", rf"warm, \d+ MiB.* {ranks} rank.*{where}",
             f"{OURS}, not verifying", peers="", of_ceiling=1.15)
        for where in ("outputs", "/dev/shm")
        for ranks in (1, 2)
    ),
    Cell("load right after a save, same process", "load", r"right after .*same process"),
    Cell("load right after a save, another process", "load", r"right after .*another process"),
    Cell("load, cold", "load", r"cold, \d+ MiB.* 1 rank.*outputs", of_ceiling=1.05),
    Cell("4 000 tensors of 4 KiB, save", "save", r"4000 tensors.* 1 rank.*outputs"),
    Cell("4 000 tensors of 4 KiB, load", "load", r"warm, 4000 tensors.* 1 rank.*outputs", leads={"safetensors": 1.0}),
    Cell("columns of 2 → columns of 4", "reshard", "columns of 2 to columns of 4", lead=1.3),
    Cell("rows of 2 → columns of 4", "reshard", "rows of 2 to columns of 4", lead=2),
    Cell("rows of 4 → rows of 2", "reshard", "4 to 2"),
    # On one host "auto" does what "off" does, so that these differ by noise.
    Cell("DDP load, one host, `io.broadcast`", "hsdp", "", "DDP, 4 ranks, local disk, cold, 1 hosts", "seconds auto",
         theirs="seconds off", lead=0.95),
    Cell("DDP load, 4 hosts on one file server, `io.broadcast`", "hsdp", "",
         "DDP, 4 ranks, file server of 400 MB/s, 4 hosts", "seconds auto", theirs="seconds off"),
    Cell("HSDP load, 2 hosts on one file server, `io.broadcast`", "hsdp", "",
         "HSDP, 4 ranks, file server of 400 MB/s, 2 hosts", "seconds auto", theirs="seconds off"),
    Cell("lazy call, 5 097 keys", "async_save", "", f"{OURS}, lazy", "blocked", at_most=0.001),
    Cell("blocking staging ÷ memcpy", "async_save", "", column="blocked", peers="stock", ceiling="memcpy",
         of_ceiling=1.05),
    Cell("async save of 256 MiB, until durable", "async_save", column="complete"),
    Cell("plan and commit, 1 024 ranks x 300 tensors", "plan", r"fsdp.*1024 ranks.* 300 t", column="plan + commit, s"),
    Cell("plan and commit, 16 384 x 1 000", "plan", r"fsdp.*16384 ranks.* 1000 t", column="plan + commit, s",
         peers="", at_most=10),
    Cell("its memory on rank 0, messages included", "plan", r"fsdp.*16384 ranks.* 1000 t", column="extra MiB",
         peers="", at_most=2048, unit="MiB"),
    Cell("sent by a rank for a repeated save", "plan", r"fsdp.*16384 ranks.* 1000 t", column="again", peers="",
         at_most=96, unit="B"),
    Cell("open stock's `.metadata` of 10^7 chunks", "plan", "stock's .metadata", peers="", at_most=5),
    Cell("open our index of 1.6 x 10^7 chunks", "plan", r"fsdp.*16384 ranks.* 1000 t", column="read, s", peers="",
         at_most=5),
    Cell("first save after a resume, frozen, cold", "reuse", "after a resume, cold", peers="", ceiling="reading",
         of_ceiling=1.1),
    Cell("first save after a resume, frozen, warm", "reuse", "after a resume, warm", peers="", ceiling="reading",
         of_ceiling=1.1),
    Cell("second save, nine tenths frozen, ÷ first", "reuse", "", "outputs, backbone frozen, reuse",
         peers="", at_most=0.25, unit=""),
    Cell("restore from memory after a kill", "recovery", "restore", f"{OURS}, memory", "restored", ceiling="raw"),
    Cell("Llama 8B scaled, MLPerf's pattern, save", "mlperf", "^save.*MLPerf", of_ceiling=1.15),
    Cell("Llama 8B scaled, MLPerf's pattern, load, cold", "mlperf", "^cold load.*MLPerf", of_ceiling=1.05),
    Cell("13.8 GiB, Llama 1B, FSDP2, save", "llama", "^save.* 1b.*FSDP2"),
    Cell("13.8 GiB, Llama 1B, FSDP2, load, cold", "llama", "^cold load.* 1b.*FSDP2"),
    Cell("13.8 GiB, Llama 1B, HSDP, save", "llama", "^save.* 1b.*HSDP"),
    Cell("13.8 GiB, Llama 1B, HSDP, load, cold", "llama", "^cold load.* 1b.*HSDP"),
    Cell("save, bucket", "objects", "^save", ceiling="raw obstore"),
    Cell("load, bucket", "objects", "^load", ceiling="raw obstore"),
    Cell("export to safetensors, durable", "exporting", ceiling="cp, durable"),
    Cell("compare two checkpoints", "comparing", ceiling="raw"),
    Cell("safetensors file, warm", "foreign", "safetensors, .*warm"),
)  # fmt: skip
README = {"save, disk, 2 ranks", "load, warm", "load, cold", "async save of 256 MiB, until durable",
          "plan and commit, 1 024 ranks x 300 tensors"}  # fmt: skip
"""The cells that ``README.md`` shows."""


def standing(cell: Cell, tables: list[Table], before: list[Table] | None = None) -> Standing:
    """Look a cell up in the tables of its section, and in those of the run before."""
    if before is not None:
        return replace(standing(cell, tables), before=standing(cell, before))
    for table in tables:
        row = table.rows.get(cell.ours, {})
        if re.search(cell.table, table.title) and row.get(cell.column):
            return _compare(cell, table, row)
    return Standing(cell, [])


def _compare(cell: Cell, table: Table, row: Mapping[str, list[float]]) -> Standing:
    ours = row[cell.column]
    measured = {name: of[cell.column] for name, of in table.rows.items() if of.get(cell.column)}
    peers = {name: values for name, values in measured.items() if cell.peers and re.search(cell.peers, name)}
    peers = {name: values for name, values in peers.items() if not BESIDE.match(name) and name != cell.ours}
    if cell.theirs:
        peers = {cell.theirs.removeprefix("seconds "): row[cell.theirs]}
    best = min(peers, key=lambda name: median(peers[name]), default="")
    bounds = [
        values for name, values in measured.items() if name.startswith(cell.ceiling) and not name.startswith(OURS)
    ]
    ceiling = min(bounds, key=median, default=[])
    stock = min((values for name, values in peers.items() if name.startswith("stock")), key=median, default=[])
    found = Standing(
        cell, ours, best, peers.get(best, []), stock, ceiling, cpu=row.get("CPU s", []), extra=row.get("extra MiB", [])
    )
    behind = [
        f"{median(values) / median(ours):.2f} x {name}"
        for name, values in peers.items()
        if median(values) < cell.leads.get(name, cell.lead) * median(ours)
    ]
    if cell.of_ceiling is not None and found.of_ceiling is not None and found.of_ceiling > cell.of_ceiling:
        behind.append(f"{found.of_ceiling:.2f} of the ceiling")
    if cell.at_most is not None and median(ours) > cell.at_most:
        behind.append(f"{median(ours):.2g} {cell.unit}".rstrip())
    return replace(found, behind=tuple(behind))
