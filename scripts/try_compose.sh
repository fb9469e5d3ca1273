#!/bin/sh
# Builds the image, starts the reference brokers' Compose file, writes and reads a record as a client on this machine does,
# and removes what it started, volumes and all. Needs Docker.
set -eu
cd "$(dirname "$0")/.."
compose() { docker compose --project-name kproxy-trial -f deploy/compose/reference.yaml "$@"; }
trap 'compose down --volumes --timeout 40' EXIT
# A container is healthy if the image's health check succeeds: brokers and proxies serve.
compose up --build --detach --wait || { compose logs; exit 1; }
docker run --rm --network host --read-only kproxy:0.1.0 doctor --bootstrap 127.0.0.1:9092,127.0.0.1:9093
