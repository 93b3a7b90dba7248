#!/usr/bin/env bash
# Runs the master of a Mooncake store in the foreground, for this machine only, until Ctrl-C.
# Every process that joins the store adds its own memory; the master only knows where pages are.
# Arguments go to `mooncake_master` after the defaults: --rpc_port=50051, --metrics_port=9003,
# --rpc_address=0.0.0.0 to serve other machines (whoever reaches the port can use the store), …
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${SGLEXT_VENV:-$root/.venv}/bin/python
[[ -x $python ]] || python=python3

if ! package=$("$python" -c '
import importlib.util as util
spec = util.find_spec("mooncake")
print(spec.submodule_search_locations[0] if spec else exit(1))'); then
    printf 'mooncake.sh: Mooncake is not installed in %s; install it: %s -m pip install %s\n' \
        "$python" "$python" mooncake-transfer-engine-non-cuda >&2
    exit 1
fi
master=$package/mooncake_master
if missing=$(ldd "$master" | grep 'not found'); then
    printf 'mooncake.sh: libraries are missing:\n%s\n%s\n' "$missing" \
        'on Debian and Ubuntu, as root: apt-get update && apt-get install libibverbs1 libnuma1 libcurl4' >&2
    exit 1
fi
printf "mooncake.sh: starting the master; Ctrl-C stops it\n" >&2
exec "$master" --rpc_address=127.0.0.1 --metrics_host=127.0.0.1 --logtostderr=true --minloglevel=1 \
    "$@"
