#include "kernels/gpu/memory/copy_stream.h"

#include <array>
#include <memory>

#include "kernels/gpu/memory/error_text.h"

namespace jax_ep::gpu {

struct CopyStream {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::array<cudaEvent_t, kMaxCopyBatches> ends{};  // of batch n: ends[n % kMaxCopyBatches]
  uint64_t num_ended = 0, num_done = 0;

  cudaEvent_t& EndOf(uint64_t batch) { return ends[batch % kMaxCopyBatches]; }
};

namespace {

const char* Open(CopyStream* copies) {
  JAX_EP_RUNTIME(cudaSetDevice(copies->device));
  // Not behind XLA's streams, whose kernels may wait for these copies: neither by the rules of the
  // legacy stream nor in a queue of the hardware, which streams of one priority share.
  int least = 0, greatest = 0;
  JAX_EP_RUNTIME(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  JAX_EP_RUNTIME(cudaStreamCreateWithPriority(&copies->stream, cudaStreamNonBlocking, greatest));
  for (cudaEvent_t& end : copies->ends) {
    JAX_EP_RUNTIME(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
  }
  return nullptr;
}

}  // namespace

const char* OpenCopies(int device, CopyStream** out) {
  auto copies = std::make_unique<CopyStream>();
  copies->device = device;
  if (const char* error = Open(copies.get())) {
    const std::string text = error;  // CloseCopies may have one of its own
    static_cast<void>(CloseCopies(copies.release()));
    return Fail(text);
  }
  *out = copies.release();
  return nullptr;
}

const char* StartCopy(CopyStream* copies, std::byte* to, const std::byte* from, uint64_t bytes) {
  JAX_EP_RUNTIME(cudaSetDevice(copies->device));
  JAX_EP_RUNTIME(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, copies->stream));
  return nullptr;
}

const char* EndBatch(CopyStream* copies) {
  if (copies->num_ended - copies->num_done == kMaxCopyBatches) {
    return Fail("more than " + std::to_string(kMaxCopyBatches) + " batches of copies");
  }
  JAX_EP_RUNTIME(cudaEventRecord(copies->EndOf(copies->num_ended + 1), copies->stream));
  ++copies->num_ended;
  return nullptr;
}

const char* NewestBatch(CopyStream* copies, uint64_t* number) {
  for (; copies->num_done < copies->num_ended; ++copies->num_done) {
    const cudaError_t state = cudaEventQuery(copies->EndOf(copies->num_done + 1));
    if (state == cudaErrorNotReady) break;
    JAX_EP_RUNTIME(state);
  }
  *number = copies->num_done;
  return nullptr;
}

const char* CloseCopies(CopyStream* stream) {
  const std::unique_ptr<CopyStream> copies(stream);
  cudaError_t first = cudaSetDevice(copies->device);
  const auto note = [&first](cudaError_t error) {
    if (first == cudaSuccess) first = error;
  };
  if (copies->stream != nullptr) {
    note(cudaStreamSynchronize(copies->stream));
    note(cudaStreamDestroy(copies->stream));
  }
  for (const cudaEvent_t end : copies->ends) {
    if (end != nullptr) note(cudaEventDestroy(end));
  }
  JAX_EP_RUNTIME(first);
  return nullptr;
}

}  // namespace jax_ep::gpu
