"""The records of a run: console, files, TensorBoard, Weights & Biases, alerts."""
