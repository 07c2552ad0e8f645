"""What the wheels of one device require, as text: recorded from pip, read by the tests of the constraints.

After a change of versions, for cpu and for gpu (on an index with CUDA builds of torch), in a fresh environment:

    pip install --dry-run --report report.json -c cluster/constraints-gpu.txt '.[gpu,test]'
    python -m tests.cluster.requires report.json > tests/cluster/requires/gpu.txt
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def read(path: Path) -> dict[str, tuple[Version, list[Requirement]]]:
    """By package: its version, and what it requires of others."""
    wheels: dict[str, tuple[Version, list[Requirement]]] = {}
    requirements: list[Requirement] = []
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            requirements.append(Requirement(line.strip()))
        else:
            name, _, version = line.partition("==")
            wheels[name] = (Version(version), requirements := [])
    return wheels


def record(report: dict[str, Any]) -> str:
    """The wheels of a pip report, with what each requires on Linux (x86_64) under Python 3.11 or 3.12."""
    lines = []
    for item in sorted(report["install"], key=lambda item: canonicalize_name(item["metadata"]["name"])):
        metadata = item["metadata"]
        if metadata["name"] == "rayrft":
            continue
        lines.append(f"{canonicalize_name(metadata['name'])}=={metadata['version']}")
        wanted = (Requirement(each) for each in metadata.get("requires_dist", []))
        lines += [f"  {_bare(each)}" for each in wanted if _applies(each, ["", *item.get("requested_extras", [])])]
    return "\n".join(lines) + "\n"


def _applies(requirement: Requirement, extras: list[str]) -> bool:
    linux = {**default_environment(), "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return requirement.marker is None or any(
        requirement.marker.evaluate({**linux, "python_version": python, "extra": extra})
        for python in ("3.11", "3.12")
        for extra in extras
    )


def _bare(requirement: Requirement) -> str:
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


if __name__ == "__main__":
    print(record(json.loads(Path(sys.argv[1]).read_text())), end="")
