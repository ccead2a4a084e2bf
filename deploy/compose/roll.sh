#!/bin/sh
# Makes services anew, one after the other, each when the one before is healthy: a rolling restart
# or, after images or .env changed, a rolling upgrade. No turn fails: roll.sh SERVICE...
#   COMPOSE=COMMAND  how compose is called, with the -f options it was started with;
#                    by default `docker compose`, or docker-compose where there is no such plug-in
#   WAIT_S=SECONDS   how long a service may take to become healthy (300)
set -eu
cd "$(dirname "$0")"
if [ -z "${COMPOSE:-}" ]; then
    if docker compose version > /dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
usage() {
    echo "roll.sh: $1; usage: roll.sh SERVICE..., for example: roll.sh lease-1 lease-2 router-1 router-2" >&2
    exit 2
}
[ $# -gt 0 ] || usage "no service is named"
case $1 in -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' roll.sh
    exit
    ;;
esac
for service in "$@"; do
    case $service in '' | -*) usage "'$service' is no service" ;; esac
done
WAIT_S=${WAIT_S:-300}
case $WAIT_S in '' | *[!0-9]*)
    echo "roll.sh: WAIT_S must be whole seconds, e.g. 300, not $WAIT_S" >&2
    exit 2
    ;;
esac

# Compose tells once which project it is, Docker all else: compose takes a second for each answer.
some=$($COMPOSE ps -q | head -n 1)
[ -n "$some" ] || {
    echo "roll.sh: nothing runs here; nothing was done. Start it first: $COMPOSE up -d" >&2
    exit 1
}
project=$(docker inspect --format '{{index .Config.Labels "com.docker.compose.project"}}' "$some")

container() {
    docker ps --all --quiet --filter "label=com.docker.compose.project=$project" \
        --filter "label=com.docker.compose.service=$1" --filter label=com.docker.compose.oneoff=False
}

health() {
    [ -z "$1" ] || docker inspect --format '{{.State.Health.Status}}' "$1"
}

for service in "$@"; do
    [ "$(health "$(container "$service")")" = healthy ] || {
        echo "roll.sh: $service is not healthy; nothing was done. See: $COMPOSE ps, $COMPOSE logs $service" >&2
        exit 1
    }
done
# A service that does not take its settings would not come back.
$COMPOSE run --rm -T init || {
    echo "roll.sh: settings are wrong; nothing was done" >&2
    exit 2
}
for service in "$@"; do
    echo "$service: stopping, and starting anew"
    $COMPOSE up -d --no-deps --force-recreate "$service"
    new=$(container "$service")
    left=$WAIT_S
    until [ "$(health "$new")" = healthy ]; do
        [ "$left" -gt 0 ] || {
            echo "roll.sh: $service did not become healthy in $WAIT_S s; the rest was left alone." \
                "See: $COMPOSE logs $service" >&2
            exit 1
        }
        left=$((left - 1))
        sleep 1
    done
    echo "$service: healthy"
done
