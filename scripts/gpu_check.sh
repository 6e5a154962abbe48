#!/usr/bin/env bash
# Run the tests that need a GPU, then measure the kernels: both in under 8 minutes.
#
# Arguments go to the measurement (python -m octavo_kernels.gpu_check --help). Where there
# is no GPU one line says so, and the status is 2.
#
# Environment:
#   VENV  folder of the Python environment (default .venv)
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests compile some hundred kernels, one after the other. What they leave of the limit,
# up to its own default, is the measurement's.
LIMIT_SECONDS=455
TEST_SECONDS=285
MEASURE_SECONDS=330

python() { "${VENV:-.venv}/bin/python" -P "$@"; }

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo 'gpu-check: there is no GPU here: nothing was checked' >&2
  exit 2
fi
status=0
timeout --signal=INT "$TEST_SECONDS" "${VENV:-.venv}/bin/python" -P -m pytest -m gpu || status=1
left=$((LIMIT_SECONDS - SECONDS))
seconds=$((left < MEASURE_SECONDS ? left : MEASURE_SECONDS))
python -m octavo_kernels.gpu_check --json gpu-check.json --seconds "$seconds" "$@" || status=1
exit "$status"
