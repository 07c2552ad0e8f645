#!/usr/bin/env bash
# Sets up .venv with the test extra and runs the whole suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh test
exec .venv/bin/python -m pytest "$@"
