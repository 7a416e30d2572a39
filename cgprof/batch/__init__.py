"""One step's inputs: requests, fixed-address buffers, and the views that a step takes of them."""
