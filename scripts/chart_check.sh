#!/usr/bin/env bash
# Check the Helm chart with helm 3 and helm 4, and the Dockerfiles with hadolint. What the chart
# renders is run, with the default model and with Prometheus: this takes minutes.
#
# Environment:
#   OCTAVO_HELM      helm programs, with colons between; else those of the PATH and of
#                    scripts/get_chart_tools.py are used
#   OCTAVO_HADOLINT  the same for hadolint
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${VENV:-.venv}/bin/python
tools=${XDG_CACHE_HOME:-$HOME/.cache}/octavo/tools

die() {
  printf 'chart-check: %s\n' "$*" >&2
  exit 1
}

if [[ -z ${OCTAVO_HELM:-} ]]; then
  found=("$tools"/helm-*)
  [[ -x ${found[0]} ]] || found=()
  if helm=$(command -v helm); then found+=("$helm"); fi
  OCTAVO_HELM=$(IFS=:; echo "${found[*]}")
fi
if [[ -z ${OCTAVO_HADOLINT:-} ]]; then
  OCTAVO_HADOLINT=$(command -v hadolint || find "$tools" -name 'hadolint-*' 2>/dev/null | tail -1)
fi

majors=
for helm in ${OCTAVO_HELM//:/ }; do
  version=$("$helm" version --short) || die "$helm does not run"
  majors+=" ${version%%.*}"
done
get="python -P scripts/get_chart_tools.py fetches it (Linux on x86-64)"
for major in v3 v4; do
  [[ $majors == *$major* ]] || die "no helm $major: $get, or name yours in OCTAVO_HELM"
done
[[ -n $OCTAVO_HADOLINT ]] || die "no hadolint: $get, or name yours in OCTAVO_HADOLINT"
"$python" -P -c 'import kubernetes_validate' 2>/dev/null || die "no kubernetes-validate: pip install kubernetes-validate"
command -v prometheus >/dev/null || die "no prometheus: on Debian and Ubuntu, apt install prometheus; elsewhere, https://prometheus.io/download"
export OCTAVO_HELM OCTAVO_HADOLINT

exec "$python" -P -m pytest tests/helm/test_*.py tests/helm/check_*.py "$@"
