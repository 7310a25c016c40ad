"""The site of docs/: built without a warning, with a place for every public name and an anchor for every error.

``make docs`` runs this file, and ``make test`` does not: the first test builds the site into ``outputs/site``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from dcp_plugin import errors
from tests import programs

ROOT = Path(__file__).parents[2]
MODULES = [
    "dcp_plugin",
    "dcp_plugin.tools",
    "dcp_plugin.lightning",
    "dcp_plugin.fabric",
    "dcp_plugin.accelerate",
    "dcp_plugin.transformers",
]


@pytest.fixture(scope="module")
def site() -> Path:
    out = ROOT / "outputs" / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", str(out)]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    return out


class _Links(HTMLParser):
    """What a page leads to, and the places in it that can be led to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.to: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places.add(given.get("id") or "")
        self.to += [where for name in ("href", "src", "srcset") if (where := given.get(name))]


def _broken(site: Path) -> Iterator[str]:
    pages = {page: _Links(page) for page in site.rglob("*.html") if "_static" not in page.parts}
    assert len(pages) > 20
    for page, links in pages.items():
        for link in map(urlsplit, links.to):
            if link.scheme or link.netloc:
                continue
            target = (page.parent / unquote(link.path)).resolve() if link.path else page
            place = unquote(link.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                yield f"{page.name}: {link.geturl()}"


def test_every_link_and_picture_of_the_site_is_there(site: Path) -> None:
    generated = re.compile(r": (#|genindex|search|py-modindex|_modules)")
    assert [one for one in _broken(site) if not generated.search(one)] == []


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    there = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    for module in MODULES:
        for name in import_module(module).__all__:
            assert f"{module}.{name}" in there or f"dcp_plugin.accelerate.{name}" in there, f"{module}.{name}"


def test_the_address_that_an_error_ends_with_is_in_the_site(site: Path) -> None:
    page = (site / "troubleshooting.html").read_text()
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.CheckpointError):
            place = kind("text").__notes__[-1].rpartition("#")[2]
            assert f'id="{place}"' in page, place


def test_links_to_code_lead_to_the_repository(site: Path) -> None:
    page = (site / "guides" / "restarts.html").read_text()
    assert 'href="https://github.com/dcp-plugin/dcp-plugin/tree/main/examples/elastic"' in page


def test_llms_txt_is_up_to_date(site: Path) -> None:
    code = "import sys; sys.path.insert(0, 'docs'); import llms; sys.stdout.write(llms.text())"
    made = programs.run("-c", code, cwd=ROOT)
    assert made.stdout == (ROOT / "docs/llms.txt").read_text(), f"run docs/llms.py (or make docs) {made.stderr[-500:]}"
    assert (site / "llms.txt").read_text() == made.stdout


def test_what_is_said_of_a_field_is_there_as_a_whole(site: Path) -> None:
    """Napoleon would take what stands before a colon for a type."""
    page = re.sub(r"<[^>]+>", "", (site / "reference/configuration.html").read_text())
    assert "When a background save copies the state. &quot;blocking&quot;: before save returns." in page
