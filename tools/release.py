"""``make release``: builds what would be uploaded, checks it, and tags the commit; ``DRY_RUN=1`` leaves out the tag.

1. sdist and wheel, the wheel from the sdist, with the time of the commit: the same commit gives the same files.
2. What is in them: every module, py.typed, the style and script of the report, the licence, the metadata.
3. The wheel in an empty environment: ``tools/smoke.py``.
4. The version, the changelog and the tag agree, and everything is committed.

Uploading is left to ``.github/workflows/release.yml``, which the tag starts: it runs 1 to 4 again, attests what it has
built, and publishes it as a trusted publisher, so that nobody holds a token.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import torch

import dcp_plugin
from tools import matrix

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
VERSION = dcp_plugin.__version__
TAG = f"v{VERSION}"
PACKAGES = ("dcp_plugin", "hydra_plugins")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def packaged() -> list[str]:
    """What the wheel has to have: what is committed of the packages."""
    return git("ls-files", *PACKAGES).splitlines()


def build(into: Path) -> tuple[Path, Path]:
    """The sdist and the wheel. The tools are installed into an environment of their own."""
    with tempfile.TemporaryDirectory(prefix="dcp-build-") as made:
        venv.create(made, with_pip=True)
        python = f"{made}/bin/python"
        constraints = str(ROOT / "constraints.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, "build", "twine"], check=True)
        environment = os.environ | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
        into.mkdir(exist_ok=True)
        for old in into.glob(f"dcp_plugin-{VERSION}*"):
            old.unlink()
        log = subprocess.run(
            [python, "-m", "build", "--outdir", into, ROOT], env=environment, capture_output=True, text=True
        )
        if log.returncode:
            raise SystemExit(log.stdout[-2000:] + log.stderr[-2000:])
        sdist, wheel = into / f"dcp_plugin-{VERSION}.tar.gz", next(into.glob(f"dcp_plugin-{VERSION}-*.whl"))
        subprocess.run([python, "-m", "twine", "check", "--strict", sdist, wheel], check=True, stdout=subprocess.PIPE)
    return sdist, wheel


def wrong_with(sdist: Path, wheel: Path) -> Iterator[str]:
    """What is missing in the two files, or should not be there."""
    package = set(packaged())
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"dcp_plugin-{VERSION}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    with tarfile.open(sdist) as source:
        sources = {name.partition("/")[2] for name in source.getnames()}
    yield from (f"the wheel lacks {name}" for name in sorted(package - names))
    strangers = {name for name in names - package if not name.startswith(info)}
    yield from (f"the wheel has {name}, which is no part of the package" for name in sorted(strangers))
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", *package}
    yield from (f"the sdist lacks {name}" for name in sorted(needed - sources))
    if f"{info}/licenses/LICENSE" not in names:
        yield "the wheel lacks the licence"
    if "dcp-plugin = dcp_plugin.tools.cli:main" not in entry_points:
        yield "the wheel lacks the command dcp-plugin"
    yield from wrong_metadata(metadata)


def wrong_metadata(found: Message) -> Iterator[str]:
    """What the metadata lack of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if found["Version"] != VERSION:
        yield f"the metadata say version {found['Version']}, the package says {VERSION}"
    if found["Requires-Python"] != project["requires-python"]:
        yield f"the metadata say Python {found['Requires-Python']}"
    for what, said, wanted in (
        ("extra", found.get_all("Provides-Extra"), project["optional-dependencies"]),
        ("classifier", found.get_all("Classifier"), project["classifiers"]),
        ("address", found.get_all("Project-URL"), [f"{name}, {url}" for name, url in project["urls"].items()]),
    ):
        yield from (f"the metadata lack the {what} {one}" for one in sorted(set(wanted) - set(said or [])))


def not_ready() -> Iterator[str]:
    """Why this commit cannot be tagged."""
    changed = git("status", "--porcelain").splitlines()
    if changed:
        yield f"{len(changed)} files are changed or not committed"
    top = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    if top.split()[0] != VERSION:
        yield f"the top section of CHANGELOG.md is {top!r}; it has to be {VERSION!r}"
    if git("tag", "--list", TAG) and git("rev-list", "-n1", TAG) != git("rev-parse", "HEAD"):
        yield f"the tag {TAG} is on another commit: raise VERSION in dcp_plugin/core/types.py"
    if os.environ.get("GITHUB_REF_TYPE") == "tag" and os.environ["GITHUB_REF_NAME"] != TAG:
        yield f"the tag is {os.environ['GITHUB_REF_NAME']}, the version {VERSION}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build, check and tag a release.")
    parser.add_argument("--dry-run", action="store_true", help="no tag; what is not ready is only said")
    parser.add_argument("--no-tag", action="store_true", help="no tag, but everything has to be ready")
    parser.add_argument("--index", help="an index with builds of torch for the CPU")
    given = parser.parse_args()
    unready = list(not_ready())
    for reason in unready:
        print(f"not ready: {reason}")
    if unready and not given.dry_run:
        return 1
    sdist, wheel = build(DIST)
    wrong = list(wrong_with(sdist, wheel))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pip = ["--extra-index-url", given.index] if given.index else []
    if not wrong and "passed" not in (said := matrix.tried(wheel, here, torch.__version__.partition("+")[0], pip)):
        wrong = [f"the wheel in an empty environment: {said}"]
    for reason in wrong:
        print(f"wrong: {reason}")
    if wrong:
        return 1
    for file in (sdist, wheel):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size >> 10} KiB")
    if given.dry_run or given.no_tag:
        print(f"would tag {TAG}" if given.dry_run else f"{TAG} is as it should be")
        return 0
    if not git("tag", "--list", TAG):
        git("tag", "--annotate", TAG, "--message", f"dcp-plugin {VERSION}")
    print(f"tagged. What publishes it: git push origin {TAG}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
