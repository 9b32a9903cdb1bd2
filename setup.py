"""The refusal of `pip install .`, which would leave out the commands at the root, configs/ and scripts/."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Refused(bdist_wheel):
    def run(self) -> None:
        raise SystemExit("error: SteadyGPT runs from a clone, so `pip install .` is refused. Try `pip install -e .`")


if __name__ == "__main__":
    setup(cmdclass={"bdist_wheel": Refused})
