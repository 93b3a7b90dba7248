#!/usr/bin/env bash
# Sets everything up, then runs the linter, the type check and all tests. With --fast, runs the
# linter, the type check and the unit tests that take no seconds each. With other arguments, runs
# only pytest with them: scripts/test.sh tests/unit/config -k size
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
bin=${SGLEXT_VENV:-$root/.venv}/bin
cd "$root"
export PATH=$bin:$PATH

if (($# == 0)) || [[ $1 == --fast ]]; then
    ruff check .
    ruff format --check .
    # The type check and the preparation of the tests' model use one thread each.
    mypy &
    types=$!
    prepared=0
    "$bin/python" -m sgl_ext.models SmolLM2-135M-Instruct >/dev/null || prepared=$?
    wait "$types"
    ((prepared == 0)) || exit "$prepared"
    # The engines of two workers share the cores, because the start of an engine mostly uses one
    # thread. All tests of a file run in one worker, so that they share their servers.
    chosen=(tests)
    (($# == 0)) || chosen=(tests/unit -m "not slow")
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}"
fi
exec "$bin/python" -m pytest "$@"
