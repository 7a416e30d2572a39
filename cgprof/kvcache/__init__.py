"""The paged KV cache: blocks, block tables and slots."""
