#!/usr/bin/env bash
# Sets up .venv and runs jobs/quickstart.py on a Ray that is started for it, on free ports, and ends with it.
# Arguments go to jobs/quickstart.py, such as: --controls, seed=1, max_staleness=1
#
#   RAY_ADDRESS=http://head:8265   submit it as a job to that cluster's dashboard instead
#   RAY_ADDRESS=head:6379          run it on the cluster with that head node instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh
export PATH="$PWD/.venv/bin:$PATH" RAY_ADDRESS=${RAY_ADDRESS:-local}
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
case $RAY_ADDRESS in
  http*) script=(jobs/submit.py quickstart.py) ;;
  *) script=(jobs/quickstart.py) ;;
esac
exec .venv/bin/python "${script[@]}" "storage=$PWD/runs" "$@"
