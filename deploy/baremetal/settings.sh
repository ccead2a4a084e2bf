# shellcheck shell=bash
# The variables that the scripts of this folder know: defaults, what each may be, one line per
# mistake. Sourced. A variable comes from the environment, from --file, or as NAME=VALUE.

readonly HOST_FORM='^[A-Za-z0-9][A-Za-z0-9.-]*$|^[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+$'
readonly NAME_FORM='^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$'
readonly COUNT_FORM='^[1-9][0-9]{0,6}$'
readonly PORT_FORM='^[1-9][0-9]{0,4}$'
readonly COUNTS_FORM='^[1-9][0-9]{0,6}(,[1-9][0-9]{0,6})*$'

SETTINGS=()
PROBLEMS=()
WARNINGS=()
declare -A SETTING_FORM SETTING_SHAPE SETTING_MEANING SETTING_DEFAULT

# setting NAME DEFAULT FORM SHAPE MEANING: declares a variable. FORM is a pattern, SHAPE the same in
# words. An empty value always means "not set".
setting() {
    SETTINGS+=("$1")
    SETTING_DEFAULT[$1]=$2
    SETTING_FORM[$1]=$3
    SETTING_SHAPE[$1]=$4
    SETTING_MEANING[$1]=$5
}

problem() { if [[ "${PROBLEMS[*]-}" != *"$1"* ]]; then PROBLEMS+=("$1"); fi; }
warning() { WARNINGS+=("$1"); }

