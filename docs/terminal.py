"""Makes docs/pictures/demo.svg of what the demonstration prints:
`FORCE_COLOR=1 python examples/demo.py | python docs/terminal.py docs/pictures/demo.svg`

The chart of the demonstration is left out: from `Loss, …` to the first line with a tick after it.
"""

import io
import re
import sys
from itertools import dropwhile, takewhile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 110
_SPINNER = re.compile(r"\n[^\n]*starting \.\.\.[^\n]*|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")


def picture(printed: str, title: str) -> str:
    lines = [Text.from_ansi(line) for line in _SPINNER.sub("", printed.rstrip()).split("\n")]
    before = list(takewhile(lambda line: not line.plain.startswith("Loss, "), lines))
    after = dropwhile(lambda line: not line.plain.startswith("✓"), lines[len(before) :])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for line in [*before, *after]:
        line.rstrip()
        console.print(line, soft_wrap=True)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)  # a picture fetches nothing
    return drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.stdin.buffer.read().decode(), "make demo"))
