#!/usr/bin/env bash
# Try scripts/slurm.sh on a real Slurm of two nodes, both on this machine. Run it as root in a container:
#     apt-get install -y slurmctld slurmd slurm-client munge && tests/slurm/try_slurm.sh
# The job gets the signal that Slurm sends before the time limit. It must stop, requeue itself, resume and finish.
set -euo pipefail
repo=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/../..")
PATH="$repo/.venv/bin:$PATH"
folder=$(mktemp -d)
host=$(hostname -s)
cd "$folder"
cp -r "$repo"/{scripts,steadygpt} "$repo"/*.py .
mkdir state
python prepare_dataset.py --source "$repo/README.md" --tokenizer bytes --out data > prepare.log

cat > slurm.conf <<EOF
ClusterName=try
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=127.0.0.[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=1
PartitionName=main Nodes=ALL Default=YES State=UP
EOF
echo "CgroupPlugin=cgroup/v1" > cgroup.conf  # loaded at the start, but not used
export SLURM_CONF=$folder/slurm.conf OMP_NUM_THREADS=1

cleanup() {
    scancel --user=root || true
    while squeue --noheader | grep -q .; do sleep 1; done
    for file in slurmctld 127.0.0.1 127.0.0.2 munge; do kill "$(cat "$file.pid")" || true; done
}
trap cleanup EXIT
dd if=/dev/urandom of=munge.key bs=1 count=128 status=none
chmod 400 munge.key
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
    --log-file="$folder/munge.log" --seed-file="$folder/munge.seed"
slurmctld
slurmd -N 127.0.0.1
slurmd -N 127.0.0.2
until sinfo --noheader | grep -q idle; do sleep 1; done

job=$(sbatch --parsable --nodes=2 --output=job.out scripts/slurm.sh \
    --data_dir data --num_layers 2 --num_heads 2 --embd_size 16 --context_length 16 --total_batch_size 1024 \
    --mini_batch_size 2 --max_steps 150 --warmup_steps 10 --checkpoint_freq 10 --eval_freq 0 --hellaswag_freq 0 \
    --sample_freq 0 --device cpu)
tail --pid=$$ -n +1 -F job.out 2>/dev/null &
until grep -q '^saved' job.out 2>/dev/null; do sleep 1; done
scancel --signal=USR1 --batch "$job"  # what Slurm sends 120 s before the limit
until scontrol show job "$job" | grep -Eq 'JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL)'; do sleep 2; done
scontrol show job "$job" | grep -E 'JobState|Restarts'
cat checkpoints/status.json
scontrol show job "$job" | grep -q 'JobState=COMPLETED'
scontrol show job "$job" | grep -q 'Restarts=[1-9]'
grep -q '^resumed *from' job.out
grep -q '"finished"' checkpoints/status.json
echo "passed: $folder"
