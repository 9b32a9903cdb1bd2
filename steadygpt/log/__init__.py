"""What a run says of itself: console, files, TensorBoard, Weights & Biases, alerts."""
