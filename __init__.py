"""Draftsmith: train draft models for speculative decoding, benchmark them end to end and export them."""

__version__ = "0.1.0"
