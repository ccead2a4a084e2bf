#!/usr/bin/env bash
# Starts one process of a prefill/decode pair on this machine, by ROLE, and waits until it is ready.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(cd "$HERE/../.." && pwd)
PROGRAM=start
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$HERE/settings.sh"
# shellcheck source-path=SCRIPTDIR source=machine.sh
. "$HERE/machine.sh"
# shellcheck source-path=SCRIPTDIR source=process.sh
. "$HERE/process.sh"

usage() {
    cat <<END
usage: start.sh [--dry-run | --check | --foreground | --wait] [--file FILE] [variable=value ...]

Starts a prefill engine, a decode engine, the lease service or the router on this machine and waits
until it is ready. cleanup.sh ends it.

  --dry-run     print the command and change nothing
  --check       only look whether this machine has what it needs
  --foreground  become the process, for systemd
  --wait        only wait until it is ready, for systemd
  --file FILE   take variables from a file, e.g. node.env

Variables, also from the environment:
END
    setting_help
    cat <<END

Example, on one machine without GPUs:
  start.sh ROLE=prefill DEVICE=cpu P_IP=127.0.0.1 D_IP=127.0.0.1 MODEL=/models/small
END
}

MODE=start

parse() {
    while [[ $# -gt 0 ]]; do
        case $1 in
        --help | -h) usage && exit 0 ;;
        --dry-run | --check | --foreground | --wait)
            if [[ $MODE != start && $MODE != "${1#--}" ]]; then
                problem "--$MODE and $1: give one of them"
            fi
            MODE=${1#--}
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

# What follows from the variables: OWN_IP, PORT, NAME and so on, and what contradicts itself.
derive() {
    need ROLE prefill
    need P_IP 10.0.0.5
    need D_IP 10.0.0.6
    LEASE_IP=${LEASE_IP:-$P_IP}
    ROUTER_IP=${ROUTER_IP:-$P_IP}
    check_hosts P_IP D_IP LEASE_IP ROUTER_IP
    # What the others are told must lead to one machine.
    check_told P_IP D_IP
    if [[ $ROLE != lease ]]; then check_told LEASE_IP; fi
    case $ROLE in
    prefill) OWN_IP=$P_IP PORT=$P_PORT PORT_SETTING=P_PORT SIDE_PORT=${SIDE_PORT:-5600} ;;
    decode) OWN_IP=$D_IP PORT=$D_PORT PORT_SETTING=D_PORT SIDE_PORT=${SIDE_PORT:-5700} ;;
    lease) OWN_IP=$LEASE_IP PORT=$LEASE_PORT PORT_SETTING=LEASE_PORT NAME=${NAME:-lease} ;;
    router) OWN_IP=$ROUTER_IP PORT=$ROUTER_PORT PORT_SETTING=ROUTER_PORT NAME=${NAME:-router} ;;
    esac
    NAME=${NAME:-$ROLE-0}
    if [[ -n $ROLE ]]; then derive_ports; fi
    [[ $ROLE == prefill || $ROLE == decode ]] || return 0
    need MODEL meta-llama/Llama-3.1-8B-Instruct
    SERVED_NAME=${SERVED_NAME:-$(basename "${MODEL:-model}")}
    if [[ $DEVICE == cpu && $BACKEND == LIBFABRIC ]]; then
        problem "BACKEND=LIBFABRIC: has not been tried with DEVICE=cpu; set BACKEND=UCX"
    fi
    if [[ $DEVICE == cpu && -n $GPUS ]]; then
        problem "GPUS=$GPUS: has no meaning with DEVICE=cpu; leave it out"
    fi
    if is_loopback "$P_IP" && ! is_loopback "$D_IP" || is_loopback "$D_IP" && ! is_loopback "$P_IP"; then
        problem "P_IP=$P_IP and D_IP=$D_IP: one of them is reached on its own machine only; give addresses that both nodes reach"
    fi
}

