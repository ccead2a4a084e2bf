#!/usr/bin/env bash
# Ends what start.sh has started under RUN_DIR, also after a crash of whatever kind, and nothing else.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd "$HERE/../.." && pwd)
PROGRAM=cleanup
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$HERE/settings.sh"
# shellcheck source-path=SCRIPTDIR source=process.sh
. "$HERE/process.sh"

usage() {
    cat <<END
usage: cleanup.sh [--dry-run] [--purge] [--file FILE] [variable=value ...] [NAME ...]

Ends the processes that start.sh has started on this machine: all, or those named (prefill-0,
decode-0, lease, router). Logs and results stay. What systemd has started is systemd's to stop.

  --dry-run    print what would be ended
  --purge      remove logs too; results of sweeps stay
  --file FILE  take variables from a file

Variables:
END
    setting_help
}

DRY_RUN=no PURGE=no NAMES=()

parse() {
    while [[ $# -gt 0 ]]; do
        case $1 in
        --help | -h) usage && exit 0 ;;
        --dry-run) DRY_RUN=yes ;;
        --purge) PURGE=yes ;;
        --file)
            read_file "${2-}"
            shift $(($# > 1))
            ;;
        -*) problem "$1: there is no such option; --help lists them" ;;
        *=*) set_from "the command line" "$1" ;;
        *) NAMES+=("$1") ;;
        esac
        shift
    done
}

# Sets KNOWN to the names that have a log or a pid file, routers first, then engines, then the rest.
find_known() {
    local file name
    declare -A seen=()
    KNOWN=()
    for file in "$RUN_DIR"/router*.pid "$RUN_DIR"/{prefill,decode}*.pid "$RUN_DIR"/*.pid \
        "$RUN_DIR"/logs/*.log; do
        name=$(basename "${file%.*}")
        if [[ -e $file && -z ${seen[$name]-} ]]; then
            seen[$name]=1
            KNOWN+=("$name")
        fi
    done
}

check_names() {
    local name
    for name in ${NAMES[@]+"${NAMES[@]}"}; do
        if [[ " ${KNOWN[*]-} " != *" $name "* ]]; then
            problem "$name: nothing of that name was started under $RUN_DIR; there is: ${KNOWN[*]-nothing}"
        fi
    done
}

main() {
    local name failed=0 running=0
    folder_settings
    cleanup_settings
    parse "$@"
    check_settings
    if [[ ${#PROBLEMS[@]} -eq 0 ]]; then
        find_known
        check_names
    fi
    stop_if_problems
    if [[ ${#NAMES[@]} -eq 0 ]]; then NAMES=(${KNOWN[@]+"${KNOWN[@]}"}); fi
    for name in ${NAMES[@]+"${NAMES[@]}"}; do
        find_holders "$name"
        running=$((running + ${#HOLDERS[@]}))
        if [[ $DRY_RUN == yes ]]; then
            echo "$name: ${HOLDERS[*]-nothing runs}"
            continue
        fi
        stop_process "$name" "$STOP_GRACE" || failed=1
        if [[ $PURGE == yes && $failed -eq 0 ]]; then rm -f -- "$(log_of "$name")"{,.old}; fi
    done
    if [[ $running -eq 0 ]]; then echo "nothing runs under $RUN_DIR"; fi
    exit "$failed"
}

main "$@"
