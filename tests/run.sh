#!/usr/bin/env bash
# Sets up .venv with the test extra and runs the whole suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh test

# Nothing that lies on a machine by chance may help: an empty home, and so empty caches.
unset "${!HF_@}" "${!RAY_A@}" "${!XDG_@}" VLLM_CACHE_ROOT VLLM_CONFIG_ROOT NUMBA_CACHE_DIR MPLCONFIGDIR TRITON_CACHE_DIR
HOME=$(mktemp -d)
export HOME TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/torchinductor
trap 'rm -rf "$HOME"' EXIT
.venv/bin/python -m pytest "$@"