# The addresses that the process listens on, and those that it is told: each is another one's.
derive_ports() {
    local own=("$PORT_SETTING=$OWN_IP:$PORT") told=("LEASE_PORT=$LEASE_IP:$LEASE_PORT") entry place
    local -A taken=()
    case $ROLE in
    lease) told=() ;;
    router)
        own+=("GRPC_PORT=$ROUTER_IP:$GRPC_PORT")
        told+=("P_PORT=$P_IP:$P_PORT" "D_PORT=$D_IP:$D_PORT")
        ;;
    *)
        own+=("SIDE_PORT=$OWN_IP:$SIDE_PORT")
        [[ $BIDIR == on ]] || told=()
        ;;
    esac
    for entry in "${own[@]}" ${told[@]+"${told[@]}"}; do
        place=${entry#*=}
        if [[ -n ${taken[$place]-} ]]; then
            problem "${entry%%=*}=${place##*:}: ${taken[$place]} has the same port on ${place%:*}; change one of them"
        fi
        taken[$place]=${entry%%=*}
    done
}

# add_arguments SETTING FLAG=VARIABLE...: adds the words of SETTING to COMMAND. A flag that a variable
# sets is refused: of two the last would win, and other processes be told the first.
add_arguments() {
    local setting=$1 words word pair
    shift
    read -ra words <<<"${!setting//$'\n'/ }"
    for word in ${words[@]+"${words[@]}"}; do
        if [[ $word == [\'\"]* ]]; then
            problem "$setting: $word begins with a quote, which is not read; words are parted by blanks and hold none"
        fi
        word=${word%%=*}
        for pair in "$@"; do
            if [[ ${word//_/-} == "${pair%%=*}" ]]; then
                problem "$setting: $word is what ${pair#*=} says; take it out and set ${pair#*=}"
            fi
        done
    done
    COMMAND+=(${words[@]+"${words[@]}"})
}

# extra_json OWN: sets ANSWER to the JSON object OWN with the keys of EXTRA_CONFIG, which go over it.
# Keys that are a variable's are a problem.
extra_json() {
    ask_python python3 '
import json, sys
own, more = sys.argv[1:3]
variables = dict(pair.split("=") for pair in sys.argv[3:])
def once(pairs):
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            sys.exit(f"{key} stands in it twice; take one out")
    return dict(pairs)
try:
    more = json.loads(more or "{}", object_pairs_hook=once)
except ValueError:
    sys.exit("not a JSON object; write it as {\"key\": \"value\"}")
for key in more:
    if key in variables:
        sys.exit(f"{key} is what {variables[key]} says; take it out and set {variables[key]}")
print(json.dumps({**json.loads(own), **more}))
' "$1" "$EXTRA_CONFIG" backends=BACKEND bidirectional_kv_xfer=BIDIR kvturn_engine_name=NAME || {
        problem "EXTRA_CONFIG=$EXTRA_CONFIG: ${ANSWER##*$'\n'}"
        ANSWER={}
    }
}

# Sets CONNECTOR to the value of --kv-transfer-config.
connector_json() {
    local extra='"backends": ["'$BACKEND'"]' buffer="" role=kv_producer
    [[ $ROLE == decode ]] && role=kv_consumer
    if [[ $BIDIR == on ]]; then
        extra+=', "bidirectional_kv_xfer": true'
        extra+=', "kvturn_lease_endpoint": "'$(url_host "$LEASE_IP")":$LEASE_PORT\""
        extra+=', "kvturn_engine_name": "'$NAME'"'
        extra+=', "kvturn_http_address": "http://'$(url_host "$OWN_IP"):$PORT'"'
    fi
    if [[ $DEVICE == cpu ]]; then
        buffer='"kv_buffer_device": "cpu", '
        # Engines on CPUs share their cores; NIXL's idle threads must not spin on them.
        if [[ $BIDIR == on ]]; then extra+=', "kvturn_nixl_progress_delay_us": 1000'; fi
    fi
    extra_json "{$extra}"
    CONNECTOR='{"kv_connector": "KvturnConnector", '
    CONNECTOR+='"kv_connector_module_path": "kvturn_connector.connector", '
    CONNECTOR+='"kv_role": "'$role'", '$buffer'"kv_load_failure_policy": "recompute", '
    CONNECTOR+='"kv_connector_extra_config": '$ANSWER'}'
}

# Sets ENVIRONMENT and COMMAND for an engine.
engine_command() {
    connector_json
    # Transfers and questions between the nodes never go through a proxy.
    ENVIRONMENT=("VLLM_HOST_IP=$OWN_IP" "VLLM_NIXL_SIDE_CHANNEL_HOST=$OWN_IP"
        "VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE_PORT" VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
        "no_proxy=${no_proxy:+$no_proxy,}$P_IP,$D_IP,$LEASE_IP")
    if [[ -d $MODEL ]]; then ENVIRONMENT+=(HF_HUB_OFFLINE=1); fi
    if is_loopback "$OWN_IP"; then
        UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}
        ENVIRONMENT+=(GLOO_SOCKET_IFNAME=lo)
    fi
    if [[ $BACKEND == UCX ]]; then
        ENVIRONMENT+=("UCX_NET_DEVICES=${UCX_NET_DEVICES:-all}")
        if [[ -n $UCX_TLS ]]; then ENVIRONMENT+=("UCX_TLS=$UCX_TLS"); fi
    else
        ENVIRONMENT+=("FI_PROVIDER=$FI_PROVIDER")
    fi
    # `vllm serve` looks for a distribution of that name, which CPU builds are not.
    COMMAND=("$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL"
        --served-model-name "$SERVED_NAME" --host "$OWN_IP" --port "$PORT"
        --enable-prompt-tokens-details --kv-transfer-config "$CONNECTOR")
    if [[ -n $MAX_MODEL_LEN ]]; then COMMAND+=(--max-model-len "$MAX_MODEL_LEN"); fi
    if [[ $PREFIX_CACHING == off ]]; then COMMAND+=(--no-enable-prefix-caching); fi
    device_command
    add_arguments VLLM_ARGS --model=MODEL --served-model-name=SERVED_NAME "--port=$PORT_SETTING" \
        --kv-transfer-config=EXTRA_CONFIG --max-model-len=MAX_MODEL_LEN --tensor-parallel-size=TP \
        -tp=TP --gpu-memory-utilization=GPU_MEMORY --enable-prefix-caching=PREFIX_CACHING \
        --no-enable-prefix-caching=PREFIX_CACHING
}

device_command() {
    if [[ $TP -gt 1 || $DEVICE == gpu ]]; then COMMAND+=(--tensor-parallel-size "$TP"); fi
    if [[ $DEVICE == gpu ]]; then
        COMMAND+=(--gpu-memory-utilization "$GPU_MEMORY")
        if [[ -n $GPUS ]]; then ENVIRONMENT+=("CUDA_VISIBLE_DEVICES=$GPUS"); fi
        return
    fi
    # vLLM's bfloat16 kernels need AVX-512 on x86; float32 is several times as fast without it.
    local dtype=bfloat16
    if grep -q '^flags' /proc/cpuinfo && ! grep -qw avx512f /proc/cpuinfo; then dtype=float32; fi
    COMMAND+=(--enforce-eager --dtype "$dtype")
    ENVIRONMENT+=("VLLM_CPU_KVCACHE_SPACE=$CPU_KV_GIB" VLLM_CPU_OMP_THREADS_BIND=nobind
        "OMP_NUM_THREADS=$CPU_THREADS")
    if [[ $TP -eq 1 ]]; then
        # One process: a worker beside the engine core would spin on the other engine's core.
        COMMAND+=(--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor)
    fi
}

# Sets ENVIRONMENT and COMMAND for the lease service or the router.
service_command() {
    ENVIRONMENT=("no_proxy=${no_proxy:+$no_proxy,}$P_IP,$D_IP,$LEASE_IP")
    if [[ $ROLE == lease ]]; then
        COMMAND=("$KVTURN" lease --host "$LEASE_IP" --port "$LEASE_PORT")
        add_arguments LEASE_ARGS --port=LEASE_PORT
    else
        COMMAND=("$KVTURN" router --host "$ROUTER_IP" --port "$ROUTER_PORT" --grpc-port "$GRPC_PORT"
            --lease "$(url_host "$LEASE_IP"):$LEASE_PORT"
            --prefill "http://$(url_host "$P_IP"):$P_PORT"
            --decode "http://$(url_host "$D_IP"):$D_PORT")
        add_arguments ROUTER_ARGS --port=ROUTER_PORT --grpc-port=GRPC_PORT
    fi
}

# is_ready: tells whether the process serves. What speaks TLS or gRPC is only asked for its port.
is_ready() {
    if [[ $ROLE == lease || " $ROUTER_ARGS $VLLM_ARGS " =~ \ --(tls-cert|ssl-certfile)[\ =] ]]; then
        answers_tcp "$OWN_IP" "$PORT"
    else
        answers_http "$OWN_IP" "$PORT" /health
    fi
}

prepare_run_dir() {
    if ! mkdir -p "$RUN_DIR/logs" 2>/dev/null || [[ ! -w $RUN_DIR/logs ]]; then
        problem "RUN_DIR=$RUN_DIR: cannot be written; give a folder of your own"
        stop_if_problems
    fi
    # One look and launch at a time; it ends with the script or with `exec 9<&-`.
    exec 9<"$RUN_DIR/logs"
    if ! flock -w 120 9; then
        problem "RUN_DIR=$RUN_DIR: another start.sh has been at it for two minutes; end it"
        stop_if_problems
    fi
}

# Ends the script if the process runs already: with success if it is the same.
leave_if_running() {
    find_leader "$NAME"
    [[ ${#HOLDERS[@]} -gt 0 ]] || return 0
    if [[ -z $LEADER ]]; then
        problem "$NAME: processes of an earlier start are left (${HOLDERS[*]}); run cleanup.sh $NAME"
    elif [[ $(<"$(command_file_of "$NAME")") != "$(quoted "$@")" ]]; then
        problem "$NAME runs already (pid $LEADER) with other settings; run cleanup.sh $NAME first"
    else
        echo "$NAME runs already (pid $LEADER, log $(log_of "$NAME"))"
        exec 9<&-
        await_ready "$NAME" "$LEADER" "$READY_TIMEOUT" is_ready || exit 1
        exit 0
    fi
    stop_if_problems
}

start() {
    prepare_run_dir
    leave_if_running "$@"
    check_machine
    stop_if_problems
    trap 'stop_process "$NAME" "$STOP_GRACE"; exit 130' INT TERM
    launch "$NAME" "$@"
    exec 9<&-
    echo "starting $NAME (pid $LAUNCHED, log $(log_of "$NAME"))"
    if ! await_ready "$NAME" "$LAUNCHED" "$READY_TIMEOUT" is_ready; then
        stop_process "$NAME" "$STOP_GRACE"
        exit 1
    fi
    trap - INT TERM
}

# For systemd, which sets MAINPID: waits for a process whose log is the journal.
wait_only() {
    local began=$SECONDS
    until is_ready; do
        if [[ -n ${MAINPID-} ]] && ! kill -0 "$MAINPID" 2>/dev/null; then
            echo "$PROGRAM: $NAME ended before it was ready" >&2
            exit 1
        fi
        if ((SECONDS - began >= READY_TIMEOUT)); then
            echo "$PROGRAM: $NAME was not ready within READY_TIMEOUT=$READY_TIMEOUT seconds" >&2
            exit 1
        fi
        sleep 1
    done
}

main() {
    folder_settings && place_settings && model_settings && service_settings && start_settings
    parse "$@"
    check_settings
    if [[ ${#PROBLEMS[@]} -eq 0 ]]; then derive; fi
    stop_if_problems
    if [[ $ROLE == prefill || $ROLE == decode ]]; then engine_command; else service_command; fi
    stop_if_problems
    set -- env "${ENVIRONMENT[@]}" "${COMMAND[@]}"
    case $MODE in
    dry-run) quoted "$@" ;;
    check)
        check_machine
        stop_if_problems
        echo "$NAME: this machine has what it needs"
        ;;
    foreground)
        check_machine
        stop_if_problems
        exec "$@"
        ;;
    wait) wait_only ;;
    start) start "$@" ;;
    esac
}

main "$@"; exit
