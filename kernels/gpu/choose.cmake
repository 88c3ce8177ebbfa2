# What JAX_EP_GPU=auto builds. A compiler alone is not enough: images for building often have nvcc,
# and kernels that nothing here can run take most of the build's time.

# jax_ep_gpu_driver(RESULT ROOT): NVIDIA, AMD or "", by the files that a driver brings. ROOT is ""
# but for tests. The toolkit's stub libcuda.so is no driver; that has libcuda.so.1.
function(jax_ep_gpu_driver result root)
  file(GLOB nvidia
    ${root}/dev/nvidiactl
    ${root}/proc/driver/nvidia/version
    ${root}/usr/lib/libcuda.so.1
    ${root}/usr/lib/*-linux-gnu/libcuda.so.1
    ${root}/usr/lib64/libcuda.so.1
    ${root}/usr/lib/wsl/lib/libcuda.so.1)
  if(nvidia)
    set(${result} NVIDIA PARENT_SCOPE)
  elseif(EXISTS ${root}/dev/kfd)
    set(${result} AMD PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

# jax_ep_auto_gpu(CHOICE NOTE DRIVER NVCC): cuda or none, and what a user should know of it.
function(jax_ep_auto_gpu choice note driver nvcc)
  set(ask "JAX_EP_GPU=cuda pip install .")
  set(${choice} none PARENT_SCOPE)
  if(driver STREQUAL "AMD")
    set(text "an AMD GPU's driver is here, whose kernels are left out: nobody has run them yet. \
To build them: JAX_EP_GPU=hip, with clang++ as the C++ compiler (docs/gpu.md)")
  elseif(NOT driver AND nvcc)
    set(text "${nvcc} is here but no NVIDIA driver, so the CUDA kernels are left out. \
To build them: ${ask}")
  elseif(NOT driver)
    set(text "")
  elseif(NOT nvcc)
    set(text "an NVIDIA driver is here but no nvcc that works, so the CUDA kernels are left out. \
To build them, install the CUDA toolkit, put its bin folder on PATH, then: ${ask}")
  elseif(JAX_EP_SANITIZE)
    set(text "the CUDA kernels are left out with JAX_EP_SANITIZE; -DJAX_EP_GPU=cuda builds them")
  elseif(CMAKE_VERSION VERSION_LESS 3.28)  # older ones do not know the C++20 of nvcc 13
    set(text "CMake ${CMAKE_VERSION} is older than 3.28, so the CUDA kernels are left out. \
To build them, take a newer one and: ${ask}")
  else()
    set(text "")
    set(${choice} cuda PARENT_SCOPE)
  endif()
  set(${note} "${text}" PARENT_SCOPE)
endfunction()
