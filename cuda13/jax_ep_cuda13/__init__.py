"""The kernels of jax_ep for CUDA 13: libjax_ep_gpu.so in this folder, which jax_ep finds."""
