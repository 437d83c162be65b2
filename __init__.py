"""Draftsmith: train what speculative decoding needs, measure what it is worth, export it."""

__version__ = "0.1.0"
