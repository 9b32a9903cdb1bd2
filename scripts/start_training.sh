#!/usr/bin/env bash
# Start training in the background and show the monitor: ./start_training.sh [flags of train.py]
# Without flags, on a terminal, it asks for preset, data and GPUs. NPROC=2 sets the number of processes.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/nproc.sh"
preset='' interrupted=''
choose() {  # VARIABLE DEFAULT CHOICES HEADING: ask for one of the lines "NAME: DESCRIPTION", by name or number
    printf '\n%s:\n%s\n' "$4" "$(cat -n <<< "$3")"
    while read -r -p "$1 [$2]: " typed; do
        answer=$(awk -F ': ' -v typed="${typed:-$2}" '$1 == typed || NR == typed { print $1; exit }' <<< "$3")
        [ -n "$answer" ] && printf -v "$1" %s "$answer" && return
        printf '  found %q; expected an entry of the list, or its number from 1 to %d\n' "$typed" "$(wc -l <<< "$3")"
    done
    printf '\nnothing was started\n'; exit 1  # Ctrl-D
}
if [ $# = 0 ] && [ -t 0 ] && [ -t 1 ]; then
    presets=$(cd "$repo/configs" && grep '^description' *.toml | sed 's/\.toml:.*= "\(.*\)"/: \1/')
    choose preset "$([ "$gpus" -gt 0 ] && echo gpt2 || echo quickstart)" "$presets" Presets
    folders=$(ls data/{,*/}*train*.{npy,bin} 2>/dev/null | sed 's|/[^/]*$||' | sort -u || true)
    folders=${folders:-"data/stdlib: Python's standard library, 12 MB of text, prepared now, in seconds"}
    default=$(sed -n 's/^data_dir = "\(.*\)"/\1/p' "$repo/configs/$preset.toml")
    grep -qx "${default:=data/edu_fineweb10B}" <<< "$folders" || default=${folders%%[:$'\n']*}
    choose data "$default" "$folders" "Data (python prepare_dataset.py prepares more)"
    [ -n "${folders##*: *}" ] || python "$repo/prepare_dataset.py" --source stdlib --tokenizer bytes --out "$data"
    if [ "$gpus" -lt 2 ]; then echo "GPUs found: $gpus"; else choose nproc "$nproc" "$(seq "$gpus")" "GPUs to use"; fi
    name=$preset number=1
    while [ -e "checkpoints/$name" ]; do name=$preset-$((number += 1)); done
    set -- --config "$preset" --data_dir "$data" --use_tensorboard --checkpoint_dir "checkpoints/$name"
fi
command=(python "$repo/train.py" "$@")
[ "$nproc" -gt 1 ] && command=(torchrun --standalone --nproc_per_node="$nproc" "$repo/train.py" "$@")
case " $* " in *" -h "* | *" --help "* | *" --version "* | *" --dry"?run* | *" --eval"?only* | *" --list"?checkpoints*) exec "${command[@]}" ;; esac
folder=$(PYTHONPATH=$repo python -c '
import pathlib, sys
from steadygpt import config
from steadygpt.base import durable, options

def free_folder():
    folder = config.parse_args(sys.argv[1:])[0].checkpoint_dir
    if pathlib.Path(folder).is_dir():
        durable.lock_folder(pathlib.Path(folder), "stop that run first")
    print(folder)

options.run_cli(free_folder)' "$@")
echo "+$(printf ' %q' "${command[@]}")"
"${command[@]}" --dry_run
[ -z "$preset" ] || read -r -p "Press Enter to start, Ctrl-C to cancel: " || { echo; echo "nothing was started"; exit 1; }
mkdir -p "$folder"
if [ -L "$folder/console.txt" ] || { [ -e "$folder/console.txt" ] && [ ! -f "$folder/console.txt" ]; }; then
    echo "error: $folder/console.txt: a link or a pipe; expected a file. Remove it" >&2; exit 2
fi
exec 3<> "$folder/console.txt"
cat <&3 > /dev/null  # skip what earlier launches printed
before=$(cat "$folder/status.json" 2>/dev/null || true)
trap 'interrupted=1' INT  # Ctrl-C ends this script or the monitor; training has a process group of its own
set -m; nohup "${command[@]}" < /dev/null >> "$folder/console.txt" 2>&1 3<&- & set +m
while sleep 0.2; cat <&3; [ -z "$interrupted" ] && kill -0 $! 2>/dev/null; do
    case $(cat "$folder/status.json" 2>/dev/null || true) in
        "$before" | *'"doing": "starting"'*) ;;
        *'"status": "running"'*) "$repo/monitor_training.sh" "$folder" || true; break ;;
    esac
done
if kill -0 $! 2>/dev/null; then
    printf '\ntraining continues as process %d; its output: %s\n' $! "$folder/console.txt"
    printf '  watch it again   %q %q\n  stop and save    kill -INT %d\n' "$repo/monitor_training.sh" "$folder" $!
    exit
fi
cat <&3 | tail -n 100
trap 'printf "\ntraining has ended with status %d; its output: %s\n" $? "$folder/console.txt"' EXIT
wait $!  # and exit with its status
