// dlopen and dlsym for network libraries.
#pragma once

#include <dlfcn.h>

#include <cstddef>

namespace jax_ep {

// What to ask of CheckDescriptors first: files are opened one after the other, and initializers may
// open some. glibc tried without any finds later only what lies in its default folders.
inline constexpr size_t kOpenDescriptors = 4;

// Opens `name` for good, with the signal handlers of this process as they were: libraries below
// libfabric (libinfinipath of the psm provider) otherwise take SIGTERM, SIGINT, SIGSEGV and others
// from Python and its launcher when they are loaded. nullptr: dlerror() says why.
void* OpenLibrary(const char* name);

// Sets `function` to the library's `name`; false, and null, if it has none.
template <typename Function>
bool LoadFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace jax_ep
