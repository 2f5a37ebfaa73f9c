"""Completeness of what is installed, and of what is pinned."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts.locked import locked, name_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names_of(requirements: list[str]) -> list[Requirement]:
    return [Requirement(each) for each in requirements]


def test_every_file_of_the_package_is_installed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "mlxtp"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("this folder is no clone")
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["mlxtp"]
    others = [name.removeprefix("mlxtp/") for name in tracked if not name.endswith(".py")]
    assert len(others) > 10
    assert [name for name in others if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []
    folders = {str(Path(name).parent) for name in tracked if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_dependency_is_pinned_to_a_version_that_will_do() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): Version(version) for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = names_of([*PROJECT["project"]["dependencies"], *extras["dev"], *extras["browser"]])
    assert len(wanted) > 25
    for each in wanted:
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        assert name in pinned, f"{each.name} has no line in constraints.txt"
        assert pinned[name] in each.specifier, f"{each} but {pinned[name]} in constraints.txt"


def pins_of(text: str) -> dict[str, str]:
    return {
        name_of(pin): version for pin, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    }


def test_each_pin_has_its_hashes() -> None:
    text = (ROOT / "hashes.txt").read_text()
    pins, hashed = pins_of((ROOT / "constraints.txt").read_text()), pins_of(text)
    assert len(pins) > 90
    assert {name: hashed.get(name) for name in pins} == pins
    assert all("--hash=sha256:" in lines for lines in locked(text, set(hashed)).values())
    assert "://" not in text


def test_all_installed_extras_come_with_their_hashes() -> None:
    """But what trains the embedded model: its packages are pinned nowhere."""
    text, extras = (ROOT / "hashes.txt").read_text(), PROJECT["project"]["optional-dependencies"]
    here = {name_of(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    for names in ([], ["dev"], ["dev", "browser"], ["examples"]):
        asked = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
        asked += [each for name in names for each in extras[name]]
        wanted = set(map(name_of, asked))
        found = locked(text, wanted)
        assert wanted <= found.keys()
        for name in found:
            needs = (importlib.metadata.requires(name) or []) if name in here else []
            plain = {name_of(need) for need in needs if ";" not in need}
            assert plain <= found.keys(), f"{name} needs {plain - found.keys()}"
    assert "torch" not in locked(text, {"torch"})


def test_setup_takes_nothing_without_its_hash_but_this_folder() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text()
    installs = [line for line in script.replace("\\\n", "").splitlines() if "pip install" in line]
    assert ["--require-hashes" in line for line in installs] == [True, False, True, False]
    for line in installs[1::2]:
        assert {"--editable", "--no-build-isolation", "--no-deps"} <= set(line.split())


def test_setup_asks_for_the_python_that_the_package_asks_for() -> None:
    floor = re.fullmatch(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert floor is not None
    script = (ROOT / "scripts" / "setup.sh").read_text()
    assert f"sys.version_info < (3, {floor[1]})" in script
    assert f"--python '>=3.{floor[1]}'" in script


def test_the_formula_is_filled_in_and_leaves_the_libraries_of_wheels_alone() -> None:
    formula = (ROOT / "packaging" / "mlxtp.rb").read_text()
    filled = re.findall(r"s\|(@\w+@)\|", (ROOT / "packaging" / "package.sh").read_text())
    assert set(re.findall(r"@[A-Z0-9]+@", formula)) == set(filled)
    assert re.search(r"^  preserve_rpath$", formula, re.MULTILINE)
    assert '"--constraint", "constraints.txt"' in formula
    assert "include constraints.txt" in (ROOT / "MANIFEST.in").read_text()


def test_changes_begin_with_this_version() -> None:
    from mlxtp import __version__

    found = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == __version__
