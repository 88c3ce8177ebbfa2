"""Imported before anything that needs Flax: says how to install it."""

try:
    import flax as flax
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jax_ep.flax needs Flax, which is not installed; run: pip install 'jax_ep[flax]' "
        "(in a checkout: pip install '.[flax]')",
        name="flax",
    ) from None
