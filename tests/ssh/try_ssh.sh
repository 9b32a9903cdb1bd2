#!/usr/bin/env bash
# Try the monitor on a real run through a real sshd, which listens on a loopback port with keys made for it:
#     tests/ssh/try_ssh.sh
# The run is alive, suspended, stopped, finished and killed, and the connection is lost and comes back. Takes two
# minutes.
set -euo pipefail
repo=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/../..")
sshd=$(PATH="$PATH:/usr/sbin" command -v sshd) || { echo "skipped: no sshd; apt-get install openssh-server"; exit 0; }
PATH="$repo/.venv/bin:$PATH"
folder=$(mktemp -d)
cd "$folder"
export OMP_NUM_THREADS=1

ssh-keygen -q -t ed25519 -N "" -f host_key
ssh-keygen -q -t ed25519 -N "" -f key
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat > sshd_config <<END
ListenAddress 127.0.0.1:$port
HostKey $folder/host_key
AuthorizedKeysFile $folder/key.pub
PidFile $folder/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
SetEnv PATH=$PATH
END
start_sshd() { mkdir -p /run/sshd 2>/dev/null || true; "$sshd" -f sshd_config -E sshd.log; }
stop_sshd() {  # with its connections
    local listener
    listener=$(cat sshd.pid)
    kill "$listener" $(pgrep -P "$listener")
}
end() {
    stop_sshd 2>/dev/null || true
    kill -9 "${run:-}" 2>/dev/null || true
}
trap end EXIT
start_sshd
ssh="ssh -F none -p $port -i $folder/key -o IdentitiesOnly=yes"
ssh+=" -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=$folder/known_hosts"
monitor() { python "$repo/scripts/monitor_training.py" "$(id -un)@127.0.0.1:$folder/checkpoints" --ssh "$ssh" "$@"; }

train() {
    python "$repo/train.py" --data_dir data --num_layers 2 --num_heads 2 --embd_size 16 --context_length 16 \
        --total_batch_size 64 --mini_batch_size 2 --warmup_steps 2 --eval_freq 500 --hellaswag_freq 0 --sample_freq 0 \
        --log_freq 10 --device cpu --precision fp32 "$@" >> train.log 2>&1 &
    run=$!
}
expect() {  # STATE STATUS: what the monitor must say
    local status=0
    monitor --once > view.txt || status=$?
    head -3 view.txt
    grep -q "^● $1" view.txt && [ "$status" = "$2" ] || { echo "failed: expected $1, status $2; found status $status"; exit 1; }
    echo "-> status $status"; echo
}
step() { python -c 'import json; print(json.load(open("checkpoints/status.json")).get("step", 0))' 2>/dev/null || echo 0; }

python "$repo/prepare_dataset.py" --source "$repo/README.md" --tokenizer bytes --out data > prepare.log 2>&1
train --max_steps 1000000
until [ "$(step)" -gt 0 ]; do kill -0 "$run"; sleep 1; done
expect running 0
kill -STOP "$run"; expect suspended 1; kill -CONT "$run"
kill -TERM "$run"; wait "$run"; expect stopped 0
train --resume latest --max_steps $(($(step) + 100)); wait "$run"; expect finished 0
train --resume latest --max_steps 1000000
until grep -q '"running"' checkpoints/status.json; do kill -0 "$run"; sleep 1; done

touch live.txt
echo "the live view: connected, then without a connection, then connected again"
script -qfc "stty cols 100 rows 30; $(declare -f monitor); $(declare -p repo folder ssh); monitor" live.txt > /dev/null < <(sleep 90) &
live=$!
seen() { for _ in $(seq 60); do tail -c "+${2:-1}" live.txt | grep -aq "$1" && return; sleep 0.5; done; echo "failed: not seen: $1"; exit 1; }
seen "● running"
stop_sshd
seen "● not reachable"
grep -ao "no connection for.*" live.txt | head -1 | cut -c -90
kill -STOP "$run"
size=$(wc -c < live.txt)
start_sshd
seen "● suspended" "$size"
kill -CONT "$run"
echo "-> not reachable, then connected"; echo

pgrep -f "python3 -I - $folder" > /dev/null || { echo "failed: nothing watches the run"; exit 1; }
pkill -TERM -P "$live" -f monitor_training.py || kill "$live"
for _ in $(seq 20); do pgrep -f "python3 -I - $folder" > /dev/null || break; sleep 0.5; done
pgrep -af "python3 -I - $folder" && { echo "failed: the remote process is left"; exit 1; }
echo "the remote process ended with the monitor"; echo

kill -9 "$run"; wait "$run" 2>/dev/null || true
sleep 16  # the last heartbeat is fresh for 15 s
expect killed 1
echo "passed: $folder"
