#!/usr/bin/env bash
# A SLURM of two nodes on one machine, with network, hosts file and shared memory of their own. Prints "ready". Run it as
#
#   unshare --net --mount --uts --pid --fork --mount-proc --kill-child bash slurm.sh FOLDER JOB
#
# so that all it starts ends with it. FOLDER takes its files; JOB is the number of the first job.
set -euo pipefail
folder=$1 job=$2
export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin:/sbin

# Give this namespace a name, an address and folders in memory.
prepare() {
  hostname "node$1"
  printf '127.0.0.1 localhost\n127.0.1.1 node%s\n10.78.0.%s node%s\n' "$1" $((3 - $1)) $((3 - $1)) >"$folder/hosts$1"
  mount --bind "$folder/hosts$1" /etc/hosts
  mount -t tmpfs tmpfs /dev/shm
  mount -t tmpfs tmpfs "/tmp/rayrft-$job"
  ip link set lo up
  ip address add "10.78.0.$1/24" dev eth0
  ip link set eth0 up
}

if [ "${3:-}" = second ]; then
  read -r _ <"$folder/cable"
  prepare 2
  exec slurmd -D -N node2
fi

mkdir -p "$folder/state" "/tmp/rayrft-$job"
head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
cat >"$SLURM_CONF" <<END
ClusterName=rayrft
SlurmctldHost=node1(10.78.0.1)
SlurmUser=root
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmdSpoolDir=$folder/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
FirstJobId=$job
NodeName=node1 NodeAddr=10.78.0.1 CPUs=2
NodeName=node2 NodeAddr=10.78.0.2 CPUs=2
PartitionName=all Nodes=ALL Default=YES
END

mkfifo "$folder/cable"
unshare --net --mount --uts bash "$0" "$folder" "$job" second >"$folder/node2.log" 2>&1 &
exec 9>"$folder/cable" # returns when the second namespace reads
ip link add eth0 type veth peer name eth0 netns "$!"
prepare 1
munged --foreground --force --socket "$folder/munge.socket" --key-file "$folder/munge.key" \
  --pid-file "$folder/munged.pid" --seed-file "$folder/munged.seed" >"$folder/munged.log" 2>&1 &
slurmctld -D -i >"$folder/slurmctld.log" 2>&1 &
controller=$!
slurmd -D -N node1 >"$folder/node1.log" 2>&1 &
echo >&9
until scontrol ping 2>/dev/null | grep -q UP; do
  kill -0 "$controller" 2>/dev/null || { tail -n 5 "$folder"/*.log >&2; exit 1; }
  sleep 0.2
done
echo ready
wait
