#!/usr/bin/env bash
# Run the tests in two halves side by side: most of them keep one core busy.
#
# With arguments, those go to one plain pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTEST=("${VENV:-.venv}/bin/python" -P -m pytest -m 'not gpu and not slow' --durations=15)
HALF=(tests/kernels tests/property tests/unit tests/integration
  tests/e2e/test_mutual_tls.py tests/e2e/test_pressure.py tests/e2e/test_startup.py)

if (($#)); then
  exec "${PYTEST[@]}" "$@"
fi

log=$(mktemp)
trap 'rm -f "$log"; kill $(jobs -p) 2>/dev/null' EXIT
# Caches apart: two runs must not write one file.
"${PYTEST[@]}" -o cache_dir=.pytest_cache/half "${HALF[@]}" >"$log" 2>&1 &
half=$!
"${PYTEST[@]}" tests "${HALF[@]/#/--ignore=}"
rest_status=$?
printf '\nand %s:\n' "${HALF[*]}"
wait "$half"
half_status=$?
cat "$log"
exit $((rest_status | half_status))
