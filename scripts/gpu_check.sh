#!/usr/bin/env bash
# Checks this machine's GPU: the Triton kernels, served powers against stock SGLang, and what they
# cost and gain (scripts/gpu/README.md). The kernels need torch and Triton only. See --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=$(command -v "${PYTHON:-python3}") || {
    printf 'gpu_check: found no %s; set PYTHON to the one that has torch and Triton\n' \
        "${PYTHON:-python3}" >&2
    exit 2
}
exec "$python" "$root/scripts/gpu_check.py" "$@"
