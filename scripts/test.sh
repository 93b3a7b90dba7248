#!/usr/bin/env bash
# Sets everything up, then lints, type-checks and tests. Arguments go to pytest instead of the
# default run of everything: scripts/test.sh tests/test_config.py -k size
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
bin=${SGL_EXT_VENV:-$root/.venv}/bin
cd "$root"
export PATH=$bin:$PATH

if (($# == 0)); then
    ruff check .
    ruff format --check .
    # The type check and the model of the tests are one thread's work each.
    mypy &
    types=$!
    prepared=0
    "$bin/python" -m sgl_ext.models SmolLM2-135M-Instruct >/dev/null || prepared=$?
    wait "$types"
    ((prepared == 0)) || exit "$prepared"
    # Engines of two workers share the cores: starting one is mostly one thread's work. Each file
    # stays with one worker, which shares its servers.
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder tests
fi
exec "$bin/python" -m pytest "$@"
