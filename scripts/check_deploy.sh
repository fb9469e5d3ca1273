#!/bin/sh
# Checks deploy/ with the tools of its formats: `make check-deploy`. A tool that is missing is named, and what it would
# have checked counts as failed. HELM, PROMTOOL and so on name them where they are not on PATH.
set -u
HELM=${HELM:-helm}
PROMTOOL=${PROMTOOL:-promtool}
KUBERNETES_VALIDATE=${KUBERNETES_VALIDATE:-kubernetes-validate}
cd "$(dirname "$0")/.." || exit 2
chart=deploy/helm/kproxy
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=

# checked WHAT TOOL COMMAND...
checked() {
    what=$1 tool=$2
    shift 2
    if ! command -v "$tool" >/dev/null; then
        echo "FAIL  $what: there is no $tool"
    elif "$@" >"$work/said" 2>&1; then
        echo "ok    $what"
        return
    else
        echo "FAIL  $what"
        sed 's/^/      /' "$work/said"
    fi
    failed=yes
}

template() {
    "$HELM" template kproxy "$chart" --namespace kproxy --kube-version 1.34.0 "$@"
}

# Values that must not render, each with a word of the error.
refuses() {
    said=$1
    shift
    if template "$@" >"$work/refused" 2>&1; then
        echo "it renders: $*"
        return 1
    fi
    grep -q -- "$said" "$work/refused" || { cat "$work/refused"; return 1; }
}

# Values that must render, each with a word of the output.
shows() {
    said=$1
    shift
    template "$@" | grep -q -- "$said"
}

checked "deploy/kubernetes is what the chart renders" "$HELM" scripts/kubernetes.sh --check
for source in kafka kafscale reference secured; do
    checked "chart: lint, $source" "$HELM" "$HELM" lint --strict --quiet "$chart" -f "$chart/examples/$source.yaml"
done
checked "chart: no etcd is refused" "$HELM" refuses etcd.endpoints
checked "chart: no bootstrap is refused" "$HELM" refuses ownership.bootstrap --set ownership.source=kafka
checked "chart: several pods without an etcd are refused" "$HELM" \
    refuses replicas --set ownership.source=kafka,'ownership.bootstrap={k:9092}'
checked "chart: a misspelt value is refused" "$HELM" refuses replica -f $chart/examples/kafka.yaml --set replica=2
checked "chart: a misspelt option is refused" "$HELM" \
    refuses drain -f $chart/examples/kafka.yaml --set config.limits.drain_sec=2
checked "chart: values give every key, and secrets only by Secrets" "$HELM" \
    env HELM="$HELM" .venv/bin/python -m pytest -q tests/deploy/chart_values.py
checked "chart: helm test speaks TLS where the gateway does" "$HELM" \
    shows KPROXY_BROKER_TLS__ENABLED -f $chart/examples/kafka.yaml --set config.tls.cert=c,config.tls.key=k
template -f $chart/examples/kafka.yaml --set workers=4,monitoring.enabled=true,external.enabled=true \
    --set external.domain=kafka.example.org,networkPolicy.clientsFrom[0].ipBlock.cidr=10.0.0.0/8 \
    --set mode=gateway,image.digest="sha256:$(printf '%064d' 0)" >"$work/full.yaml" 2>/dev/null
# Prometheus' operator has schemas of its own.
awk 'BEGIN { RS = "---\n"; ORS = "---\n" } !/monitoring.coreos.com/' "$work/full.yaml" >"$work/core.yaml"
template -f $chart/examples/secured.yaml >"$work/secured.yaml" 2>/dev/null
for file in deploy/kubernetes/*.yaml "$work/core.yaml" "$work/secured.yaml"; do
    checked "Kubernetes: ${file##*/}" "$KUBERNETES_VALIDATE" "$KUBERNETES_VALIDATE" --strict --kubernetes-version 1.34 "$file"
done

checked "Prometheus: rules" "$PROMTOOL" "$PROMTOOL" check rules $chart/files/alerts.yaml
cp deploy/compose/prometheus.yaml tests/deploy/alerts_test.yaml $chart/files/alerts.yaml "$work"
checked "Prometheus: configuration" "$PROMTOOL" "$PROMTOOL" check config "$work/prometheus.yaml"
checked "Prometheus: alerts fire by given series" "$PROMTOOL" "$PROMTOOL" test rules "$work/alerts_test.yaml"
checked "Prometheus: alerts fire before real brokers" prometheus .venv/bin/python -m pytest -q tests/deploy/test_alerts_fire.py
checked "Prometheus: the dashboard has data" prometheus .venv/bin/python -m pytest -q tests/deploy/test_dashboard.py

for file in deploy/compose/kafka.yaml deploy/compose/reference.yaml; do
    checked "Compose: ${file##*/}" docker docker compose -f "$file" config --quiet
done

# systemd checks that the program exists; if kproxy is installed elsewhere, another program replaces it.
mkdir "$work/units"
for unit in kproxy.service kproxy-broker@.service; do
    sed -e "s#/opt/kproxy/bin/kproxy#$(command -v true)#" -e '/^Documentation=/d' "deploy/systemd/$unit" >"$work/units/$unit"
    checked "systemd: $unit" systemd-analyze systemd-analyze verify --man=no "$work/units/$unit"
done
checked "shell" shellcheck shellcheck deploy/docker/install.sh deploy/etcd/roles.sh scripts/*.sh

[ -z "$failed" ]
