"""Completeness of what is installed, and of what is pinned."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import wheels
from scripts.locked import locked, name_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
    wanted = names_of(
        [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["browser"], *extras["vision"]]
    )
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
    for names in ([], ["dev"], ["dev", "browser"], ["examples"], ["vision"]):
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


def test_all_ask_for_the_pythons_whose_wheels_a_release_checks() -> None:
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert bounds is not None
    floor, end = map(int, bounds.groups())
    assert tuple(f"3.{minor}" for minor in range(floor, end)) == wheels.PYTHONS
    assert "scripts/wheels.py" in (ROOT / "packaging" / "package.sh").read_text()
    script = (ROOT / "scripts" / "setup.sh").read_text()
    assert f"(3, {floor}) <= sys.version_info < (3, {end})" in script
    assert f"--python '{bounds[0]}'" in script
    for page in ("README.md", "docs/two-macs.md", "Makefile", "packaging/README.md", "scripts/setup.sh"):
        assert f"3.{floor} to 3.{end - 1}" in (ROOT / page).read_text(), page


def test_a_pin_without_a_wheel_of_a_known_hash_is_named(tmp_path: Path) -> None:
    wheel = '[[packages]]\nname = "{}"\nwheels = [{{ hashes = {{ sha256 = "{}" }} }}]\n'
    lock = wheel.format("a", "0a") + wheel.format("b", "0b") + '[[packages]]\nname = "source"\n'
    assert wheels.unknown(lock, "a==1 \\\n    --hash=sha256:0a\n") == ["b", "source"]
    (tmp_path / "hashes.txt").touch()
    uv = tmp_path / "uv"
    without = 'case "$*" in *-darwin*3.14*) echo no numpy >&2; exit 1;; esac'
    uv.write_text(f"#!/bin/sh\n{without}\necho packages = []\n")
    uv.chmod(0o755)
    assert wheels.problems(str(uv), tmp_path) == ["Python 3.14 on aarch64-apple-darwin: no numpy"]


def stand_in(path: Path, minor: int) -> None:
    """Write a Python that says it is 3.MINOR. It makes no environment: it ends with 9 and its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, {minor}, 0)\n"
        "match sys.argv[1]:\n    case '-c': exec(sys.argv[2])\n"
        f"    case '--version': print('Python 3.{minor}.0')\n"
        "    case other: sys.exit(sys.argv[0] + ' ' + other)\n"
    )
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("found", "kept", "words"),
    [
        ({"python3": 15, "python3.13": 13}, 0, "/python3.13 -m"),
        ({"python3": 9, "python3.11": 11}, 15, "/python3.11 -m"),
        ({"python3": 15}, 0, "needs Python 3.11 to 3.14 with venv, and found Python 3.15.0."),
        ({"python3": 9}, 0, "needs Python 3.11 to 3.14 with venv, and found Python 3.9.0."),
        ({"python3": 15}, 12, "/venv/bin/python scripts/locked.py"),
        ({"uv": 0}, 0, "uv venv --quiet --python >=3.11,<3.15"),
        ({"uv": 0}, 15, "uv venv --quiet --python >=3.11,<3.15"),
        ({"uv": 0}, 14, "/venv/bin/python scripts/locked.py"),
    ],
)
def test_setup_passes_over_a_python_that_is_too_old_or_too_new(
    tmp_path: Path, found: dict[str, int], kept: int, words: str
) -> None:
    """`kept`: the Python of an environment that is there, 3.0 for none."""
    path = tmp_path / "bin"
    for name, minor in found.items():
        stand_in(path / name, minor)
    if "uv" in found:
        (path / "uv").write_text('#!/bin/sh\necho "uv $*" >&2\nexit 1\n')
    if kept:
        stand_in(tmp_path / "venv" / "bin" / "python", kept)
    dirname = shutil.which("dirname")
    assert dirname is not None
    (path / "dirname").symlink_to(dirname)
    script = ["/bin/sh", str(ROOT / "scripts" / "setup.sh"), str(tmp_path / "venv")]
    done = subprocess.run(script, env={"PATH": str(path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stderr


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
