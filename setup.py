"""The refusal of `pip install .`, which would leave out the commands at the root, configs/ and scripts/."""

import sys

from setuptools import setup

if "bdist_wheel" in sys.argv:  # `pip install -e .` builds none
    sys.exit("error: SteadyGPT runs from a clone, so `pip install .` is refused. Try `pip install -e .`")
setup()
