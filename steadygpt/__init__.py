"""The machinery of SteadyGPT: everything that the commands, model.py, optim.py and dataloader.py rely on."""

__version__ = "0.9.0"
