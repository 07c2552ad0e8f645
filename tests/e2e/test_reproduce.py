"""Faults that no error names leave the band of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Call

FAULTS = sorted(path.stem for path in (ROOT / "tests" / "planted").glob("[a-z]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_planted_fault_leaves_the_band(fault: str | None, other_process: Call, tmp_path: Path) -> None:
    """One seed with the fault, and one without. Checks that would end a run with the fault before are off."""
    planted = [] if fault is None else [f"plugins=[{ROOT}/tests/planted/{fault}.py]", "weight_sync.tolerance=1e9"]
    storage = ["--seeds", "0", "--storage", str(tmp_path)]
    result = other_process("reproduce", str(ROOT / "jobs" / "recipes" / "spelling.yaml"), *storage, *planted)
    told = result.stdout[-3000:] + result.stderr[-3000:]
    assert (result.returncode == 0) == (fault is None), told
    assert fault is None or "in the mean, not" in result.stderr, told
