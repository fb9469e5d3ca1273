#!/bin/sh
# Renders the Helm chart into deploy/kubernetes, for those without Helm; with --check says whether that is up to date.
set -eu
HELM=${HELM:-helm}
# What the chart is rendered for; Helm built from source would take a version of its own.
KUBERNETES=1.34.0
cd "$(dirname "$0")/.."
command -v "$HELM" >/dev/null || {
    echo "kubernetes.sh: there is no helm: install it, or name it as in HELM=/path/to/helm." >&2
    exit 2
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r deploy/helm "$work/helm"
mkdir "$work/kubernetes"

# render FILE RELEASE NAMESPACE CHART MORE...
render() {
    file=$1 release=$2 namespace=$3 chart=$4
    shift 4
    {
        echo "# Rendered from deploy/helm by \`make kubernetes\`; the addresses in it are examples."
        echo "#   kubectl create namespace $namespace && kubectl apply -f deploy/kubernetes/$file"
        # Nothing of Helm's own; its releases differ in empty lines.
        "$HELM" template "$release" "$chart" --namespace "$namespace" --kube-version "$KUBERNETES" --skip-tests "$@" |
            sed -e '/^# Source: /d' -e '/helm\.sh\/chart: /d' -e '/app.kubernetes.io\/managed-by: Helm/d' \
                -e '/^[[:space:]]*$/d'
    } > "$work/kubernetes/$file"
}

gateway=$work/helm/kproxy
for source in kafka kafscale reference; do
    # Users of Prometheus' operator have Helm.
    render "gateway-$source.yaml" kproxy kproxy "$gateway" -f "$gateway/examples/$source.yaml" --set monitoring.enabled=false
done
"$HELM" dependency update "$work/helm/examples/sidecar" >/dev/null
render sidecar-kafka.yaml orders orders "$work/helm/examples/sidecar"

if [ "${1:-}" = --check ]; then
    diff -ru deploy/kubernetes "$work/kubernetes" || {
        echo "deploy/kubernetes is not up to date: run \`make kubernetes\`" >&2
        exit 1
    }
else
    mkdir -p deploy/kubernetes
    rm -f deploy/kubernetes/*.yaml
    cp "$work"/kubernetes/*.yaml deploy/kubernetes/
fi
