"""The mirror of a run: a copy in an object store, from which another machine can continue.

A run has two hooks for it: restore.find_newest() before a checkpoint is looked for, and Uploads.start() after one is
written.
"""
