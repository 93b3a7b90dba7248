#!/usr/bin/env bash
# Tests an older supported SGLang release: the quick unit tests of what uses SGLang, an engine whose
# answers are compared with stock SGLang's, and servers. The release is installed from the package
# index beside that of the environment, with the environment's other packages.
#
#   scripts/release_tests.sh                           # the oldest release that is supported
#   scripts/release_tests.sh 0.5.22                    # this one
#   scripts/release_tests.sh 0.5.22 tests/engine -k rows   # further arguments go to pytest
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
export PATH=${SGLEXT_VENV:-$root/.venv}/bin:$PATH

version=${1:-$(python -c 'import sgl_ext; print(sgl_ext.SUPPORTED_SGLANG[0])')}
shift || true
release=$root/build/sglang-$version
if [[ ! -e $release/.complete ]]; then
    rm -rf "$release"
    # Python compiles only the modules that are imported, and once.
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --only-binary :all: --target "$release" "sglang==$version" || {
        echo "sgl_ext: SGLang $version cannot be installed, see above; it comes from pip's package index" >&2
        exit 1
    }
    touch "$release/.complete"
fi
# Processes that tests and SGLang start inherit the variable.
export PYTHONPATH=$release${PYTHONPATH:+:$PYTHONPATH}
python scripts/resolved.py "$version" "$release"
echo "sgl_ext: testing with SGLang $version" >&2

if (($# == 0)); then
    python -m sgl_ext.models SmolLM2-135M-Instruct >/dev/null
    mapfile -t unit < <(grep -rlE '(from|import) sglang|sgl_ext\.engine' tests/unit --include='test_*.py' --exclude=test_seams.py)
    # The table of hooks is that of the newest release, with which test_seams.py compares, too.
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" \
        --deselect tests/unit/engine/test_hooks.py::test_the_table_of_hooks_is_up_to_date \
        "${unit[@]}" tests/engine/test_engine.py tests/engine/test_tiers.py tests/server/test_serving.py
fi
exec python -m pytest "$@"
