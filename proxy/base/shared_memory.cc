#include "proxy/base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "proxy/base/blob.h"
#include "proxy/base/descriptor.h"
#include "proxy/base/random.h"

namespace jax_ep {
namespace {

constexpr uint64_t kBlobMagic = 0x31304d4553504541;  // "AEPSEM01": bump the digits on any change
constexpr double kMebibyte = 1024.0 * 1024.0;

// The last page of a shareable mapping starts with this, so that an importer can tell that the
// descriptor still is the one that was exported.
struct Trailer {
  uint64_t magic;
  uint64_t token;
};

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t RoundUpToPage(size_t num_bytes) {
  const size_t page = PageBytes();
  return (num_bytes + page - 1) / page * page;
}

std::string ErrnoText(int error) { return std::strerror(error); }

std::string Mebibytes(uint64_t num_bytes) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(num_bytes) / kMebibyte);
  return text;
}

// First number of `path`; UINT64_MAX if there is none ("max", no such file).
uint64_t NumberInFile(const char* path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return (file >> number) ? number : UINT64_MAX;
}

// The number behind `key` in a file of "key number" lines, 0 if there is none.
uint64_t NumberOfKey(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string word;
  uint64_t number = 0;
  std::string rest;
  while (file >> word >> number) {
    if (word == key) return number;
    std::getline(file, rest);
  }
  return 0;
}

// MemAvailable of the host, or what the cgroup leaves if that is less. UINT64_MAX if unknown.
uint64_t AvailableBytes() {
  const uint64_t host_kibibytes = NumberOfKey("/proc/meminfo", "MemAvailable:");
  uint64_t available = host_kibibytes == 0 ? UINT64_MAX : host_kibibytes * 1024;
  const uint64_t limit = NumberInFile("/sys/fs/cgroup/memory.max");
  const uint64_t used = NumberInFile("/sys/fs/cgroup/memory.current");
  if (limit != UINT64_MAX && used != UINT64_MAX) {
    // Page cache counts as used, but the kernel drops it on demand.
    constexpr const char* kStat = "/sys/fs/cgroup/memory.stat";
    const uint64_t cache = NumberOfKey(kStat, "active_file") + NumberOfKey(kStat, "inactive_file");
    const uint64_t held = used > cache ? used - cache : 0;
    available = std::min(available, limit > held ? limit - held : 0);
  }
  return available;
}

Status TooLittleMemory(size_t num_bytes, const std::string& reason) {
  return ResourceExhausted("shared memory: needs " + Mebibytes(num_bytes) + ", " + reason +
                           "; lower max_tokens, recv_rows or hidden, or use fewer ranks per host");
}

// posix_fallocate of [0, num_bytes). A signal ends it with EINTR and gives back what it has, so it
// goes in pieces that are short enough to get through.
int Reserve(int fd, size_t num_bytes) {
  constexpr size_t kPieceBytes = size_t{2} << 20;
  for (size_t done = 0; done < num_bytes;) {
    const size_t piece = std::min(kPieceBytes, num_bytes - done);
    const int error = posix_fallocate(fd, static_cast<off_t>(done), static_cast<off_t>(piece));
    if (error == EINTR) continue;
    if (error != 0) return error;
    done += piece;
  }
  return 0;
}

void* Map(size_t num_bytes, int flags, int fd) {
  void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) return nullptr;
  // A child of fork must neither write here nor copy these pages; where the kernel cannot leave
  // them out, it has them and touches none.
  (void)madvise(address, num_bytes, MADV_DONTFORK);
  return address;
}

