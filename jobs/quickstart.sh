#!/usr/bin/env bash
# Sets up .venv, starts a local Ray if none is reachable, submits jobs/quickstart.py to it and follows its log.
# Arguments go to jobs/quickstart.py, such as: --controls, seed=1, max_staleness=1
#
#   RAY_ADDRESS=http://head:8265   submit to that cluster's dashboard instead
#   RAYRFT_KEEP_RAY=1              leave the local Ray running afterwards (its dashboard stays up)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh
export PATH="$PWD/.venv/bin:$PATH" RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_USAGE_STATS_ENABLED=0
export PYTHONUNBUFFERED=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

say() { printf 'quickstart: %s\n' "$*" >&2; }

started=""
address=${RAY_ADDRESS:-http://127.0.0.1:8265}
if ! ray job list --address "$address" >/dev/null 2>&1; then
  [ -z "${RAY_ADDRESS:-}" ] || { say "no Ray answers at RAY_ADDRESS=$RAY_ADDRESS"; exit 2; }
  say "starting a local Ray (dashboard: $address)"
  ray start --head --disable-usage-stats --dashboard-host 127.0.0.1 --dashboard-port 8265 >/dev/null
  started=yes
fi

job="quickstart-$(date +%s)-$$"
finish() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$started" ] && [ -z "${RAYRFT_KEEP_RAY:-}" ]; then
    say "stopping the local Ray"
    ray stop >/dev/null 2>&1 || ray stop --force >/dev/null 2>&1 || true
  elif [ -n "$started" ]; then
    say "Ray goes on at $address; end it with: .venv/bin/ray stop"
  fi
  exit "$status"
}
stop_job() {
  say "stopping the job"
  ray job stop --address "$address" "$job" >/dev/null 2>&1 || true
  exit 130
}
trap finish EXIT
trap stop_job INT TERM

ray job submit --address "$address" --submission-id "$job" --no-wait -- \
  "$PWD/.venv/bin/python" "$PWD/jobs/quickstart.py" "storage=$PWD/runs" "$@" >/dev/null
ray job logs --address "$address" --follow "$job" &
wait $! || true
ray job status --address "$address" "$job" 2>&1 | grep -qi "succeeded"
