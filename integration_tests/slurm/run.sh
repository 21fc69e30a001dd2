#!/usr/bin/env bash
# A real Slurm on this machine alone, and a training job of two processes through `torchx run -s slurm`.
#   make test-slurm
# Needs root and Debian's packages (see PACKAGES; installed if they are missing): meant for a container or a virtual
# machine. Everything listens on 127.0.0.1, on free ports, lives in one temporary directory and is gone afterwards;
# the packages stay.
set -euo pipefail
cd "$(dirname "$0")/../.."

PACKAGES="slurm-wlm slurmdbd munge mariadb-server"
JOB_SECONDS=300

say() { echo "slurm test: $*"; }
fail() { say "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "must run as root: slurmd starts jobs as other users"
missing=""
for package in $PACKAGES; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
done
if [ -n "$missing" ]; then
    [ ! -d /run/systemd/system ] || fail "install$missing first: here the packages would start system services"
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

work="$(mktemp -d /tmp/slurm-test-XXXXXX)"
chmod 755 "$work"
started=()  # process ids, in the order of their start

clean() {
    code=$?
    trap - EXIT INT TERM
    if [ "$code" != 0 ]; then
        for log in "$work"/log/*; do say "--- ${log##*/}"; tail -n 40 "$log"; done >&2
    fi
    for ((i = ${#started[@]} - 1; i >= 0; i--)); do
        kill "${started[i]}" 2>/dev/null || continue
        for _ in $(seq 50); do kill -0 "${started[i]}" 2>/dev/null || break; sleep 0.1; done
        kill -9 "${started[i]}" 2>/dev/null || true
    done
    wait 2>/dev/null || true
    rm -rf "$work"
    if [ -f .torchxslurmjobdirs ]; then  # TorchX notes every job's directory here
        sed -i "\\|= $work/job\$|d" .torchxslurmjobdirs
        [ -s .torchxslurmjobdirs ] || rm .torchxslurmjobdirs
    fi
    exit "$code"
}
trap clean EXIT INT TERM

start() {  # name, command...: in the background, with its log
    local name="$1"
    shift
    "$@" >"$work/log/$name" 2>&1 &
    started+=($!)
}

until_true() {  # seconds, what, command...
    local seconds="$1" what="$2"
    shift 2
    local deadline=$((SECONDS + seconds))
    while [ "$SECONDS" -lt "$deadline" ]; do
        if "$@" >>"$work/log/waiting" 2>&1; then return 0; fi
        sleep 0.2
    done
    fail "$what did not come up in $seconds s"
}

free_ports() {  # count
    python - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}

host="$(hostname -s)"
password="$(head -c 18 /dev/urandom | base64 | tr -d '+/=')"
read -r database_port dbd_port ctld_port slurmd_port < <(free_ports 4)
mkdir -p "$work"/{log,state,spool,database,run,job}
mkdir -m 700 "$work/munge"
export SLURM_CONF="$work/slurm.conf"

say "munge"
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chmod 400 "$work/munge/key"
chmod 711 "$work/munge"
start munged munged --foreground --force --num-threads=10 --key-file="$work/munge/key" --socket="$work/munge/socket" \
    --pid-file="$work/munge/pid" --log-file="$work/log/munge" --seed-file="$work/munge/seed"
until_true 10 munged test -S "$work/munge/socket"

say "MariaDB on port $database_port"
mariadb-install-db --no-defaults --user=root --datadir="$work/database" --auth-root-authentication-method=normal \
    --skip-test-db >"$work/log/install-db" 2>&1
start mariadbd mariadbd --no-defaults --user=root --datadir="$work/database" --socket="$work/run/database.sock" \
    --pid-file="$work/run/database.pid" --bind-address=127.0.0.1 --port="$database_port" \
    --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900
sql() { mariadb --no-defaults --socket="$work/run/database.sock" -u root "$@"; }
until_true 60 MariaDB sql -e "SELECT 1"
sql -e "CREATE DATABASE slurm; CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '$password';
        CREATE USER 'slurm'@'localhost' IDENTIFIED BY '$password';
        GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1'; GRANT ALL ON slurm.* TO 'slurm'@'localhost';"

say "slurmdbd, slurmctld, slurmd on ports $dbd_port, $ctld_port, $slurmd_port"
cat >"$work/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$dbd_port
SlurmUser=slurm
PidFile=$work/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$database_port
StorageLoc=slurm
StorageUser=slurm
StoragePass=$password
CommunicationParameters=NoInAddrAny
CONF
chmod 600 "$work/slurmdbd.conf"
chown slurm "$work/slurmdbd.conf" "$work/state" "$work/run"
cores="$(nproc)"
memory="$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)"
cat >"$work/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmUser=slurm
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/run/slurmctld.pid
SlurmdPidFile=$work/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$work/munge/socket
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory State=UNKNOWN
PartitionName=debug Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
start slurmdbd runuser -u slurm -- slurmdbd -D
until_true 30 slurmdbd timeout 10 sacctmgr -v -n show cluster
sacctmgr -i add cluster loopback >/dev/null 2>&1 || true
sacctmgr -i add account test Description=test Organization=test >/dev/null 2>&1 || true
sacctmgr -i add user root Account=test >/dev/null 2>&1 || true
start slurmctld runuser -u slurm -- slurmctld -D
until_true 30 slurmctld timeout 10 scontrol ping
start slurmd slurmd -D
node_is_idle() { sinfo -h -o %T | grep -qx idle; }
until_true 30 slurmd node_is_idle
sinfo

say "a training job of two processes"
job_failed() {
    cp "$work"/job/slurm-* "$work/log/" 2>/dev/null || true
    fail "the job failed"
}
ln -s "$PWD"/{fuxi_torchrec,pipelines,configs} "$work/job/"  # where the job runs and leaves its output
python -m pipelines.prepare synthetic --users 200 --output "$work/data" >"$work/log/prepare" 2>&1
began="$(date +%s)"
timeout "$JOB_SECONDS" torchx run --workspace "" -s slurm --wait \
    -cfg "partition=debug,job_dir=$work/job" pipelines/components.py:train \
    --config configs/ml_1m.yaml --run_dir "$work/run/train" -j 1x2 --mem_mb 4000 \
    "data.path=$work/data" model.dim=16 train.max_steps=10 logging.every_steps=1 validation.every_epochs=null \
    checkpoint.every_steps=5 >"$work/log/torchx" 2>&1 || job_failed
say "done in $(($(date +%s) - began)) s"
sacct --format=JobID,JobName%30,State,ExitCode
[ "$(cat "$work/run/train/checkpoints/latest")" = step-000000010 ] || fail "the checkpoint of step 10 is missing"
[ "$(grep -c '"loss"' "$work/run/train/metrics.jsonl")" = 10 ] || fail "there are not ten steps in metrics.jsonl"
grep -q '"world_size": 2' "$work/run/train/plan.json" || fail "it did not run on two processes"
say "passed"
