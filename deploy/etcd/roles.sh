#!/bin/sh
# Makes three roles in etcd: what a proxy needs, what a reference broker needs, and what an administrator of users and
# rules of access needs (`kproxy user --etcd`, `kproxy acl --etcd`), and no more.
#
#   ETCDCTL_ENDPOINTS=https://etcd-0:2379 deploy/etcd/roles.sh [PREFIX]
#
# PREFIX is that of `kproxy serve --prefix`, /kafscale by default. The roles are kproxy-proxy, kproxy-broker and
# kproxy-admin; ROLES=a,b,c names them otherwise, for a second prefix on one etcd, and ROLES=a,b makes only the first two.
# etcdctl takes who it is, and its certificates, from the environment (ETCDCTL_USER, ETCDCTL_CACERT, ETCDCTL_CERT,
# ETCDCTL_KEY). Run it again after an upgrade: it grants what is missing, and takes away two rights of the proxy that
# earlier versions granted: to write everything under kproxy/, users and rules of access among it, and every key that
# begins with kproxy/own. Users are yours to make:
#
#   etcdctl user add kproxy && etcdctl user grant-role kproxy kproxy-proxy
#   etcdctl auth enable     # once for all, when every user of this etcd has a role, `root` among them
set -eu

prefix=${1:-/kafscale}
roles=${ROLES:-kproxy-proxy,kproxy-broker,kproxy-admin}
proxy=${roles%%,*}
others=${roles#*,}
broker=${others%%,*}
admin=
case $others in
    *,*) admin=${others#*,} ;;
esac

case $prefix in
    /*[!/]) ;;
    *) echo "roles.sh: '$prefix' is not a prefix of etcd keys: write one like /kafscale." >&2; exit 2 ;;
esac
case $roles in
    ,* | *,,* | *, | *,*,*,*) is_list= ;;
    *,*) is_list=yes ;;
    *) is_list= ;;
esac
if [ -z "$is_list" ] || [ "$proxy" = "$broker" ] || [ "$proxy" = "$admin" ] || [ "$broker" = "$admin" ]; then
    echo "roles.sh: ROLES names two or three roles, as in ROLES=kproxy-proxy,kproxy-broker,kproxy-admin." >&2
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
grant "$proxy" readwrite kproxy/proxies/ --prefix
grant "$proxy" readwrite kproxy/own/ --prefix
grant "$proxy" readwrite kproxy/own-proxies/ --prefix
grant "$proxy" readwrite kproxy/own-at-work
# One watch reads the three. Earlier versions could write by this grant as well: this narrows it.
grant "$proxy" read kproxy/own --prefix
grant "$proxy" readwrite producer-ids
# Clients' users and rules of access, which a proxy must not be able to change.
grant "$proxy" read kproxy/users/ --prefix
grant "$proxy" read kproxy/acls/ --prefix
# The grant of earlier versions, which has all of these. An error says that there is none.
etcdctl role revoke-permission "$proxy" "$prefix/kproxy/" --prefix >/dev/null 2>&1 || :

make_role "$broker"
grant "$broker" readwrite brokers/ --prefix
grant "$broker" readwrite partition-leases/ --prefix
grant "$broker" readwrite refbroker/ --prefix
grant "$broker" readwrite producer-ids

if [ -n "$admin" ]; then
    make_role "$admin"
    grant "$admin" readwrite kproxy/users/ --prefix
    grant "$admin" readwrite kproxy/acls/ --prefix
fi

echo "Roles for the keys under $prefix: $proxy, $broker${admin:+, $admin}."
