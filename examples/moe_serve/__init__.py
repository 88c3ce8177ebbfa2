"""Parts of examples/serve_moe.py: requests, slots, the decoder's step, processes, HTTP."""