# Prints what was found, warnings first. Returns 1 if there is a problem.
tell_findings() {
    local line
    for line in ${WARNINGS[@]+"${WARNINGS[@]}"}; do echo "$PROGRAM: warning: $line" >&2; done
    for line in ${PROBLEMS[@]+"${PROBLEMS[@]}"}; do echo "$PROGRAM: $line" >&2; done
    WARNINGS=()
    [[ ${#PROBLEMS[@]} -eq 0 ]]
}

# Ends the script with status 2 if there is a problem; nothing has been changed by then.
stop_if_problems() { tell_findings || exit 2; }

# setting_help: prints a line for each variable.
setting_help() {
    local name
    for name in "${SETTINGS[@]}"; do
        printf '  %-16s %s' "$name" "${SETTING_MEANING[$name]}"
        if [[ -n ${SETTING_DEFAULT[$name]} ]]; then
            printf ' (default %s)' "${SETTING_DEFAULT[$name]}"
        fi
        printf '\n'
    done
}

# known_setting NAME: tells whether there is such a variable.
known_setting() { [[ -n ${SETTING_MEANING[$1]+there} ]]; }

# set_from PLACE NAME=VALUE: takes a variable over, or reports it as a problem.
set_from() {
    local name=${2%%=*}
    if known_setting "$name"; then
        printf -v "$name" %s "${2#*=}"
    else
        problem "$1: there is no variable $name; --help lists them"
    fi
}

# settings_of_all: prints the names of the variables of all scripts.
settings_of_all() {
    # shellcheck disable=SC2030  # It is meant to end with the subshell.
    (
        SETTINGS=()
        folder_settings && place_settings && model_settings && service_settings
        start_settings && sweep_settings
        echo " ${SETTINGS[*]} "
    )
}

# read_file FILE: takes over the lines NAME=VALUE of a file, as systemd's EnvironmentFile= reads
# them: # begins a comment, and quotes around a value are not part of it. One file serves all
# scripts: what another one knows, and what vLLM or NIXL know, goes to the environment.
read_file() {
    local line number=0 name value all
    if [[ ! -r $1 ]]; then
        problem "--file $1: cannot be read; give a file of lines NAME=VALUE"
        return
    fi
    all=$(settings_of_all)
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
        if [[ ! $line =~ ^[A-Z][A-Z0-9_]*= ]]; then
            problem "--file $1: line $number is not NAME=VALUE; mend it or begin it with #"
            continue
        fi
        name=${line%%=*} value=${line#*=}
        if [[ $value =~ ^\"(.*)\"$ || $value =~ ^\'(.*)\'$ ]]; then value=${BASH_REMATCH[1]}; fi
        if known_setting "$name"; then
            printf -v "$name" %s "$value"
        elif [[ $all == *" $name "* || $name =~ $THEIRS ]]; then
            export "$name=$value"
        else
            problem "--file $1: line $number: there is no variable $name; --help lists them"
        fi
    done <"$1"
}

# check_settings: fills in defaults and reports every value that is not of its form.
check_settings() {
    local name
    # shellcheck disable=SC2031  # Those of this shell are meant.
    for name in "${SETTINGS[@]}"; do
        if [[ -z ${!name-} ]]; then
            printf -v "$name" %s "${SETTING_DEFAULT[$name]}"
        fi
        if [[ -n ${!name} && ! ${!name} =~ ${SETTING_FORM[$name]} ]]; then
            problem "$name=${!name}: must be ${SETTING_SHAPE[$name]}"
        elif [[ ${SETTING_FORM[$name]} == "$PORT_FORM" && ${!name:-1} -gt 65535 ]]; then
            problem "$name=${!name}: must be ${SETTING_SHAPE[$name]}"
        fi
    done
}

# need NAME EXAMPLE: reports a variable that has no value and must have one.
need() {
    if [[ -z ${!1} ]]; then
        problem "$1 is not set (${SETTING_MEANING[$1]}): give it, e.g. $1=$2"
    fi
}

# --- The variables, by what they are for ---------------------------------------------------------

folder_settings() {
    setting RUN_DIR "$CHECKOUT/build/baremetal" '^/' "an absolute path" \
        "folder for logs, pid files and results"
}

place_settings() {
    local host="an address or a host name" port="a port, 1 to 65535"
    setting P_IP "" "$HOST_FORM" "$host" "address of the prefill node"
    setting D_IP "" "$HOST_FORM" "$host" "address of the decode node"
    setting LEASE_IP "" "$HOST_FORM" "$host" "address of the lease service; not set: P_IP"
    setting ROUTER_IP "" "$HOST_FORM" "$host" "address of the router; not set: P_IP"
    setting P_PORT 8100 "$PORT_FORM" "$port" "HTTP port of prefill"
    setting D_PORT 8200 "$PORT_FORM" "$port" "HTTP port of decode"
    setting LEASE_PORT 7600 "$PORT_FORM" "$port" "gRPC port of the lease service"
    setting ROUTER_PORT 8000 "$PORT_FORM" "$port" "the router's HTTP port"
    setting GRPC_PORT 8001 "$PORT_FORM" "$port" "the router's gRPC port"
}

model_settings() {
    setting MODEL "" '^[^-[:space:]][^[:space:]]*$' "a folder or a Hugging Face name, no spaces" \
        "model folder or Hugging Face name; the same on both nodes"
    setting SERVED_NAME "" "$NAME_FORM" "letters, digits, dots, dashes, at most 64" \
        "name under which clients ask for the model; not set: the last part of MODEL"
    setting VLLM_PYTHON python3 '^[^-[:space:]][^[:space:]]*$' "an interpreter, no spaces" \
        "interpreter of the environment that holds vLLM, NIXL and the connector"
}

service_settings() {
    setting KVTURN "$CHECKOUT/.venv/bin/kvturn" '^[^-]' "a command" "the kvturn command"
}

start_settings() {
    local words="words between single spaces"
    setting ROLE "" '^(prefill|decode|lease|router)$' "prefill, decode, lease or router" \
        "what to start: prefill, decode, lease or router"
    setting NAME "" "$NAME_FORM" "letters, digits, dots, dashes, at most 64" \
        "its name here and at the lease service; not set: prefill-0, decode-0, lease, router"
    setting DEVICE gpu '^(gpu|cpu)$' "gpu or cpu" "where engines compute: gpu or cpu"
    setting BIDIR on '^(on|off)$' "on or off" \
        "off: engines transfer KV from prefill to decode only, as stock vLLM does"
    setting BACKEND UCX '^(UCX|LIBFABRIC)$' "UCX or LIBFABRIC" \
        "NIXL's backend: LIBFABRIC on EFA, UCX elsewhere; the same on both nodes"
    setting FI_PROVIDER efa '^[a-z0-9_;-]+$' "a libfabric provider" \
        "libfabric's provider, with BACKEND=LIBFABRIC"
    setting UCX_TLS "" '^[a-z0-9_,^]+$' "UCX transports, with commas" "UCX's transports"
    setting UCX_NET_DEVICES "" '^[A-Za-z0-9_.:,-]+$' "UCX devices, with commas" \
        "UCX's devices; not set: all, on loopback lo"
    setting SIDE_PORT "" "$PORT_FORM" "a port, 1 to 65535" \
        "port of NIXL's side channel; not set: 5600 for prefill, 5700 for decode"
    setting GPUS "" '^[0-9]+(,[0-9]+)*$' "GPU numbers, with commas" \
        "GPUs of this engine; not set: the first TP"
    setting TP 1 "$COUNT_FORM" "a number from 1" "tensor-parallel size"
    setting GPU_MEMORY 0.90 '^0?[.][0-9]+$' "a share between 0 and 1, e.g. 0.90" \
        "share of GPU memory that vLLM takes"
    setting CPU_KV_GIB 1 "$COUNT_FORM" "a number from 1" "KV memory in GiB, with DEVICE=cpu"
    setting CPU_THREADS 1 "$COUNT_FORM" "a number from 1" "computing threads, with DEVICE=cpu"
    setting MAX_MODEL_LEN "" "$COUNT_FORM" "a number of tokens" \
        "longest prompt and answer in tokens; not set: the model's"
    setting PREFIX_CACHING on '^(on|off)$' "on or off" "vLLM's own prefix caching"
    setting EXTRA_CONFIG "" '^[{].*[}]$' "a JSON object" \
        "more keys of kv_connector_extra_config, as a JSON object"
    setting VLLM_ARGS "" '^[^[:space:]].*$' "$words" "more arguments for vLLM"
    setting LEASE_ARGS "" '^[^[:space:]].*$' "$words" "more arguments for kvturn lease"
    setting ROUTER_ARGS "" '^[^[:space:]].*$' "$words" "more arguments for kvturn router"
    setting READY_TIMEOUT 900 "$COUNT_FORM" "a number of seconds from 1" \
        "seconds until it must be ready"
    cleanup_settings
}

cleanup_settings() {
    setting STOP_GRACE 30 "$COUNT_FORM" "a number of seconds from 1" \
        "seconds between SIGTERM and SIGKILL"
}

sweep_settings() {
    setting CONTEXTS 2000,8000,32000 "$COUNTS_FORM" "numbers with commas" \
        "lengths of first prompts, in tokens"
    setting TURNS 4 "$COUNTS_FORM" "numbers with commas" "turns of a conversation"
    setting CONCURRENCY 1,4 "$COUNTS_FORM" "numbers with commas" "conversations held at once"
    setting REPEATS 3 "$COUNT_FORM" "a number from 1" "times that every cell is measured"
    setting SUFFIX 100 "$COUNT_FORM" "a number from 1" "tokens that each later turn adds"
    setting ANSWER 64 "$COUNT_FORM" "a number from 1" "longest answer in tokens"
    setting ARMS on,off '^(on|off|on,off|off,on)$' "on, off or on,off" \
        "on: turns may reuse KV; off: turns ask for no reuse"
    setting DRIVER kvturn '^(kvturn|vllm)$' "kvturn or vllm" \
        "what holds the conversations: ours, or vLLM's benchmark_serving_multi_turn.py"
    setting VLLM_SOURCE "" '^/' "an absolute path" \
        "source tree of vLLM, with DRIVER=vllm; not set: looked for in the usual places"
    setting API_KEY_FILE "" '^/' "an absolute path" "file with the API key of an own router"
    setting ROUTER_URL "" '^https?://[^[:space:]]+$' "an http:// or https:// address" \
        "base URL of the router; not set: http://ROUTER_IP:ROUTER_PORT"
    setting CA_FILE "" '^/' "an absolute path" "authorities of an https router"
    setting LABEL "" "$NAME_FORM" "letters, digits, dots, dashes, at most 64" \
        "name of the result; not set: the time of day"
    setting TIMEOUT 600 "$COUNT_FORM" "a number of seconds from 1" "seconds that a turn may take"
}

# Variables that belong to vLLM, NIXL and what they stand on; a file may hold them too.
readonly THEIRS='^(VLLM|HF|NIXL|UCX|FI|NCCL|CUDA|OMP|GLOO|OTEL|KVTURN|GRPC)_|^(LD_LIBRARY_PATH|PATH)$'

# quoted WORD...: prints words so that a shell reads them back as they are.
quoted() {
    local word
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            printf '%s ' "$word"
        else
            printf '%s ' "${word@Q}"
        fi
    done
    printf '\n'
}

# url_host HOST: prints a host as it stands in a URL.
url_host() { if [[ $1 == *:* ]]; then printf '[%s]' "$1"; else printf '%s' "$1"; fi; }

# check_hosts NAME...: reports numbers that look like an IPv4 address and are none.
check_hosts() {
    local name octet='(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'
    for name in "$@"; do
        if [[ ${!name} =~ ^[0-9.]+$ && ! ${!name} =~ ^$octet(\.$octet){3}$ ]]; then
            problem "$name=${!name}: is no IPv4 address; it has four numbers from 0 to 255"
        fi
    done
}

# check_told NAME...: reports addresses that stand for all of a machine's, and lead nowhere.
check_told() {
    local name
    for name in "$@"; do
        if [[ ${!name} == 0.0.0.0 || ${!name} =~ ^[0:]*::[0:]*$ ]]; then
            problem "$name=${!name}: nobody can reach that; give an address of the node that the others reach"
        fi
    done
}

# is_loopback HOST: tells whether an address stays on this machine.
is_loopback() { [[ $1 == 127.* || $1 == ::1 || $1 == localhost ]]; }
