#!/usr/bin/env bash
# Serves two models on this machine's CPU, one of which borrows the other's idle KV memory:
# SmolLM2-135M-Instruct on port 30000 (or $PORT), with own KV memory for 2,048 tokens, and a small
# untrained model of another geometry on the next port, which lends memory that it does not need.
# Ctrl-C ends both servers. Arguments go to the first one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
python=${SGLEXT_VENV:-$root/.venv}/bin/python
port=${PORT:-30000}

master=$("$python" -m sgl_ext.models SmolLM2-135M-Instruct)
worker=$("$python" -m sgl_ext.models Untrained-6x288)
directory=$(mktemp -d "${TMPDIR:-/tmp}/sgl_ext-peers-XXXXXX")

started=()
end() {
    trap - EXIT INT TERM
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$directory"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

serve() {
    "$python" -m sglang.launch_server --enable-ext --page-size 16 --mem-fraction-static 0.95 \
        --sleep-on-idle "$@" &
    started+=($!)
}

serve --model-path "$worker" --served-model-name Untrained-6x288 --port $((port + 1)) \
    --max-total-tokens 65536 \
    --ext-config "{\"peer\": {\"role\": \"worker\", \"directory\": \"$directory\"}}"
serve --model-path "$master" --served-model-name SmolLM2-135M-Instruct --port "$port" \
    --max-total-tokens 2048 \
    --ext-config "{\"peer\": {\"role\": \"master\", \"directory\": \"$directory\", \"capacity\": \"1GiB\"}}" \
    "$@"
printf 'sgl_ext: starting two servers (about a minute); then run: %s\n' \
    "$(dirname "$python")/sgl-ext top http://127.0.0.1:$port http://127.0.0.1:$((port + 1))" >&2
wait -n
