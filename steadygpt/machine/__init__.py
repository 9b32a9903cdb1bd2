"""The computer: cores, GPUs, ranks, and what runs fast on them."""
