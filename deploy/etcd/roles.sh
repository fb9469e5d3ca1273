#!/bin/sh
# Makes two roles in etcd: what a proxy needs, and what a reference broker needs, and no more.
#
#   ETCDCTL_ENDPOINTS=https://etcd-0:2379 deploy/etcd/roles.sh [PREFIX]
#
# PREFIX is that of `kproxy serve --prefix`, /kafscale by default. The roles are kproxy-proxy and kproxy-broker; ROLES=a,b
# names them otherwise, for a second prefix on one etcd. etcdctl takes who it is, and its certificates, from the
# environment (ETCDCTL_USER, ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY). Run it again after an upgrade: it grants what is
# missing and takes nothing away. Users are yours to make:
#
#   etcdctl user add kproxy && etcdctl user grant-role kproxy kproxy-proxy
#   etcdctl auth enable     # once for all, when every user of this etcd has a role, `root` among them
set -eu

prefix=${1:-/kafscale}
roles=${ROLES:-kproxy-proxy,kproxy-broker}
proxy=${roles%%,*}
broker=${roles#*,}

case $prefix in
    /*[!/]) ;;
    *) echo "roles.sh: '$prefix' is no prefix of etcd keys: write one like /kafscale." >&2; exit 2 ;;
esac
if [ -z "$proxy" ] || [ -z "$broker" ] || [ "$proxy" = "$broker" ]; then
    echo "roles.sh: ROLES names two roles, as in ROLES=kproxy-proxy,kproxy-broker." >&2
    exit 2
fi

make_role() {
    # An error that is not "it is there already" shows again in the grants.
    etcdctl role get "$1" >/dev/null 2>&1 || etcdctl role add "$1"
}

# grant ROLE read|readwrite KEY [--prefix]
grant() {
    role=$1 access=$2 key=$3
    shift 3
    etcdctl role grant-permission "$role" "$access" "$prefix/$key" "$@" >/dev/null
}

make_role "$proxy"
# Who owns what, and where brokers are.
grant "$proxy" read partition-leases/ --prefix
grant "$proxy" read group-leases/ --prefix
grant "$proxy" read brokers/ --prefix
grant "$proxy" read metadata/snapshot
# Topics' ids and replicas; not refbroker/ as a whole, which has the secret by which brokers know each other.
grant "$proxy" read refbroker/topics/ --prefix
grant "$proxy" read refbroker/partitions/ --prefix
# The proxies themselves and their clients' claims, and the producer ids that they give out.
grant "$proxy" readwrite kproxy/ --prefix
grant "$proxy" readwrite producer-ids

make_role "$broker"
grant "$broker" readwrite brokers/ --prefix
grant "$broker" readwrite partition-leases/ --prefix
grant "$broker" readwrite refbroker/ --prefix
grant "$broker" readwrite producer-ids

echo "Roles for the keys under $prefix: $proxy and $broker."
