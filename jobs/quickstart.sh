#!/usr/bin/env bash
# Sets up .venv and runs jobs/quickstart.py as a job on a local Ray, started for it and stopped after it.
# Arguments go to jobs/quickstart.py, such as: --controls, seed=1, max_staleness=1
#
#   RAY_ADDRESS=http://head:8265   submit to that cluster's dashboard instead
#   RAYRFT_KEEP_RAY=1              leave the local Ray and its dashboard until Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh
export PATH="$PWD/.venv/bin:$PATH" RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
exec .venv/bin/python jobs/submit.py quickstart.py "storage=$PWD/runs" "$@"
