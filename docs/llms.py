"""Writes docs/llms.txt (llmstxt.org): every page of the site with its first sentence, in the order of the toctrees.

`make docs` runs it; a test says when that was forgotten.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from conf import DOCS, FROM_ROOT, LISTING, REPOSITORY, ROOT, SITE, listed

_TOCTREE = re.compile(r"^```\{toctree\}\n(?::caption: ([^\n]*)\n)?(?::[^\n]*\n)*\n(.*?)^```", re.M | re.S)


def pages(index: str = "index") -> Iterator[tuple[str, str]]:
    """The caption and the name of each page below an index page."""
    folder = str(Path(index).parent)
    for caption, names in _TOCTREE.findall((DOCS / f"{index}.md").read_text()):
        for name in names.split():
            page = name if folder == "." else f"{folder}/{name}"
            below = page.removesuffix("/index")
            if below in LISTING:
                yield from ((caption, f"{below}/{one}") for one in listed(below))
            elif below != page:
                yield from ((caption, one) for _, one in pages(page))
            else:
                yield caption, page


def line(page: str) -> str:
    """A page's title, its address as Markdown, and its first sentence."""
    file = FROM_ROOT.get(page, f"docs/{page}.md")
    text = (ROOT / file).read_text()
    title = re.findall(r"^# (.*)$", text, re.M)[0]
    paragraphs = [one.strip() for one in text.split("\n\n")[1:]]
    first = next(one for one in paragraphs if one[:1] not in ("#", "|", "<", "`" * 3) and "\n```" not in one)
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first.replace("\n", " "))
    sentence = re.split(r"(?<=\.)\s", words)[0].rstrip(".:")
    where = f"{SITE}/{page}.html" if page.startswith("reference/") else f"{REPOSITORY}/raw/main/{file}"
    return f"- [{title}]({where}): {sentence}."


def text() -> str:
    title, summary, details = (DOCS / "index.md").read_text().split("\n\n")[:3]
    captions: dict[str, list[str]] = {}
    for caption, page in pages():
        captions.setdefault(caption, []).append(line(page))
    lists = [f"## {caption}\n\n" + "\n".join(lines) for caption, lines in captions.items()]
    return "\n\n".join([title, "> " + summary.replace("\n", "\n> "), details, *lists]) + "\n"


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(text())
