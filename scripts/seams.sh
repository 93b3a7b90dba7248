#!/usr/bin/env bash
# Compares another SGLang release with the installed one: which hooked functions and class members it
# lacks, has changed or has moved. Nothing is installed: the release is unpacked and read.
#
#   scripts/seams.sh 0.5.22          # a version on the package index
#   scripts/seams.sh sglang-….whl    # a wheel
set -euo pipefail
if (($# != 1)); then
    echo "usage: scripts/seams.sh VERSION|WHEEL" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${SGLEXT_VENV:-$root/.venv}/bin/python
folder=$(mktemp -d "${TMPDIR:-/tmp}/sgl_ext-seams-XXXXXX")
trap 'rm -rf "$folder"' EXIT
wheel=$1
if [[ $wheel != *.whl ]]; then
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$folder" "sglang==$1"
    wheel=$(echo "$folder"/*.whl)
fi
"$python" -m zipfile -e "$wheel" "$folder/release"
PYTHONWARNINGS=ignore "$python" "$root/scripts/seams.py" "$folder/release"
