#!/usr/bin/env bash
# Start training in the background and show the monitor: ./start_training.sh [flags of train.py]
# Without flags, on a terminal, it asks for preset, data and GPUs. NPROC=2 sets the number of processes.
# `python train.py --help` lists the flags.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
use_python torch
count_processes

choose() {  # HEADING CHOICES [NUMBER]: ask for the number of a line, by default the first or NUMBER; set chosen to what
    # precedes its first colon
    local answer default=${3:-1}
    echo
    nl -w 2 -s ') ' <<< "$2"
    while read -r -p "$1 (Enter for $default): " answer; do
        chosen=$(awk -v number="${answer:-$default}" 'NR == number' <<< "$2")
        if [ -n "$chosen" ]; then
            chosen=${chosen%%:*}
            return
        fi
        echo "found '$answer'; expected the number of a line"
    done
    echo; echo "nothing was started"; exit 1  # Ctrl-D
}

is_guided=
if [ $# = 0 ] && [ -t 0 ] && [ -t 1 ]; then
    is_guided=1
    # By size, after the quickstart: "0.84 test: DESCRIPTION" without the number.
    line='s/^(.*)\.toml:.*= "(.* ([0-9]*),?([0-9.]+) M .*)"/\3\4 \1: \2/; s/^.* quickstart:/0 quickstart:/'
    choose Preset "$(cd "$repo/configs" && grep '^description' *.toml | sed -E "$line" | sort -n | cut -d ' ' -f 2-)"
    preset=$chosen
    folders=$(ls data/{,*/}*train*.{npy,bin} 2>/dev/null | sed 's|/[^/]*$||' | sort -u || true)
    if [ -z "$folders" ]; then
        folders=data/stdlib
        python "$repo/prepare_dataset.py" --source stdlib --tokenizer bytes --out data/stdlib | sed '/^next:/d'
    fi
    choose "Data (python prepare_dataset.py prepares more)" "$folders"
    data=$chosen
    if [ "$gpus" -gt 1 ]; then
        choose "GPUs to use" "$(seq "$gpus")" "$gpus"
        nproc=$chosen
    fi
    name=$preset number=1
    while [ -e "checkpoints/$name" ]; do name=$preset-$((number += 1)); done
    set -- --config "$preset" --data_dir "$data" --use_tensorboard --checkpoint_dir "checkpoints/$name"
fi

set_command "$@"
echo "+$(printf ' %q' "${command[@]}")"
"${command[@]}" --dry_run
case " $* " in *" --dry"[_-]"run"*) exit ;; esac
if [ "$is_guided" ]; then
    read -r -p "Press Enter to start, Ctrl-C to cancel: " || { echo; echo "nothing was started"; exit 1; }
fi

folder=$(PYTHONPATH=$repo python -c '
import sys
from pathlib import Path
from steadygpt.base import durable, options
from steadygpt.config import parse_args

def create_folder():
    folder = parse_args(sys.argv[1:])[0].checkpoint_dir
    durable.lock_folder(Path(folder), "stop that run first")
    print(folder)

options.run_cli(create_folder)' "$@")
console=$folder/console.txt
touch "$console"
exec 3< "$console"
cat <&3 > /dev/null  # skip what earlier launches printed
set -m  # training gets a process group of its own, which Ctrl-C in the monitor does not reach
nohup "${command[@]}" < /dev/null >> "$console" 2>&1 3<&- &
set +m
printf '\ntraining in the background as process %d; its output: %s\n' $! "$console"
printf '  watch it again   %q %q\n  stop and save    kill -INT %d\n\n' "$repo/monitor_training.sh" "$folder" $!
while kill -0 $! 2>/dev/null; do
    sleep 0.2
    output=$(cat <&3)
    [ -z "$output" ] || echo "$output"
    case $output in step\ * | *$'\nstep '*) exec "$repo/monitor_training.sh" "$folder" ;; esac
done
cat <&3
status=0
wait $! || status=$?
echo "training has ended with status $status"
exit "$status"
