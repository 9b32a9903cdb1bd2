"""The machinery of SteadyGPT: everything that train.py, model.py, dataloader.py and config.py rely on."""

__version__ = "0.9.0"
