#!/bin/sh
# Installs kproxy into a virtual environment of its own, from the lock files alone; run from the top of the repository.
# The last step lists what is in it, as an SBOM in CycloneDX's JSON.
set -eu
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/tools"
pip() { "$work/tools/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
pip install --quiet --require-hashes -r requirements-build.lock
pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work" .

python3 -m venv --without-pip "$target"
pip --python "$target/bin/python" install --quiet --require-hashes --only-binary :all: -r deploy/docker/requirements.lock
pip --python "$target/bin/python" install --quiet --no-deps --no-index "$work"/kproxy_kafka-*.whl

python3 -m venv "$work/sbom"
pip --python "$work/sbom/bin/python" install --quiet --require-hashes -r deploy/docker/requirements-sbom.lock
mkdir -p "$target/share/kproxy"
"$work/sbom/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
    --output-file "$target/share/kproxy/sbom.cdx.json" "$target/bin/python"
