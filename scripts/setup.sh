#!/usr/bin/env bash
# Make .venv ready: Python packages at the pinned versions, then the default model.
#
# Safe to run at any time: it does nothing, quickly, when all is there, goes on where an
# interrupted run stopped, and makes the environment anew when its Python is broken.
#
# Environment:
#   PYTHON            interpreter to use instead of the first fit one found
#   VENV              folder of the environment (default .venv)
#   OCTAVO_SKIP_MODEL set to leave the model out
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STAMP=$VENV/octavo-setup
LOG=$VENV/octavo-setup.log
FIT='import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))'

say() { printf '%s\n' "$*" >&2; }
die() { say "setup: $*"; exit 1; }

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    "$PYTHON" -c "$FIT" 2>/dev/null || die "$PYTHON is not a Python of 3.11 to 3.13: give another, as in make setup PYTHON=python3.12"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    # Run it: a name on the PATH may be a shim for a version that is not there.
    if "$candidate" -c "$FIT" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  die "Octavo needs Python 3.11, 3.12 or 3.13; found $(python3 --version 2>&1 || echo none). Install one, then: make setup PYTHON=/path/to/python3"
}

# What the environment must have been made from to count as ready.
fingerprint() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum; }

is_ready() {
  [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]] &&
    "$VENV/bin/python" -P - <<'PY' 2>/dev/null
import os, sys
from importlib.util import find_spec
names = ("octavo_client", "scheduler_svc", "executor_svc", "octavo_kernels", "octavo.v1",
         "grpc", "tokenizers", "torch", "transformers", "pytest")
missing = any(find_spec(name) is None for name in names)
raise SystemExit(missing or os.path.abspath("proto") not in sys.path)
PY
}

# Turn pip's output into one line per large download and a moving line on a terminal.
# Not in awk: mawk reads a pipe in blocks, and for minutes nothing would show.
show_progress() {
  local text clear='' words
  local large='^ *Downloading (.*/)?([^/ -]+)-([^/ -]+).*\(([0-9.]+ [MG]B)\)'
  [[ -t 2 ]] && clear=$'\r\033[K'
  line() { printf '%s  %s\n' "$clear" "$1" >&2; }
  status() { [[ -z $clear ]] || printf '%s  %.76s' "$clear" "$1" >&2; }
  while IFS= read -r text; do
    read -ra words <<<"$text"
    if [[ $text =~ $large ]]; then
      line "downloading ${BASH_REMATCH[2]} ${BASH_REMATCH[3]%.tar.gz} ${BASH_REMATCH[4]}"
    else
      case ${words[*]:0:2} in
        'Collecting '*) status "collecting ${words[1]}" ;;
        'Installing collected') line "installing $((${#words[@]} - 3)) packages, about a minute" ;;
        'Building '* | 'Preparing '*) status 'building octavo' ;;
      esac
    fi
  done
  printf '%s' "$clear" >&2
}

make_venv() {
  if "$VENV/bin/python" -P -c "$FIT; import pip" 2>/dev/null; then
    return
  fi
  local python
  python=$(find_python)
  say "creating $VENV with $("$python" --version 2>&1)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV" >&2 || die "$python cannot make an environment: install its venv module (on Debian: python3-venv)"
}

install_packages() {
  say "installing Octavo and what it needs into $VENV: about 2 GB and a few minutes the first time"
  say "  (log: $LOG)"
  rm -f "$STAMP"
  if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -P -m pip install \
      --disable-pip-version-check --no-input --progress-bar off \
      -c constraints.txt -e '.[dev]' </dev/null 2>&1 | tee "$LOG" | show_progress; then
    grep -h 'ERROR' "$LOG" | tail -3 | sed -E 's/^ */  /' >&2 || true
    die "pip failed; the whole story is in $LOG. Run make setup again to go on from here"
  fi
  add_protos_to_path
  fingerprint >"$STAMP"
}

# Beside a script, a checkout named octavo passes for a namespace package of that name, and
# the finder of the editable install is asked too late. A real package on sys.path wins.
add_protos_to_path() {
  "$VENV/bin/python" -P - <<'PY'
import os, sysconfig
with open(os.path.join(sysconfig.get_path("purelib"), "octavo_proto.pth"), "w") as file:
    file.write(os.path.abspath("proto") + "\n")
PY
}

fetch_model() {
  [[ -n ${OCTAVO_SKIP_MODEL:-} ]] && return
  "$VENV/bin/python" -P -m executor_svc.model_store.cli fetch >/dev/null
}

main() {
  if ! is_ready; then
    make_venv
    install_packages
  fi
  fetch_model
}

# One setup at a time per checkout, where the system has flock.
if [[ -z ${OCTAVO_SETUP_LOCKED:-} ]] && command -v flock >/dev/null; then
  OCTAVO_SETUP_LOCKED=1 exec flock "$(pwd)" bash "scripts/setup.sh"
fi
main
