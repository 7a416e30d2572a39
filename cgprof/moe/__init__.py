"""Mixture of experts: router, token exchange and grouped expert matmuls."""
