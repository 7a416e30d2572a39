"""Decoder models built from a model card."""
