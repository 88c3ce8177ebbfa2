"""The commands of ``python -m jax_ep``, one module each; imported only when one is run."""
