// OpenLibrary: dlopen for network libraries.
#pragma once

namespace jax_ep {

// Opens `name` for good, with the signal handlers of this process as they were: libraries below
// libfabric (libinfinipath of the psm provider) otherwise take SIGTERM, SIGINT, SIGSEGV and others
// from Python and its launcher when they are loaded. nullptr: dlerror() says why.
void* OpenLibrary(const char* name);

}  // namespace jax_ep
