"""The machinery of SteadyGPT: everything that train.py, model.py, dataloader.py and config.py rely on."""
