#!/bin/sh
# Builds images of the stack: build.sh [kvturn|engine-cpu|engine-gpu|otel-collector]...
# By default those of the CPU profile. Needs BuildKit: Docker 20.10, or a newer one with buildx.
#
# docker compose builds them too; this passes what compose cannot in every version, how to reach
# package indexes, as build secrets, which do not stay in the images:
#   INDEX_ENV=FILE  variables of pip and uv, NAME=VALUE lines (UV_DEFAULT_INDEX, PIP_INDEX_URL...)
#   CA_FILE=FILE    authorities to trust, in PEM
#   DOCKER=PROGRAM  the client to run, by default docker
set -eu

refuse() {
    echo "build.sh: $1" >&2
    exit 2
}

case ${1:-} in -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
[ $# -gt 0 ] || set -- kvturn engine-cpu otel-collector
for name in "$@"; do
    case $name in
        kvturn | engine-cpu | engine-gpu | otel-collector) ;;
        *) refuse "no image $name; choose from kvturn, engine-cpu, engine-gpu, otel-collector" ;;
    esac
done
for file in "${INDEX_ENV:-}" "${CA_FILE:-}"; do
    [ -z "$file" ] || [ -r "$file" ] ||
        refuse "cannot read $file; give INDEX_ENV and CA_FILE a file each, or leave them out"
done
# Files are meant from where this was called.
INDEX_ENV=${INDEX_ENV:+$(realpath "$INDEX_ENV")}
CA_FILE=${CA_FILE:+$(realpath "$CA_FILE")}
cd "$(dirname "$0")"

# As compose does: .env says, and the shell's variables win.
while IFS='=' read -r name value; do
    case $name in
        '' | '#'*) continue ;;
        *[!A-Za-z0-9_]* | [0-9]*) refuse ".env: $name: write NAME=VALUE" ;;
    esac
    eval "[ -n \"\${$name+set}\" ]" || export "$name=$value"
done < .env

build() {
    file=$1 image=$2
    shift 2
    [ -z "${INDEX_ENV:-}" ] || set -- "$@" --secret "id=index.env,src=$INDEX_ENV"
    [ -z "${CA_FILE:-}" ] || set -- "$@" --secret "id=ca.pem,src=$CA_FILE"
    DOCKER_BUILDKIT=1 ${DOCKER:-docker} build --file "images/$file.Dockerfile" --tag "$image" \
        "$@" ../..
}

for name in "$@"; do
    case $name in
        kvturn) build "$name" "$KVTURN_IMAGE" --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" ;;
        engine-cpu)
            build "$name" "$ENGINE_CPU_IMAGE" --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" \
                --build-arg "TORCH_BACKEND=$TORCH_BACKEND"
            ;;
        engine-gpu)
            build "$name" "$ENGINE_GPU_IMAGE" --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" \
                --build-arg "VLLM_IMAGE=$VLLM_IMAGE"
            ;;
        otel-collector)
            build "$name" "$COLLECTOR_IMAGE" --build-arg "BUSYBOX_IMAGE=$BUSYBOX_IMAGE" \
                --build-arg "OTEL_COLLECTOR_IMAGE=$OTEL_COLLECTOR_IMAGE"
            ;;
    esac
done
