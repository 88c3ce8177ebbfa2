# The same sources for AMD GPUs, by clang++ as it comes with ROCm or with LLVM. Not CMake's HIP
# language, which wants all of ROCm installed. Compiled only: nothing of it has been run
# (docs/gpu.md).
set(JAX_EP_HIP_ARCHITECTURES "gfx942;gfx950" CACHE STRING "AMD GPUs to compile for, wave64 only")
set(JAX_EP_HIP_FLAGS "" CACHE STRING
  "More options for clang++, e.g. --rocm-path=DIR where it does not find ROCm by itself")
set(JAX_EP_HIP_LEAST_CLANG 20)  # knows gfx950
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang"
   OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS JAX_EP_HIP_LEAST_CLANG)
  message(FATAL_ERROR
    "JAX_EP_GPU=hip: got ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, expected clang++ "
    "${JAX_EP_HIP_LEAST_CLANG} or newer; set CMAKE_CXX_COMPILER, e.g. to ROCm's lib/llvm/bin/clang++")
endif()
find_library(JAX_EP_HIP_RUNTIME amdhip64 PATHS /opt/rocm/lib ENV ROCM_PATH PATH_SUFFIXES lib REQUIRED)
target_link_libraries(jax_ep_gpu PRIVATE ${JAX_EP_HIP_RUNTIME})
target_compile_features(jax_ep_gpu PRIVATE cxx_std_20)
set_source_files_properties(${kernels_gpu_sources} PROPERTIES LANGUAGE CXX)
separate_arguments(hip_flags UNIX_COMMAND "${JAX_EP_HIP_FLAGS}")
list(TRANSFORM JAX_EP_HIP_ARCHITECTURES PREPEND --offload-arch= OUTPUT_VARIABLE hip_architectures)
target_compile_options(jax_ep_gpu PRIVATE
  # .cc files too: the headers of the runtime want to know the platform.
  "SHELL:-x hip" ${hip_architectures} ${hip_flags}
  # Sums of rows must be the same bits on every machine (elements.cuh).
  -ffp-contract=off
  -Wall -Wextra -Wno-missing-field-initializers
  -Wno-unused-command-line-argument  # what the host's compilation does not use
  -Wno-nontrivial-memcall)           # HIP's uint4 has constructors
if(NOT SKBUILD)
  target_compile_options(jax_ep_gpu PRIVATE -Werror)
endif()
