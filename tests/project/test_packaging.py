"""What is installed: one version, extras that exist for whatever a message tells a user to install, public names."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import yaml

import dcp_plugin
from tools import api, errors, matrix, release

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dcp_plugin"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
FOR_THIS_REPOSITORY = {"bench", "dev", "docs", "examples"}

COMES_WITH = {"botocore": "boto3", "fsspec": "torch", "lightning-utilities": "lightning", "omegaconf": "hydra-core"}
"""What the package imports and what brings it, where that is not named itself."""
NOT_OURS = {"mlflow", "pytorch_lightning", "wandb"}
"""Imported only where a user has them already: trackers, and the other package of Lightning."""


def _plain(requirement: str) -> str:
    """The name of a requirement, as the indexes spell it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0].lower())  # type: ignore[index]


def _of_extra(name: str) -> Iterator[str]:
    """The requirements of an extra, with those of the extras that it names."""
    for requirement in EXTRAS[name]:
        if found := re.fullmatch(r"dcp-plugin\[(.*)\]", requirement):
            for other in found[1].split(","):
                yield from _of_extra(other)
        else:
            yield _plain(requirement)


def _imports() -> dict[str, str]:
    """Each module of others that the package imports, and a file that does."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
                names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "dcp_plugin":
                    found.setdefault(top, str(path.relative_to(ROOT)))
    return found


def test_the_version_is_said_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    module, _, name = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    # A literal: setuptools reads it without importing anything.
    literals = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert ast.literal_eval(literals[name]) == dcp_plugin.__version__
    said = re.compile(rf"""["']{re.escape(dcp_plugin.__version__)}["']""")
    places = [path for path in PACKAGE.rglob("*.py") if said.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in places] == [f"{module.replace('.', '/')}.py"]


def test_every_import_of_others_has_a_dependency_or_an_extra() -> None:
    required = {_plain(one) for one in PROJECT["project"]["dependencies"]}
    for_all = required | set(_of_extra("all"))
    distributions = packages_distributions()
    missing = {}
    for module, file in _imports().items():
        names = {_plain(name) for name in distributions.get(module, [module])}
        if module not in NOT_OURS and not any(name in for_all or COMES_WITH.get(name) in for_all for name in names):
            missing[module] = file
    assert not missing
    assert "torch" in _imports()  # it does look


def test_the_extra_all_is_everything_that_a_user_may_need() -> None:
    for_users = set(EXTRAS) - FOR_THIS_REPOSITORY - {"all"}
    assert set(_of_extra("all")) == {name for extra in for_users for name in _of_extra(extra)}


def test_extras_that_messages_and_pages_name_exist() -> None:
    named: dict[str, str] = {}
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for extras in re.findall(r"dcp-plugin\[([\w,-]+)\]", path.read_text()):
            named |= dict.fromkeys(extras.split(","), str(path.relative_to(ROOT)))
    assert {"lightning", "cli", "hf", "objects", "report"} <= set(named)
    assert not {name: file for name, file in named.items() if name not in EXTRAS}


@pytest.mark.parametrize("url", ["Homepage", "Documentation", "Changelog", "Issues"])
def test_the_addresses_are_those_of_the_site(url: str) -> None:
    conf = dict(re.findall(r'^(SITE|REPOSITORY) = "(.*)"$', (ROOT / "docs/conf.py").read_text(), re.M))
    at = PROJECT["project"]["urls"][url]
    assert conf["SITE"].startswith(at) if url == "Documentation" else at.startswith(conf["REPOSITORY"])


def test_the_public_names_and_signatures_are_those_that_are_committed() -> None:
    """A difference is meant: ``python -m tools.api``, and a line in CHANGELOG.md; or not: then put it back."""
    assert api.current().splitlines() == api.FILE.read_text().splitlines()


def test_the_messages_are_those_that_are_committed() -> None:
    """After a change of a message: ``python -m tools.errors``."""
    assert errors.written().splitlines() == errors.FILE.read_text().splitlines()


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_may_read_only(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert path.stem == "release" or "permissions" not in job, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
                assert re.search(rf"{re.escape(step['uses'])} # v\d+\.\d+\.\d+$", text, re.M), step["uses"]
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            # What others choose (the name of a branch) never becomes part of a script.
            assert not re.search(r"\$\{\{(?! matrix\.)", step.get("run", "")), step


def test_the_workflows_are_those_that_the_pages_name() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "lint", "matrix", "release", "tests"]
    pins = {
        line.strip().removeprefix("- uses: ")
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line
    }
    assert len({pin.partition("@")[0] for pin in pins}) == len(pins), "one action, one commit"


def test_the_matrix_of_the_workflow_is_that_of_make_matrix() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/matrix.yml").read_text())
    assert workflow["jobs"]["matrix"]["strategy"]["matrix"] == {
        "python": list(matrix.PYTHONS),
        "torch": list(matrix.TORCHES),
    }
    assert workflow["jobs"]["oldest"]["strategy"]["matrix"] == {"framework": list(matrix.FRAMEWORKS)}
    assert set(matrix.known()) == {(python, torch) for python in matrix.PYTHONS for torch in matrix.TORCHES}


def test_the_classifiers_name_each_python_that_was_tried() -> None:
    named = {entry.rpartition(" ")[2] for entry in PROJECT["project"]["classifiers"] if "Python :: 3." in entry}
    assert named == {python for (python, _), result in matrix.known().items() if result.startswith("passed")}


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS)
def test_a_framework_has_one_lower_bound_which_was_tried(framework: str) -> None:
    version, result = matrix.known_oldest()[framework]
    needs = {need for needs in EXTRAS.values() for need in needs if re.match(rf"{framework}\b(?!-)", need)}
    assert needs == {f"{framework}>={version}"}
    assert re.fullmatch(r"(sample: )?\d+ passed(, \d+ skipped)?", result)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_is_one(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    kinds = [field["type"] for field in form["body"]]
    assert set(kinds) <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["id"] and field["attributes"]["label"] for field in asked)
    assert any(field["validations"]["required"] for field in asked if "validations" in field)


