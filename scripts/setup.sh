#!/usr/bin/env bash
# Prepares .venv for a machine without a GPU: the pinned packages of cpu.lock, whose hashes pip
# checks, and this package.
# Does nothing if the environment is up to date. The next run repairs an interrupted one.
#
#   SGLEXT_VENV    path of the virtual environment      (default: .venv beside this folder)
#   SGLEXT_PYTHON  the Python 3.11 to create it from    (default: python3.11, then python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${SGLEXT_VENV:-$root/.venv}
venv=${venv%/}
lock=$root/scripts/cpu.lock
torch_lock=$root/scripts/torch.lock
torch_cpu_index=https://download.pytorch.org/whl/cpu
need_mib=5000

say() { printf 'sgl_ext: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The stamp is a hash of all inputs of the environment. It is written last.
stamp=$venv/.sgl_ext_setup
native() { find "$root/kernels/native" -type f -print0 | sort -z | xargs -0 cat; }
key=$({ cat "$lock" "$torch_lock" "$root/pyproject.toml" "${BASH_SOURCE[0]}"; native; echo "$root"; } | sha256sum | cut -d' ' -f1)
done_already() { [[ -x $venv/bin/python && $(cat "$stamp" 2>/dev/null) == "$key" ]]; }

# Only the client of the remote tier needs system libraries.
missing_libraries() {
    local known package
    known=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null) || return 0
    for package in libibverbs1:libibverbs.so.1 libnuma1:libnuma.so.1 libcurl4:libcurl.so.4; do
        [[ $known == *"${package#*:} "* ]] || printf ' %s' "${package%%:*}"
    done
}
# System packages are only installed on CI; elsewhere the command is printed.
bring_libraries() {
    local packages install=(apt-get install -y --no-install-recommends)
    packages=$(missing_libraries)
    [[ -n $packages ]] || return 0
    if [[ -n ${CI:-} && $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        say "installing$packages for the remote tier"
        read -ra packages <<<"$packages"
        apt-get update >/dev/null 2>&1 || true
        DEBIAN_FRONTEND=noninteractive "${install[@]}" "${packages[@]}" >&2 || die "apt-get install failed"
        return 0
    fi
    say "the remote tier (Mooncake) needs system libraries; on Debian and Ubuntu, as root:" \
        "apt-get update && ${install[*]}$packages"
}
done_already && { [[ -z ${CI:-} ]] || bring_libraries; exit 0; }

mkdir -p "$(dirname "$venv")" || die "cannot create $(dirname "$venv"); set SGLEXT_VENV to a writable place"
exec 9>"$venv.lock" || die "cannot write $venv.lock; set SGLEXT_VENV to a writable place"
if ! flock -n 9; then
    say "another set-up of $venv is running; waiting for it (up to 30 minutes)"
    flock -w 1800 9 || die "the other set-up of $venv did not finish in 30 minutes; stop it and run this again"
fi
done_already && exit 0

python=${SGLEXT_PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[[ -n $python ]] || die "Python 3.11 is needed, no python3 was found; install it or set SGLEXT_PYTHON"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "$python does not run; set SGLEXT_PYTHON to a Python 3.11"
[[ $version == 3.11 ]] ||
    die "Python 3.11 is needed (the pinned packages are built for it), $python is $version; install 3.11 or set SGLEXT_PYTHON"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -e $headers/Python.h ]] ||
    die "Python's headers are needed, $headers/Python.h was not found; on Debian and Ubuntu: apt-get install python3.11-dev"
command -v c++ g++ clang++ >/dev/null ||
    die "a C++17 compiler is needed, none was found; on Debian and Ubuntu: apt-get install g++ make libssl-dev"
free_mib=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
[[ -d $venv || $free_mib -ge $need_mib ]] ||
    die "the environment needs $need_mib MiB, $(dirname "$venv") has $free_mib MiB free; free some or set SGLEXT_VENV"

bring_libraries
step() { say "[$1/5] $2"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
log=$venv/setup.log
stopped() {
    tail -n 15 "$log" >&2
    die "set-up stopped at: $*. Full log: $log. Run this script again to continue."
}
quietly() { "$@" >>"$log" 2>&1 || stopped "$@"; }
# Reads pip's output and prints the number of packages so far.
count() {
    awk -v tty="$([[ -t 2 ]] && echo 1)" '
        /^ *(Collecting|Processing) / { n++; if (tty) printf "\rsgl_ext:       %d packages", n; else if (n % 25 == 0) print "sgl_ext:       " n " packages"; fflush() }
        /^Installing /   { print (tty ? "\r" : "") "sgl_ext:       " n " packages, unpacking"; fflush() }
    ' >&2
}

rm -f "$stamp"
step 1 "virtual environment in $venv"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    # Only a virtual environment or an empty folder is replaced.
    [[ ! -e $venv || -f $venv/pyvenv.cfg || -z $(ls -A "$venv" 2>&1) ]] ||
        die "$venv exists and is not a virtual environment; move it, or set SGLEXT_VENV to another place"
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2 ||
        die "$python -m venv failed; on Debian and Ubuntu: apt-get install python3.11-venv"
fi
: >"$log"
step 2 "PyTorch (CPU build)"
# The default index of some machines has the CPU build; otherwise it is in PyTorch's own index.
pip install --no-deps -r "$torch_lock" >>"$log" 2>&1 ||
    quietly pip install --no-deps --extra-index-url "$torch_cpu_index" -r "$torch_lock"
step 3 "SGLang and $(($(grep -c '==' "$lock") - 1)) pinned packages (about 1 GB, a few minutes)"
pip install --no-deps --require-hashes -r "$lock" 2>&1 | tee -a "$log" | count || stopped "pip install -r $lock"
step 4 "sgl_ext and its native parts"
quietly pip install --no-deps --no-build-isolation --editable "$root"
quietly "$venv/bin/python" -m sgl_ext.engine.cpu.torchvision_bridge
step 5 "first import"
quietly "$venv/bin/python" -c 'import sglang.srt.server_args, sglang.srt.configs, sgl_ext'
# SGLang compiles its hash of pages when it is first used; only tiers use it.
"$venv/bin/python" -m sgl_ext.engine.tiers.page_hash >>"$log" 2>&1 ||
    say "tiers cannot be used yet: $(tail -n 1 "$log")"
echo "$key" >"$stamp"
say "environment ready"
