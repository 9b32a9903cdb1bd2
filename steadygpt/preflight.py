"""Checks and settings at the launch of a command, which imports this module before all others.

Importing a command, as tests and notebooks do, has no effect.
"""

import importlib.util
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FOLDERS = (ROOT, f"{ROOT}/scripts", f"{ROOT}/docs")  # of commands
PACKAGES = ("torch", "numpy", "tiktoken", "msgspec", "tqdm")


def launch() -> None:
    # Python turns Ctrl-C into an exception, which imports may swallow or replace. Nothing can be lost before run_cli(),
    # so Ctrl-C just ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Waiting threads spin 300,000 times by default, which makes training on a CPU many times slower while other
    # programs run. OMP_WAIT_POLICY=PASSIVE, no spinning, makes small steps on idle cores 7 % slower.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries of torch would end the process without a reason
        print("error: the working directory was deleted; change to another one with cd", file=sys.stderr)
        sys.exit(2)
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing or sys.version_info < (3, 11):
        version = ".".join(map(str, sys.version_info[:2]))
        lacks = f" without {missing[0]}" if missing else ""
        set_up = "" if os.path.exists(f"{ROOT}/.venv/bin/activate") else "./setup.sh, then "
        print(
            f"error: {sys.executable} is Python {version}{lacks}; expected Python 3.11 or later with the packages of "
            f"SteadyGPT. Try: {set_up}source .venv/bin/activate",
            file=sys.stderr,
        )
        sys.exit(2)


program = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
if program.endswith(".py") and os.path.dirname(program) in FOLDERS:
    launch()
