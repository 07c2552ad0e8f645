#!/usr/bin/env bash
# A Ray cluster of several nodes on this machine, to try what goes wrong only between nodes.
#
#   bash cluster/several_nodes.sh N           start N nodes, print RAY_ADDRESS, and stay until Ctrl-C
#   bash cluster/several_nodes.sh --exec I COMMAND …   run a command on node I, in the current folder
#   bash cluster/several_nodes.sh --join I    start node I as one more node of the running cluster
#   bash cluster/several_nodes.sh --kill I    kill node I with all its processes
#   bash cluster/several_nodes.sh --cut I     cut the network link of node I
#   bash cluster/several_nodes.sh --plug I    connect it again
#   bash cluster/several_nodes.sh --slow I MS PERCENT   delay packets from and to node I by MS, and lose PERCENT of them
#   bash cluster/several_nodes.sh --stop      kill all nodes
#
# Each node has its own network, mount, uts and pid namespace: its own address and host name, its own /tmp/ray and
# /dev/shm. Its hosts file maps its own name to 127.0.1.1, as Debian's does. A bridge in one more namespace connects the
# nodes, so that nothing of this machine's network changes. Node 0 is in the network, but runs no Ray. All other files
# are shared. Needs root, or unprivileged user namespaces.
#
# RAYRFT_NODES is the folder of the cluster's state (/tmp/rayrft-nodes); RAYRFT_NODE_CPUS the CPUs of a node (2);
# RAYRFT_NODE_STORE the bytes of its object store (100 MB); RAYRFT_NODE_SECRETLESS=1 starts it without a token;
# RAYRFT_NODE_ROOTLESS=1 takes a user namespace for root, too.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=${RAYRFT_NODES:-/tmp/rayrft-nodes}
ray=$here/../.venv/bin/ray
network=10.77.0
export PATH=$here/../.venv/bin:$PATH

fail() {
  printf 'several_nodes: %s\n' "$1" >&2
  exit "${2:-1}"
}

pid_of() { cat "$state/$1.pid" 2>/dev/null || fail "node $1 is not running"; }

# Run a command in the namespaces of a node; with via=exec in this process, which then gets its signals and exit status.
enter() {
  local node=$1 folder=$PWD
  shift
  ${via:-} nsenter -t "$(pid_of "$node")" -n -m -u -p -- env -C "$folder" RAY_ADDRESS="$network.1:6379" \
    RAY_AUTH_MODE="$(cat "$state/mode")" RAY_AUTH_TOKEN_PATH="$state/token" "$@"
}

# The first process of a node, inside its namespaces: its end is the node's.
node() {
  local node=$1
  hostname "node-$node"
  mkdir -p /tmp/ray
  mount -t tmpfs tmpfs /tmp/ray
  mount -t tmpfs tmpfs /dev/shm
  mount --bind "$state/hosts.$node" /etc/hosts
  mount --bind "$state/resolv.conf" /etc/resolv.conf
  ip link set lo up
  read -r _ <"$state/$node.cable"
  ip address add "$network.$((node ? node : 250))/24" dev eth0
  ip link set eth0 up
  # The head gives a node up after so many health checks of 13 s.
  export RAY_health_check_failure_threshold=4
  export RAY_AUTH_TOKEN_PATH=$state/token RAY_raylet_start_wait_time_s=120 RAY_AUTH_MODE
  RAY_AUTH_MODE=$(cat "$state/mode")
  local common=(--node-ip-address "$network.$node" --num-cpus "${RAYRFT_NODE_CPUS:-2}" --disable-usage-stats --block
    --object-store-memory "${RAYRFT_NODE_STORE:-100000000}" --labels "node=$node")
  case $node in
    0) exec sleep infinity ;;
    # Not by exec: the shell reaps the processes that end.
    1) "$ray" start --head --port 6379 --dashboard-host "$network.1" "${common[@]}" ;;
    *) "$ray" start --address "$network.1:6379" "${common[@]}" ;;
  esac
}

# Start a node, and plug it into the bridge.
start() {
  local node=$1 keeper
  printf '127.0.0.1 localhost\n127.0.1.1 node-%s\n' "$node" >"$state/hosts.$node"
  for other in 1 2 3 4 5 6 7 8; do
    [ "$other" = "$node" ] || printf '%s.%s node-%s\n' "$network" "$other" "$other" >>"$state/hosts.$node"
  done
  mkfifo "$state/$node.cable"
  setsid unshare --net --mount --uts --pid --fork --mount-proc --kill-child bash "$here/several_nodes.sh" --node "$node" \
    >"$state/$node.log" 2>&1 </dev/null &
  keeper=$!
  until pgrep -P "$keeper" >"$state/$node.pid"; do
    kill -0 "$keeper" 2>/dev/null || fail "node $node did not start: $(tail -n 1 "$state/$node.log")"
    sleep 0.05
  done
  nsenter -t "$(pid_of bridge)" -n -- ip link add "node$node" type veth peer name eth0 \
    netns "$(pid_of "$node")"
  nsenter -t "$(pid_of bridge)" -n -- ip link set "node$node" master bridge up
  printf 'plugged\n' >"$state/$node.cable"
  rm "$state/$node.cable"
}

