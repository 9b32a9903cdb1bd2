#!/usr/bin/env bash
# Prepare data, train a small GPT that writes Python, list its checkpoints and sample text: 2 to 9 minutes on two CPU
# cores. Downloads only Python packages. Run it again at any time: it resumes from the last checkpoint, or reports that
# the run is finished. It takes no flags; those of `python train.py --config quickstart` change the run.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
[ $# = 0 ] || fail "$1: quickstart.sh takes no flags. Try python train.py --config quickstart $*"
cd "$repo"

scripts/setup.sh
use_python torch

run=checkpoints/quickstart
echo; echo "== 1/4  data: the Python standard library, as bytes"
python prepare_dataset.py --source stdlib --tokenizer bytes --out data/stdlib | sed '/^next:/d'  # the next step follows
echo; echo "== 2/4  training (Ctrl-C stops and saves; run this script again to resume)"
python train.py --config quickstart --resume auto
grep -q '"status": "finished"' $run/status.json || exit 0  # stopped and saved
echo; echo "== 3/4  checkpoints"
./list_checkpoints.sh $run
echo; echo "== 4/4  a sample: the model completes the first lines of a class"
python generate.py best --checkpoint_dir $run --max_tokens 400 --temperature 0.7 \
    --prompt $'class Queue:\n    """A queue."""\n\n    def __init__(self'

cat <<'END'

== next
  source .venv/bin/activate
  ./start_tensorboard.sh                            # curves at http://localhost:6006
  ./monitor_training.sh checkpoints/quickstart      # state, curves and speed in the terminal
  python generate.py best --checkpoint_dir checkpoints/quickstart --prompt "import " --num_seq 3

  train it longer
    NPROC=1 ./resume_training.sh checkpoints/quickstart --resume stable --max_steps 2000

  your own text
    python prepare_dataset.py --source my_texts/ --tokenizer bpe:8192 --out data/mine
    python train.py --config quickstart --data_dir data/mine --checkpoint_dir checkpoints/mine

  GPT-2 124M on FineWeb-Edu, four GPUs
    python prepare_dataset.py
    torchrun --nproc_per_node=4 train.py --use_tensorboard
END
