"""The engine: scheduler, step phases, sampler, and the worker that builds them."""
