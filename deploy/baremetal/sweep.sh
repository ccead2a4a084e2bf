#!/usr/bin/env bash
# Measures turns that may reuse KV against turns that may not, over a router that runs.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd "$HERE/../.." && pwd)
PROGRAM=sweep
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$HERE/settings.sh"

usage() {
    cat <<END
usage: sweep.sh [--dry-run] [--file FILE] [variable=value ...]
       sweep.sh --report DIR [DIR ...]

Holds conversations over the router for every combination of CONTEXTS, TURNS and CONCURRENCY, in
both arms by turns, and writes RUN_DIR/sweep/LABEL: rows.csv (a row for each turn), table.md and
table.csv (medians and quartiles of the turns after the first).

  --dry-run    print the command and change nothing
  --report     print one table over the results in several folders
  --file FILE  take variables from a file, e.g. node.env

Variables, also from the environment:
END
    setting_help
    cat <<END

Example, a short one:
  sweep.sh ROUTER_URL=http://10.0.0.5:8000 CONTEXTS=2000 CONCURRENCY=1 REPEATS=3
END
}

DRY_RUN=no REPORT=()

parse() {
    while [[ $# -gt 0 ]]; do
        case $1 in
        --help | -h) usage && exit 0 ;;
        --dry-run) DRY_RUN=yes ;;
        --report)
            shift
            if [[ $# -eq 0 ]]; then problem "--report: give the folders of the results"; fi
            REPORT=("$@")
            local folder
            for folder in "$@"; do
                if [[ ! -d $folder ]]; then problem "--report: $folder is no folder; give folders of results alone"; fi
            done
            return
            ;;
        --file)
            read_file "${2-}"
            shift $(($# > 1))
            ;;
        -*) problem "$1: there is no such option; --help lists them" ;;
        *=*) set_from "the command line" "$1" ;;
        *) problem "$1: neither an option nor VARIABLE=VALUE; --help lists both" ;;
        esac
        shift
    done
}

derive() {
    ROUTER_IP=${ROUTER_IP:-$P_IP}
    if [[ -z $ROUTER_URL && -z $ROUTER_IP ]]; then
        problem "ROUTER_URL is not set: give the router's address, e.g. ROUTER_URL=http://10.0.0.5:8000"
    fi
    ROUTER_URL=${ROUTER_URL:-http://$(url_host "$ROUTER_IP"):$ROUTER_PORT}
    if [[ $DRIVER == vllm ]]; then
        need MODEL meta-llama/Llama-3.1-8B-Instruct
        if [[ -n $API_KEY_FILE ]]; then
            problem "API_KEY_FILE=$API_KEY_FILE: vLLM's benchmark takes keys on its command line only, where all users of the node see them; take DRIVER=kvturn"
        fi
    fi
    LABEL=${LABEL:-$(date +%Y%m%d-%H%M%S)}
    OUT=$RUN_DIR/sweep/$LABEL
    if [[ -e $OUT/rows.csv && $DRY_RUN == no ]]; then
        problem "LABEL=$LABEL: $OUT holds a result already; give another LABEL, or none"
    fi
    PYTHON=$(dirname "$KVTURN")/python
    if [[ $DRY_RUN == no && ! -x $PYTHON ]]; then
        problem "KVTURN=$KVTURN: there is no Python beside it; run scripts/setup.sh workspace in the checkout"
    fi
}

# Sets COMMAND.
sweep_command() {
    COMMAND=("$PYTHON" -m bench.sweep --url "$ROUTER_URL" --out "$OUT" --label "$LABEL"
        --contexts "$CONTEXTS" --turns "$TURNS" --concurrency "$CONCURRENCY" --repeats "$REPEATS"
        --arms "$ARMS" --suffix "$SUFFIX" --answer "$ANSWER" --timeout "$TIMEOUT"
        --driver "$DRIVER")
    if [[ -n $SERVED_NAME ]]; then COMMAND+=(--model "$SERVED_NAME"); fi
    if [[ -n $API_KEY_FILE ]]; then COMMAND+=(--api-key-file "$API_KEY_FILE"); fi
    if [[ -n $CA_FILE ]]; then COMMAND+=(--ca "$CA_FILE"); fi
    if [[ $DRIVER == vllm ]]; then
        COMMAND+=(--vllm-python "$VLLM_PYTHON" --tokenizer "$MODEL")
        if [[ -n $VLLM_SOURCE ]]; then COMMAND+=(--vllm-source "$VLLM_SOURCE"); fi
    fi
}

main() {
    local status=0
    folder_settings && place_settings && model_settings && service_settings && sweep_settings
    parse "$@"
    check_settings
    if [[ ${#REPORT[@]} -gt 0 && ${#PROBLEMS[@]} -eq 0 ]]; then
        local folder folders=()
        for folder in "${REPORT[@]}"; do folders+=("$(realpath -m "$folder")"); done
        cd "$CHECKOUT"
        exec "$(dirname "$KVTURN")/python" -m bench.sweep --report "${folders[@]}"
    fi
    if [[ ${#PROBLEMS[@]} -eq 0 ]]; then derive; fi
    stop_if_problems
    sweep_command
    if [[ $DRY_RUN == yes ]]; then
        quoted "${COMMAND[@]}"
        return
    fi
    if ! mkdir -p "$OUT" 2>/dev/null; then
        problem "RUN_DIR=$RUN_DIR: cannot be written; give a folder of your own"
        stop_if_problems
    fi
    cd "$CHECKOUT"
    "${COMMAND[@]}" || status=$?
    echo "results: $OUT"
    return "$status"
}

main "$@"; exit