WRONG = "import dcp_plugin\n\ndcp_plugin.save({}, 3)\ndcp_plugin.CheckpointConfig(keep_last='3')\n"


def test_a_program_of_a_user_is_typed(tmp_path: Path) -> None:
    """With ``mypy --strict``, in an environment in which the package is installed: ``py.typed`` counts only there."""
    site, program = _environment(tmp_path)
    # mypy would need a minute to read torch, which is Any without; what is ours is checked all the same.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nignore_missing_imports = True\n")
    options = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--python-executable", "venv/bin/python"]
    assert _said(tmp_path, "mypy", *options, program) == "Success: no issues found in 1 source file"
    (tmp_path / "wrong.py").write_text(WRONG)
    said = _said(tmp_path, "mypy", *options, "wrong.py")
    assert 'Argument 2 to "save" has incompatible type "int"' in said
    assert 'Argument "keep_last" to "CheckpointConfig" has incompatible type "str"' in said
    (site / "dcp_plugin/py.typed").unlink()
    assert "missing library stubs or py.typed marker" in _said(tmp_path, "mypy", *options, program)


def test_a_program_of_a_user_is_typed_for_pyright_too(tmp_path: Path) -> None:
    """In its strict mode, and with torch: pyright reads no more of it than it needs."""
    site, program = _environment(tmp_path)
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    (tmp_path / "wrong.py").write_text(WRONG)
    config = {"typeCheckingMode": "strict", "include": [program, "wrong.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    said = _said(tmp_path, "basedpyright", "--outputjson", "--pythonpath", "venv/bin/python")
    found = [one for one in json.loads(said)["generalDiagnostics"] if one["severity"] != "information"]
    assert {(Path(one["file"]).name, one["range"]["start"]["line"], one["rule"]) for one in found} == {
        ("wrong.py", 2, "reportArgumentType"),
        ("wrong.py", 3, "reportArgumentType"),
    }


def _environment(folder: Path) -> tuple[Path, str]:
    """An empty environment in which ours is installed, and a program beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = next((folder / "venv/lib").glob("python3.*/site-packages"))
    shutil.copytree(PACKAGE, site / "dcp_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    # Copied: beside a file both look for the package that it is in, and find the checkout.
    return site, Path(shutil.copy(ROOT / "tests/user_program.py", folder / "program.py")).name


def _said(folder: Path, checker: str, *options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", checker, *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.strip()


def test_what_is_missing_in_a_release_is_found(tmp_path: Path) -> None:
    project = PROJECT["project"]
    metadata = [f"Version: {dcp_plugin.__version__}", f"Requires-Python: {project['requires-python']}"]
    metadata += [f"Provides-Extra: {name}" for name in EXTRAS if name != "all"]
    metadata += [f"Classifier: {one}" for one in project["classifiers"]]
    metadata += [f"Project-URL: {name}, {url}" for name, url in project["urls"].items()]
    info = f"dcp_plugin-{dcp_plugin.__version__}.dist-info"
    package = [name for name in release.packaged() if not name.endswith("py.typed")]
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as wheel:
        for name in [*package, "tools/api.py"]:
            wheel.writestr(name, "")
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata))
        wheel.writestr(f"{info}/licenses/LICENSE", "")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\ndcp-plugin = dcp_plugin.tools.cli:main\n")
    with tarfile.open(tmp_path / "it.tar.gz", "w:gz") as sdist:
        for name in ("pyproject.toml", "README.md", "LICENSE", *release.PACKAGES):
            sdist.add(ROOT / name, f"it/{name}")
    assert list(release.wrong_with(tmp_path / "it.tar.gz", tmp_path / "it.whl")) == [
        "the wheel lacks dcp_plugin/py.typed",
        "the wheel has tools/api.py, which is no part of the package",
        "the sdist lacks CHANGELOG.md",
        "the metadata lack the extra all",
    ]
