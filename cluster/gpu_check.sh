#!/usr/bin/env bash
# Measures on a machine with GPUs what only GPUs show, and writes one report, gpu_check.md: driver and memory, kernels,
# head, MFU and memory beside the plan, a profile, engines eager and with graphs and how far their log-probs are from the
# trainer's, also with FP8 and speculation, a GPU that engine and rank share, ten steps of the GSM8K job with a death, an adapter, experts, pictures.
#
#   bash cluster/gpu_check.sh [--dry] [--report FILE] [--only SECTION …] [--sizes 0.6B 1.7B] [--model FOLDER-OR-ID]
#
#   --dry    the same path on CPUs, with small models, in a few minutes on two cores
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/setup.sh test
exec .venv/bin/python -m tests.bench.gpu_check --report gpu_check.md "$@"
