"""Attention over paged KV, in plain torch and in Triton."""
