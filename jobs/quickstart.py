"""The quickstart: `ray job submit -- python jobs/quickstart.py [--controls] [key=value …]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rayrft.cli import follow
from rayrft.config import load_config, parse_override
from rayrft.errors import RayrftError

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Run ``jobs/quickstart.yaml``; with ``--controls`` the SFT controls from the same warm-up run before MIX."""
    config = "quickstart_controls.yaml" if "--controls" in arguments else "quickstart.yaml"
    overrides = dict(parse_override(each) for each in arguments if each != "--controls")
    try:
        follow(load_config(HERE / config, overrides))
    except RayrftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
