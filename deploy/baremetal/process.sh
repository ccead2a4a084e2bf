# shellcheck shell=bash
# Processes that the scripts of this folder start: one log and one pid file each, under RUN_DIR.
# Sourced. A process is ours if its standard output or error is our log: that holds for all that an
# engine starts in turn, whatever became of the engine, its pid or the machine since.

log_of() { printf '%s' "$RUN_DIR/logs/$1.log"; }
pid_file_of() { printf '%s' "$RUN_DIR/$1.pid"; }
command_file_of() { printf '%s' "$RUN_DIR/$1.command"; }
scratch_file_of() { printf '%s' "$RUN_DIR/$1.scratch"; }

# find_holders NAME: sets HOLDERS to the pids of all processes that write to a log of ours.
find_holders() {
    local log end pid last=""
    log=$(log_of "$1")
    HOLDERS=()
    [[ -e $log ]] || return 0
    for end in /proc/[0-9]*/fd/[12]; do
        if [[ $end -ef $log ]]; then
            pid=${end#/proc/} pid=${pid%%/*}
            [[ $pid == "$last" ]] || HOLDERS+=("$pid")
            last=$pid
        fi
    done
}

# find_leader NAME: sets LEADER to the pid of the process that was started, "" if it has ended.
find_leader() {
    local pid="" holder
    LEADER=""
    find_holders "$1"
    { read -r pid <"$(pid_file_of "$1")"; } 2>/dev/null || true
    for holder in ${HOLDERS[@]+"${HOLDERS[@]}"}; do
        if [[ $holder == "$pid" ]]; then LEADER=$pid; fi
    done
}

# launch NAME WORD...: starts a command in a session of its own. The child writes its pid file
# before it becomes the command, so there is no moment without one. Sets LAUNCHED to its pid.
launch() {
    local name=$1 log scratch
    shift
    log=$(log_of "$name")
    if [[ -e $log ]]; then mv -f "$log" "$log.old"; fi
    # Sockets and temporary files of an engine that is killed would stay for ever.
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/kvturn.XXXXXXXX")
    printf '%s\n' "$scratch" >"$(scratch_file_of "$name")"
    quoted "$@" >"$(command_file_of "$name")"
    # shellcheck disable=SC2016  # The child expands it.
    TMPDIR=$scratch setsid bash -c 'printf "%s\n" $$ >"$1"; shift; exec "$@"' \
        kvturn-launch "$(pid_file_of "$name")" "$@" </dev/null >"$log" 2>&1 9<&- &
    # shellcheck disable=SC2034  # start.sh reads it.
    LAUNCHED=$!
}

# answers_http HOST PORT PATH: tells whether a GET is answered with status 200.
answers_http() {
    local status=""
    {
        exec 8<>"/dev/tcp/$1/$2" || return 1
        printf 'GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$3" "$(url_host "$1")" >&8
        read -r -t 5 status <&8
        exec 8>&-
    } 2>/dev/null
    [[ $status == "HTTP/1."[01]" 200"* ]]
}

# answers_tcp HOST PORT: tells whether somebody listens.
answers_tcp() { (exec 8<>"/dev/tcp/$1/$2") 2>/dev/null; }

# last_line NAME: prints the last line of its log that is not empty.
last_line() {
    tail -c 4096 "$(log_of "$1")" 2>/dev/null | sed '/^[[:space:]]*$/d' | tail -n 1 | cut -c1-150
}

# await_ready NAME PID TIMEOUT_S WORD...: waits until the command WORD... succeeds; says every ten
# seconds how far it is. Returns 1 if the process ends or the time is over, having shown the end of
# its log.
await_ready() {
    local name=$1 pid=$2 timeout_s=$3 began=$SECONDS told=0 why="" line
    shift 3
    while ! "$@"; do
        if ! kill -0 "$pid" 2>/dev/null; then
            why="$name ended before it was ready"
        elif ((SECONDS - began >= timeout_s)); then
            why="$name was not ready within READY_TIMEOUT=$timeout_s seconds"
        fi
        if [[ -n $why ]]; then
            echo "$PROGRAM: $why; the end of $(log_of "$name"):" >&2
            tail -n 30 "$(log_of "$name")" | sed 's/^/  | /' >&2
            return 1
        fi
        if ((SECONDS - began >= told + 10)); then
            told=$((SECONDS - began))
            line=$(last_line "$name")
            echo "starting $name ($told s): ${line:-its log is empty yet}"
        fi
        sleep 0.5
    done
    echo "$name is ready ($((SECONDS - began)) s)"
}

# gone NAME SECONDS: waits for the end of all processes of a log; tells whether it came.
gone() {
    local until=$((SECONDS + $2))
    while :; do
        find_holders "$1"
        [[ ${#HOLDERS[@]} -eq 0 ]] && return 0
        ((SECONDS >= until)) && return 1
        sleep 0.2
    done
}

# stop_process NAME GRACE_S: ends all processes of a log, the one that was started first, so that an
# engine may end its own children in order. Returns 1 if something is left.
stop_process() {
    local name=$1 grace_s=$2 scratch=""
    find_leader "$name"
    if [[ ${#HOLDERS[@]} -gt 0 ]]; then
        echo "stopping $name (${HOLDERS[*]})"
        if [[ -n $LEADER ]]; then
            kill -TERM "$LEADER" 2>/dev/null || true
        else
            kill -TERM "${HOLDERS[@]}" 2>/dev/null || true
        fi
        if ! gone "$name" "$grace_s"; then
            kill -KILL "${HOLDERS[@]}" 2>/dev/null || true
            if ! gone "$name" 10; then
                echo "$PROGRAM: $name: ${HOLDERS[*]} cannot be ended; look at them with ps" >&2
                return 1
            fi
        fi
    fi
    { read -r scratch <"$(scratch_file_of "$name")"; } 2>/dev/null || true
    if [[ $scratch == */kvturn.???????? ]]; then rm -rf -- "$scratch"; fi
    rm -f -- "$(pid_file_of "$name")" "$(command_file_of "$name")" "$(scratch_file_of "$name")"
}
