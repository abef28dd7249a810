"""Demonstration parts: tiny bases in both architectures, a codec, a text encoder, and the pictures they learned from.

None of it comes from or stands for the published weights: it exists so that the whole engine can run, and be tested,
on a machine without a GPU and without a download.
"""