// A process that has ended may still be listed, without descriptors, until its parent has seen it.
bool HasEnded(uint64_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  if (access(folder.c_str(), F_OK) != 0) return access("/proc/self", F_OK) == 0;
  std::ifstream file(folder + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  return name_end != std::string::npos && text.compare(name_end, 3, ") Z") == 0;
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    Reset();
    bytes_ = std::exchange(other.bytes_, {});
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
    fd_ = std::exchange(other.fd_, -1);
    token_ = std::exchange(other.token_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() { Reset(); }

void SharedMemory::Reset() {
  if (!bytes_.empty()) munmap(bytes_.data(), mapped_bytes_);
  if (fd_ >= 0) close(fd_);
  bytes_ = {};
  mapped_bytes_ = 0;
  fd_ = -1;
}

Result<SharedMemory> SharedMemory::Create(size_t num_bytes, bool shareable) {
  if (num_bytes == 0) return InvalidArgument("shared memory: 0 bytes asked for");
  if (num_bytes > (SIZE_MAX >> 1)) {
    return TooLittleMemory(num_bytes, "more than an address space holds");
  }
  SharedMemory memory;
  if (!shareable) {
    memory.mapped_bytes_ = RoundUpToPage(num_bytes);
    void* address =
        Map(memory.mapped_bytes_, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1);
    if (address == nullptr) return TooLittleMemory(num_bytes, "mmap says " + ErrnoText(errno));
    memory.bytes_ = {static_cast<std::byte*>(address), num_bytes};
    return memory;
  }
  memory.mapped_bytes_ = RoundUpToPage(num_bytes) + PageBytes();
  // Asked before the pages are taken: a memfd has no size limit of its own, so posix_fallocate
  // would bring the whole host down to its last page first.
  const uint64_t available_bytes = AvailableBytes();
  if (memory.mapped_bytes_ > available_bytes) {
    return TooLittleMemory(num_bytes, "this host has " + Mebibytes(available_bytes) + " available");
  }
  memory.fd_ = memfd_create("jax_ep", MFD_CLOEXEC);
  if (memory.fd_ < 0) {
    return ResourceExhausted("shared memory: memfd_create says " + ErrnoText(errno) + "; " +
                             kMoreDescriptors);
  }
  // A memfd is made with mode 0777. Other users cannot open it through /proc anyway; nor shall they
  // if they come by a path to it.
  if (fchmod(memory.fd_, S_IRUSR | S_IWUSR) != 0) {
    return Internal("shared memory: fchmod says " + ErrnoText(errno));
  }
  if (const int error = Reserve(memory.fd_, memory.mapped_bytes_); error != 0) {
    return TooLittleMemory(num_bytes, "reserving it failed with: " + ErrnoText(error));
  }
  void* address = Map(memory.mapped_bytes_, MAP_SHARED, memory.fd_);
  if (address == nullptr) return TooLittleMemory(num_bytes, "mmap says " + ErrnoText(errno));
  memory.bytes_ = {static_cast<std::byte*>(address), num_bytes};
  JAX_EP_RETURN_IF_ERROR(DrawRandom("shared memory", &memory.token_));
  const Trailer trailer{.magic = kBlobMagic, .token = memory.token_};
  std::memcpy(memory.bytes_.data() + memory.mapped_bytes_ - PageBytes(), &trailer, sizeof(trailer));
  return memory;
}

std::string SharedMemory::Export() const {
  if (fd_ < 0) return "";
  return BlobWriter()
      .U64(kBlobMagic)
      .U64(static_cast<uint64_t>(getpid()))
      .U64(static_cast<uint64_t>(fd_))
      .U64(bytes_.size())
      .U64(token_)
      .Take();
}

Result<SharedMemory> SharedMemory::Import(std::string_view blob) {
  BlobReader reader(blob);
  const uint64_t magic = reader.U64();
  const uint64_t pid = reader.U64();
  const uint64_t fd = reader.U64();
  const uint64_t num_bytes = reader.U64();
  const uint64_t token = reader.U64();
  if (!reader.finished() || magic != kBlobMagic || num_bytes == 0 || num_bytes > (SIZE_MAX >> 1)) {
    return InvalidArgument("shared memory: " + std::to_string(blob.size()) +
                           " bytes that are not an export of this version of jax_ep");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const Status gone =
      Unavailable("shared memory: pid " + std::to_string(pid) + " has ended, or its descriptor " +
                  std::to_string(fd) +
                  " is not the one that it exported (containers: run them with one pid namespace)");
  const int imported_fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (imported_fd < 0) {
    const int error = errno;
    if (error == ENOENT && HasEnded(pid)) return gone;
    return Unavailable("shared memory: cannot open " + path + ": " + ErrnoText(error) +
                       "; the process must live, belong to the same user and share the pid "
                       "namespace (containers: run them with one pid namespace)");
  }
  SharedMemory memory;
  memory.mapped_bytes_ = RoundUpToPage(num_bytes) + PageBytes();
  // The size is checked before mapping: touching a page past the end would be SIGBUS.
  struct stat file{};
  const bool has_size = fstat(imported_fd, &file) == 0 && S_ISREG(file.st_mode) &&
                        static_cast<size_t>(file.st_size) == memory.mapped_bytes_;
  void* address = has_size ? Map(memory.mapped_bytes_, MAP_SHARED, imported_fd) : nullptr;
  const int map_errno = errno;
  close(imported_fd);
  if (!has_size) return gone;
  if (address == nullptr) return TooLittleMemory(num_bytes, "mmap says " + ErrnoText(map_errno));
  memory.bytes_ = {static_cast<std::byte*>(address), num_bytes};
  memory.token_ = token;
  Trailer trailer{};
  std::memcpy(&trailer, memory.bytes_.data() + memory.mapped_bytes_ - PageBytes(), sizeof(trailer));
  if (trailer.magic != kBlobMagic || trailer.token != token) return gone;
  return memory;
}

}  // namespace jax_ep
