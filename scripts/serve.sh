#!/usr/bin/env bash
# Serves SmolLM2-135M-Instruct with the extension on this machine's CPU; sets everything up first.
# Arguments go to `python -m sglang.launch_server`: --port, --ext-config, another --model-path, …
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
python=${SGLEXT_VENV:-$root/.venv}/bin/python

defaults=()
own_model=
for argument in "$@"; do
    case $argument in
        --model | --model=* | --model-path | --model-path=* | --config | --config=* | -h | --help)
            own_model=1 ;;
    esac
done
if [[ -z $own_model ]]; then
    model=$("$python" -m sgl_ext.models SmolLM2-135M-Instruct)
    # 64k tokens of KV are 1.4 GiB; SGLang would otherwise take most of the machine's memory.
    defaults=(--model-path "$model" --served-model-name SmolLM2-135M-Instruct --max-total-tokens 65536)
fi

command=("$python" -m sglang.launch_server --enable-ext "${defaults[@]}" "$@")
logs=$("$python" -c 'from sgl_ext.packages import cache_dir; print(cache_dir() / "logs")')
if ! mkdir -p "$logs" 2>/dev/null || ! chmod 700 "$logs" 2>/dev/null || [[ ! -w $logs ]]; then
    printf 'sgl_ext: starting the server (about 25 s); no log: %s cannot be written\n' "$logs" >&2
    exec "${command[@]}"
fi
find "$logs" -name 'serve-*.log' -mtime +7 -delete
log=$logs/serve-$(date +%Y%m%d-%H%M%S)-$$.log
(umask 077 && : >"$log")

# SGLang kills every child of its process before it prints why it ends. The copy into the log is
# therefore a child of this shell, which waits for both and passes on SIGTERM and SIGHUP.
exec 3> >(exec tee -i "$log")
copy=$!
env --default-signal=INT,QUIT "${command[@]}" >&3 2>&1 3>&- &
server=$!
exec 3>&-
trap 'kill -TERM "$server" 2>/dev/null || true' TERM HUP
trap : INT QUIT  # a terminal also sends them to the server
printf 'sgl_ext: starting the server (about 25 s); log: %s\n' "$log" >&2
ended() { ! kill -0 "$server" 2>/dev/null; }
until ended; do wait "$server" || true; done
status=0
wait "$server" || status=$?
wait "$copy" || true
exit "$status"
