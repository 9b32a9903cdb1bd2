# Sourced by other scripts: sets repo, and prefers the Python of .venv. `needs` names a package other than torch.
repo=$(readlink -f "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..")
if [ -x "$repo/.venv/bin/python" ]; then
    PATH="$repo/.venv/bin:$PATH"
elif ! python -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('${needs:-torch}'))" 2>/dev/null; then
    echo "error: ${needs:-torch} is not installed for this Python; run ./setup.sh first" >&2
    exit 2
fi
