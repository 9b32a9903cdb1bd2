"""The mirror of a run: a copy in an object store, from which another machine can resume.

A run calls restore.find_newest() to find its checkpoint, and Uploads.start() after each save.
"""
