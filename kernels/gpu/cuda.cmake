find_package(CUDAToolkit REQUIRED)
target_link_libraries(jax_ep_gpu PRIVATE CUDA::cudart_static)
target_compile_features(jax_ep_gpu PRIVATE cxx_std_20 cuda_std_20)
set_target_properties(jax_ep_gpu PROPERTIES
  CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET hidden)
target_compile_options(jax_ep_gpu PRIVATE
  # 2810: cudafe takes `value = std::move(value)` of a nodiscard class for a discarded result.
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --diag-suppress=2810
    -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wno-missing-field-initializers>)
if(NOT SKBUILD)  # a newer compiler's new warning must not break a user's install
  target_compile_options(jax_ep_gpu PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings> $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
