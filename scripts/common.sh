# Sourced by the other scripts. --help prints the comment at the head of the script. Sets repo, the repository's folder.
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# //p' "$0"; exit ;; esac
repo=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")

fail() {  # MESSAGE
    echo "error: $1" >&2
    exit 2
}

use_python() {  # PACKAGE: prefer the Python of .venv; it must have the package
    if [ -x "$repo/.venv/bin/python" ]; then PATH=$repo/.venv/bin:$PATH; fi
    python -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$1'))" 2>/dev/null ||
        fail "found no Python with $1; run ./setup.sh first"
}

count_processes() {  # set gpus, and nproc: NPROC, or the number of GPUs, but at least 1
    gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # empty or -1: no GPU
        gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
    fi
    nproc=${NPROC:-$gpus}
    case $nproc in *[!0-9]*) fail "NPROC is $nproc; expected a number of processes" ;; esac
    if [ "$nproc" -lt 1 ]; then nproc=1; fi
}

set_command() {  # FLAG...: set command, which trains on nproc processes
    command=(python "$repo/train.py" "$@")
    if [ "$nproc" -gt 1 ]; then
        # With an address, torchrun does not wait minutes for the name of a machine that no server knows.
        command=(torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node="$nproc" "$repo/train.py" "$@")
    fi
}