# Between the bridge and a node put a process that delays and loses packets, in the place of an earlier one: there are
# kernels without netem.
slow() {
  local node=$1 in_network=(nsenter -t "$(pid_of bridge)" -n --)
  [ -w /dev/net/tun ] || fail "/dev/net/tun is missing, or this user may not write to it" 77
  if [ -e "$state/slow$node.pid" ]; then
    kill "$(pid_of "slow$node")"
    "${in_network[@]}" ip link delete "slow$node"
  fi
  setsid "${in_network[@]}" "$here/../.venv/bin/python" "$here/slow_link.py" "near$node" "far$node" "$2" "$3" \
    >"$state/slow$node.log" 2>&1 </dev/null &
  printf '%s' "$!" >"$state/slow$node.pid"
  until "${in_network[@]}" ip link set "far$node" up 2>/dev/null; do
    kill -0 "$!" 2>/dev/null || fail "the link is not slow: $(tail -n 1 "$state/slow$node.log")"
    sleep 0.05
  done
  "${in_network[@]}" ip link set "near$node" master bridge up
  "${in_network[@]}" ip link add "slow$node" type bridge
  "${in_network[@]}" ip link set "slow$node" up
  for end in "far$node" "node$node"; do
    "${in_network[@]}" ip link set "$end" master "slow$node"
  done
}

# Wait until so many nodes are alive, or node 1 has ended.
await_nodes() {
  until [ "$(enter 1 "$ray" status 2>/dev/null | grep -c ' node_')" = "$1" ]; do
    kill -0 "$(pid_of 1)" 2>/dev/null || fail "the head did not start: $(tail -n 5 "$state/1.log")"
    sleep 0.5
  done
}

stop() {
  for file in "$state"/*.pid; do
    [ ! -s "$file" ] || kill -9 "$(cat "$file")" 2>/dev/null || true # it may have ended by itself
  done
  rm -rf "$state"
}

if [ -s "$state/user" ] && [ -z "${RAYRFT_NODE_USER:-}" ]; then
  exec nsenter -t "$(pid_of bridge)" --user --preserve-credentials env RAYRFT_NODE_USER=1 bash "$0" "$@"
fi
case ${1:-} in
  --node) node "$2" ;;
  --exec) via='exec' enter "${@:2}" ;;
  --join)
    start "$2"
    ;;
  --kill)
    kill -9 "$(pid_of "$2")"
    rm "$state/$2.pid"
    nsenter -t "$(pid_of bridge)" -n -- ip link delete "node$2" # else it stays for a moment, and no other can take its name
    ;;
  --cut) nsenter -t "$(pid_of bridge)" -n -- ip link set "node$2" down ;;
  --plug) nsenter -t "$(pid_of bridge)" -n -- ip link set "node$2" up ;;
  --slow) slow "${@:2}" ;;
  --stop) stop ;;
  [1-8])
    for tool in ip unshare nsenter; do
      command -v "$tool" >/dev/null || fail "$tool is missing: install iproute2 and util-linux" 77
    done
    [ -x "$ray" ] || fail "there is no .venv: run bash cluster/setup.sh"
    if [ "$(id -u)" != 0 ] || [ -n "${RAYRFT_NODE_ROOTLESS:-}" ] && [ -z "${RAYRFT_NODE_USER:-}" ]; then
      unshare --user --map-root-user --net true 2>/dev/null ||
        fail "needs root, or unprivileged user namespaces, which this machine does not allow" 77
      RAYRFT_NODE_USER=1 exec unshare --user --map-root-user bash "$0" "$@"
    fi
    unshare --net --mount --uts --pid --fork true 2>/dev/null || fail "this machine allows no namespaces" 77
    [ ! -e "$state" ] || fail "a cluster is running already, or was killed: bash cluster/several_nodes.sh --stop"
    mkdir -m 700 "$state"
    trap stop EXIT
    printf '%s' "${RAYRFT_NODE_USER:-}" >"$state/user" # not empty: all of it is in a user namespace
    printf 'nameserver 127.0.0.1\n' >"$state/resolv.conf"
    printf '%s' "$([ -n "${RAYRFT_NODE_SECRETLESS:-}" ] && echo disabled || echo token)" >"$state/mode"
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$state/token"
    # The bridge is made in there: a command from here might come before the namespace has changed.
    setsid unshare --net bash -c 'ip link add bridge type bridge && ip link set bridge up && exec sleep infinity' &
    printf '%s' "$!" >"$state/bridge.pid"
    until [ "$(cat "/proc/$!/comm" 2>/dev/null)" = sleep ]; do
      kill -0 "$!" 2>/dev/null || fail "no bridge can be made"
      sleep 0.05
    done
    for number in $(seq 0 "$1"); do start "$number"; done
    await_nodes "$1"
    printf 'RAY_ADDRESS=%s.1:6379\n' "$network"
    wait "$(pid_of bridge)" || true
    ;;
  *) fail "usage: several_nodes.sh N | --exec I COMMAND … | --join I | --kill I | --cut I | --plug I | --slow I MS PERCENT | --stop (N and I up to 8)" 2 ;;
esac
