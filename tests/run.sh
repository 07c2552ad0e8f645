#!/usr/bin/env bash
# Sets up .venv with the test extra and runs what must hold after every change, in about 20 minutes on two cores.
#
#   bash tests/run.sh [--all] [argument of pytest …]
#
#   --all    also what is marked slow: 100 kills of the Buffer and 50 of Buffer and shard instead of 30 and 10, PPO and
#            DPO from three seeds instead of one, the quickstart as shipped at more than twice the length, a resumed run
#            with engines beside one without a fault, and every bench at its smallest
#
# Two lanes run side by side: whole runs, and everything else (see tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier="what must hold after every change, about 20 minutes on two cores"
arguments=(-n 2)
for argument in "$@"; do
  if [ "$argument" = --all ]; then
    tier="everything, about 30 minutes on two cores"
    arguments+=(-m "slow or not slow")
  else
    arguments+=("$argument")
  fi
done
bash cluster/setup.sh test
printf 'tests: %s\n' "$tier" >&2
exec .venv/bin/python -m pytest "${arguments[@]}"
