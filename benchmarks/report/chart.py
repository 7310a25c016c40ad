"""The chart: for each cell, how many times as long the best peer takes. Drawn with matplotlib, for light and dark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.cells import Standing

_COLOURS = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "won": "#1a7f37", "lost": "#cf222e"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "won": "#3fb950", "lost": "#f85149"},
}
"""GitHub's own, of both of its themes."""


def draw(found: list[Standing], folder: Path) -> list[Path]:
    """Write ``speed-light.svg`` and ``speed-dark.svg``; the same figures give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [(one.cell.name, one.ratio, one.peer) for one in found if one.ratio is not None]
    paths = []
    for theme, colour in _COLOURS.items():
        figure = Figure(figsize=(9, 0.8 + 0.3 * max(1, len(shown))))
        axes = figure.subplots()
        for place, (_, ratio, peer) in enumerate(reversed(shown)):
            axes.barh(place, ratio - 1, left=1, height=0.6, color=colour["won" if ratio >= 1 else "lost"])
            axes.annotate(
                f"{ratio:.2f}  {peer}", (max(ratio, 1), place), (5, 0), textcoords="offset points",
                va="center", fontsize=8, color=colour["text"],
            )  # fmt: skip
        axes.set_yticks(range(len(shown)), [name for name, *_ in reversed(shown)], fontsize=9, color=colour["text"])
        axes.set_xscale("log")
        axes.set_xlim(0.1, max([10.0, *(ratio * 5 for _, ratio, _ in shown)]))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(colors=colour["text"], length=0)
        axes.axvline(1, color=colour["text"], linewidth=1)
        axes.grid(axis="x", color=colour["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("best peer ÷ ours: right of 1 we are faster", color=colour["text"], fontsize=9)
        for spine in axes.spines.values():
            spine.set_visible(False)
        paths.append(folder / f"speed-{theme}.svg")
        with rc_context({"svg.hashsalt": "speed", "svg.fonttype": "none"}):
            figure.savefig(paths[-1], transparent=True, bbox_inches="tight", metadata={"Date": None})
        lines = paths[-1].read_text().splitlines()
        paths[-1].write_text("\n".join(line.rstrip() for line in lines) + "\n")
    return paths
