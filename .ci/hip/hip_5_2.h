// What HIP 5.2's headers take for built in and clang 22 no longer has. Nothing here is called.
#pragma once

using JaxEpHalf2 = _Float16 __attribute__((ext_vector_type(2)));

__attribute__((device)) inline _Float16 __llvm_amdgcn_rcp_f16(_Float16 x) {
  return static_cast<_Float16>(1.0f / static_cast<float>(x));
}
__attribute__((device)) inline JaxEpHalf2 __llvm_amdgcn_rcp_2f16(JaxEpHalf2 x) {
  return JaxEpHalf2{__llvm_amdgcn_rcp_f16(x.x), __llvm_amdgcn_rcp_f16(x.y)};
}
