"""The site, made of the Markdown files that also read well as they are in the repository: `make docs`.

Links in them are relative paths, as in the repository. Those to files that are no pages of the site are turned into
links to the repository here (`_at_home`), those to the pages of `FROM_ROOT` into links to these.
"""

import posixpath
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).parent.absolute()
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from dcp_plugin.core import types  # noqa: E402

# autodoc looks for the texts below fields in the module that a class names as its own.
types.public_class = lambda package="": lambda cls: cls
types.CheckpointState.__module__ = types.__name__

SITE = "https://dcp-plugin.readthedocs.io/en/latest"
REPOSITORY = "https://github.com/dcp-plugin/dcp-plugin"
FROM_ROOT = {  # a page of the site: the file it is, elsewhere in the repository
    "project/benchmarks": "benchmarks/RESULTS.md",
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
}

LISTING = (
    "tutorials",
    "guides",
    "concepts",
)  # folders whose index.md is followed by a list of all others


def listed(folder: str) -> list[str]:
    """The names of the pages of such a folder."""
    return sorted(page.stem for page in (DOCS / folder).glob("*.md") if page.stem != "index")


project = "dcp_plugin"
author = "The authors of dcp_plugin"
copyright = f"{author}. Apache-2.0"  # noqa: A001  (Sphinx calls it so)
version = release = types.VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["schemas", "pictures"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Types of other libraries are named in signatures and have no page here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!dcp_plugin\.).*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100

mermaid_height = "auto"
html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines the names of modules
html_baseurl = f"{SITE}/"
html_title = f"dcp_plugin {version}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_show_sphinx = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
copybutton_exclude = ".linenos, .gp, .go"

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def _at_home(link: re.Match[str], here: str, docname: str) -> str:
    """The target of a link in the file `here` of the repository, for the page `docname` of the site."""
    path, heading = link[1], link[2] or ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    pages = {file: f"docs/{page}.md" for page, file in FROM_ROOT.items()}
    target = pages.get(target, target)
    if target == "README.md" and not heading:
        target = "docs/index.md"
    if target.startswith("docs/") and target.endswith((".md", ".png", ".svg")):
        return posixpath.relpath(target, posixpath.dirname(f"docs/{docname}")) + heading
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{target}{heading}"


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    here = FROM_ROOT.get(docname, f"docs/{docname}.md")
    text = (ROOT / here).read_text() if docname in FROM_ROOT else source[0]
    if docname in FROM_ROOT:
        app.env.note_dependency(str(ROOT / here))
    parts, end = [], 0
    for fence in [*_FENCE.finditer(text), None]:
        outside = text[end : fence.start() if fence else None]
        parts += [_LINK.sub(lambda link: _at_home(link, here, docname), outside), fence[0] if fence else ""]
        end = fence.end() if fence else end
    source[0] = "".join(parts)
    folder, _, name = docname.rpartition("/")
    if folder in LISTING and name == "index" and listed(folder):
        source[0] += "\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(listed(folder)) + "\n```\n"


def _is_there(name: str) -> bool:
    """Whether the package has what a docstring names, which may be no part of the reference."""
    module, _, attribute = name.rpartition(".")
    try:
        import_module(name)
    except ImportError:
        return bool(module) and _is_there(module) and hasattr(import_module(module), attribute)
    return True


def _refer(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """A name is public where users import it, and docstrings name the module that it is in."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix(".")
    last = target.rpartition(".")[2]
    for name in [f"dcp_plugin.{last}", f"dcp_plugin.tools.{last}", f"dcp_plugin.{target}"]:
        if found := env.domains.python_domain.objects.get(name):
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content, name)
    here = node.get("py:module") or "dcp_plugin"
    return content if any(map(_is_there, [target, f"{here}.{target}", f"dcp_plugin.{target}"])) else None


def _to_read_again(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """The lists of pages, when there are other pages than at the last build."""
    return [f"{folder}/index" for folder in LISTING] if added or removed else []


def _whole(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """What napoleon would take for the type of an attribute is what stands before the first colon of its docstring."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def _copy_pictures(app: Sphinx, failed: Exception | None) -> None:
    """Pictures that are named in HTML, for a light and a dark one, are not found by Sphinx."""
    if failed is None and app.builder.format == "html":
        shutil.copytree(DOCS / "pictures", app.outdir / "pictures", dirs_exist_ok=True)
        for page, file in FROM_ROOT.items():
            for picture in (ROOT / file).parent.glob("*.svg"):
                shutil.copy(picture, (app.outdir / page).parent)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _whole, priority=400)
    app.connect("env-get-outdated", _to_read_again)
    app.connect("missing-reference", _refer)
    app.connect("build-finished", _copy_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
