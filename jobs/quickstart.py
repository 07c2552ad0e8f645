"""The quickstart: `ray job submit -- python jobs/quickstart.py [--controls] [key=value …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from rayrft import start
from rayrft.cli.follow import exit_on_signals, follow
from rayrft.config import load_config, parse_override
from rayrft.errors import RayrftError, RunFinished

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Run ``jobs/quickstart.yaml``; with ``--controls`` SFT from the same warm-up runs before MIX, for comparison."""
    raw: dict[str, Any] = yaml.safe_load((HERE / "quickstart.yaml").read_text())
    if "--controls" in arguments:
        warmup, mix = raw["stages"]
        controls = yaml.safe_load((HERE / "quickstart_controls.yaml").read_text())["stages"]
        raw["stages"] = [warmup, *controls, {**mix, "start_from": "warmup"}]
    try:
        overrides = dict(parse_override(each) for each in arguments if each != "--controls")
        with exit_on_signals():
            follow(start(load_config(raw, overrides)))
    except RunFinished as finished:  # with on_existing=resume, as in `rayrft run`
        print(finished.problem, flush=True)
    except RayrftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
