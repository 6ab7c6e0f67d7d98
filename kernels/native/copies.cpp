// Copies blocks into the pool, and objects (blocks with a checksum) between memory and files. The checksum is computed in
// the same pass. Copies in memory use non-temporal stores, since most of the data would be evicted from the caches before
// it is read. `kernels/native/copies.py` calls these functions. Objects of 240 bytes and less, without the checksum, are not
// supported, since XXH3 uses another algorithm for them.

#include <immintrin.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "xxh3.h"

namespace {

using xxh3::Checksum;
using xxh3::kStripe;
using xxh3::load;

// Distance in bytes at which the source is prefetched.
constexpr int64_t kPrefetchDistance = 1024;
// The prefetch distance of loops that only read memory.
constexpr int64_t kFarPrefetchDistance = 4096;
// Bytes of the pieces in which files are read and written: they fit into the L2 cache. Each takes a system call.
constexpr int64_t kReadPiece = 128 << 10, kWrittenPiece = 512 << 10;
// Whole pages are written, because Linux reads a page first if only a part of it is written.
constexpr int64_t kPage = 4096;

struct Stripe {
  __m256i first, second;
};

Stripe copy_stripe(const uint8_t* from, uint8_t* to) {
  const Stripe stripe = {load(from), load(from + 32)};
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), stripe.first);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), stripe.second);
  return stripe;
}

void copy_stripe(const uint8_t* from, uint8_t* to, Checksum& checksum) {
  const Stripe stripe = copy_stripe(from, to);
  checksum.add_stripe(stripe.first, stripe.second);
}

void prefetch(const uint8_t* bytes, int64_t ahead = kPrefetchDistance) {
  _mm_prefetch(reinterpret_cast<const char*>(bytes) + ahead, _MM_HINT_T0);
}

// Returns how many bytes are added to a `Checksum` as whole stripes. The other 1 to 64 bytes are left for `finish`.
int64_t striped_bytes_of(int64_t num_bytes) { return (num_bytes - 1) / kStripe * kStripe; }

// Adds whole stripes to a checksum.
void add_stripes(Checksum& checksum, const uint8_t* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += kStripe) checksum.add_stripe(load(from + i), load(from + i + 32));
}

// Reads until there are `num_bytes`, or the file ends. Returns the bytes that were read, or -errno.
int64_t read_all(int file, uint8_t* to, int64_t num_bytes, int64_t position) {
  int64_t total = 0;
  while (total < num_bytes) {
    const ssize_t count = pread(file, to + total, num_bytes - total, position + total);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;
    total += count;
  }
  return total;
}

// Descriptors of the two files of objects: one has the head of each object, followed by the object's checksum, and the
// other has the rest.
struct Files {
  int heads, bodies;
  int64_t head_bytes;  // of each object, a multiple of a stripe
};
// The offset of an object in each file.
struct Position {
  int64_t head, body;
};

// Reads an object of `num_bytes` into `to`, in memory with the recorded checksum last, and computes its actual checksum into
// `digest`. `piece` is a scratch buffer for a piece of a file, or for a head and its checksum. Returns the number of bytes
// that were read, which is less than `num_bytes` if a file is too short, or -errno.
int64_t read_object(const Files& files, const Position& position, int64_t num_bytes, uint8_t* piece, uint8_t* to,
                    uint8_t* digest) {
  const int64_t head_bytes = files.head_bytes, record_bytes = head_bytes + xxh3::kDigestBytes;
  const int64_t read_bytes = read_all(files.heads, piece, record_bytes, position.head);
  if (read_bytes < 0) return read_bytes;
  memcpy(to, piece, std::min(read_bytes, head_bytes));
  if (read_bytes < record_bytes) return std::min(read_bytes, head_bytes);
  const int64_t content_bytes = num_bytes - xxh3::kDigestBytes, striped_bytes = striped_bytes_of(content_bytes);
  uint8_t recorded_digest[xxh3::kDigestBytes];
  memcpy(recorded_digest, piece + head_bytes, xxh3::kDigestBytes);
  Checksum checksum;
  add_stripes(checksum, to, std::min(head_bytes, striped_bytes));
  for (int64_t at = head_bytes; at < content_bytes;) {
    const int64_t piece_bytes = std::min(kReadPiece, content_bytes - at);
    const int64_t count = read_all(files.bodies, piece, piece_bytes, position.body + at - head_bytes);
    if (count < 0) return count;
    const int64_t copied_bytes = std::max<int64_t>(0, std::min(count / kStripe * kStripe, striped_bytes - at));
    for (int64_t i = 0; i < copied_bytes; i += kStripe) copy_stripe(piece + i, to + at + i, checksum);
    memcpy(to + at + copied_bytes, piece + copied_bytes, count - copied_bytes);
    at += count;
    if (count < piece_bytes) return at;
  }
  checksum.finish(to + content_bytes - kStripe, content_bytes, digest);
  memcpy(to + content_bytes, recorded_digest, xxh3::kDigestBytes);
  return num_bytes;
}

// Writes all parts, and modifies `parts`. Returns 0, or -errno.
int64_t write_all(int file, iovec* parts, int num_parts, int64_t position) {
  while (num_parts > 0) {
    ssize_t count = pwritev(file, parts, num_parts, position);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? -errno : -EIO;
    position += count;
    for (; num_parts > 0 && count >= static_cast<ssize_t>(parts->iov_len); ++parts, --num_parts) count -= parts->iov_len;
    if (num_parts > 0) *parts = {static_cast<uint8_t*>(parts->iov_base) + count, parts->iov_len - count};
  }
  return 0;
}

int64_t whole_pages(int64_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

// Writes a body, padded with zeros to whole pages. Stores the checksum of head and body in `digest`. Returns 0, or
// -errno.
int64_t write_body(int file, int64_t position, const uint8_t* head, int64_t head_bytes, const uint8_t* body,
                   int64_t body_bytes, uint8_t* digest) {
  static const uint8_t zeros[kPage] = {};
  Checksum checksum;
  const int64_t num_bytes = head_bytes + body_bytes, striped_bytes = striped_bytes_of(num_bytes);
  add_stripes(checksum, head, std::min(head_bytes, striped_bytes));
  for (int64_t at = 0; at < body_bytes;) {
    const int64_t end = body_bytes - at < 2 * kWrittenPiece ? body_bytes : at + kWrittenPiece;
    for (int64_t i = at; i < std::min(end, striped_bytes - head_bytes); i += kStripe) {
      prefetch(body + i, kFarPrefetchDistance);
      checksum.add_stripe(load(body + i), load(body + i + 32));
    }
    iovec parts[] = {{const_cast<uint8_t*>(body) + at, static_cast<size_t>(end - at)},
                     {const_cast<uint8_t*>(zeros), static_cast<size_t>(whole_pages(end) - end)}};
    if (const int64_t failure = write_all(file, parts, 2, position + at)) return failure;
    at = end;
  }
  uint8_t last[kStripe];  // the last 64 bytes, which may begin in the head
  for (int64_t i = 0; i < kStripe; ++i) {
    const int64_t from = num_bytes - kStripe + i;
    last[i] = from < head_bytes ? head[from] : body[from - head_bytes];
  }
  checksum.finish(last, num_bytes, digest);
  return 0;
}

// Writes records of `record_bytes` each, adjacent ones in one call. Returns 0, or -errno.
int64_t write_records(int file, uint8_t* records, int64_t record_bytes, const int64_t* positions, int64_t num_records) {
  for (int64_t start = 0, end = 1; start < num_records; start = end++) {
    while (end < num_records && positions[end] == positions[end - 1] + record_bytes) ++end;
    iovec part = {records + start * record_bytes, static_cast<size_t>((end - start) * record_bytes)};
    if (const int64_t failure = write_all(file, &part, 1, positions[start])) return failure;
  }
  return 0;
}

}  // namespace

// Copies `head` and then `body` to `target`, followed by the checksum of both. The size of the head must be a multiple of
// a stripe, both together must have more than 240 bytes, and `target` must be aligned to 32 bytes.
extern "C" void radixkv_copy_checked(const uint8_t* head, int64_t head_bytes, const uint8_t* body, int64_t body_bytes,
                                     uint8_t* target) {
  Checksum checksum;
  const int64_t num_bytes = head_bytes + body_bytes, striped_bytes = striped_bytes_of(num_bytes);
  int64_t at = 0;
  for (; at < head_bytes && at < striped_bytes; at += kStripe) copy_stripe(head + at, target + at, checksum);
  for (; at < striped_bytes; at += kStripe) {
    prefetch(body + at - head_bytes);
    copy_stripe(body + at - head_bytes, target + at, checksum);
  }
  if (at < head_bytes) memcpy(target + at, head + at, head_bytes - at);
  const int64_t start = at < head_bytes ? head_bytes : at;
  if (start < num_bytes) memcpy(target + start, body + start - head_bytes, num_bytes - start);
  checksum.finish(target + num_bytes - kStripe, num_bytes, target + num_bytes);
  _mm_sfence();  // makes the copy visible to every thread that is notified of it
}

// Reads objects of more than 256 bytes each, including the checksum, into memory aligned to 32 bytes. Stores the number of
// bytes that were read of each in `counts`, and the checksums of those that are complete in `digests`. Returns 0, or -errno
// of the failed call.
extern "C" int64_t radixkv_read_checked(int heads, int bodies, int64_t head_bytes, int64_t num_objects,
                                        const int64_t* head_positions, const int64_t* body_positions,
                                        const int64_t* sizes, uint8_t* const* targets, int64_t* counts,
                                        uint8_t* digests) {
  const Files files = {heads, bodies, head_bytes};
  const int64_t piece_bytes = std::max(kReadPiece, head_bytes + kStripe);
  uint8_t* const piece = static_cast<uint8_t*>(aligned_alloc(kStripe, piece_bytes));
  if (piece == nullptr) return -ENOMEM;
  int64_t failure = 0;
  for (int64_t i = 0; i < num_objects && failure == 0; ++i) {
    const Position position = {head_positions[i], body_positions[i]};
    counts[i] = read_object(files, position, sizes[i], piece, targets[i], digests + i * xxh3::kDigestBytes);
    failure = std::min<int64_t>(0, counts[i]);
  }
  free(piece);
  _mm_sfence();
  return failure;
}

// Writes objects: their bodies, then records of a head followed by the object's checksum; both padded with zeros to whole
// pages. The size of a head must be a multiple of a stripe, and an object must have more than 240 bytes. Returns 0, or
// -errno of the failed call.
extern "C" int64_t radixkv_write_checked(int heads, int bodies, int64_t head_bytes, int64_t num_objects,
                                         const int64_t* head_positions, const int64_t* body_positions,
                                         const uint8_t* const* head_parts, const uint8_t* const* body_parts,
                                         const int64_t* body_bytes) {
  const int64_t record_bytes = whole_pages(head_bytes + xxh3::kDigestBytes);
  uint8_t* const records = static_cast<uint8_t*>(aligned_alloc(kPage, std::max(kPage, num_objects * record_bytes)));
  if (records == nullptr) return -ENOMEM;
  memset(records, 0, num_objects * record_bytes);
  int64_t failure = 0;
  for (int64_t i = 0; i < num_objects && failure == 0; ++i) {
    uint8_t* const record = records + i * record_bytes;
    memcpy(record, head_parts[i], head_bytes);
    failure = write_body(bodies, body_positions[i], record, head_bytes, body_parts[i], body_bytes[i], record + head_bytes);
  }
  if (failure == 0) failure = write_records(heads, records, record_bytes, head_positions, num_objects);
  free(records);
  return failure;
}

// Copies each source into a block, in pieces that are `stride` bytes apart in the block. The size of a piece must be a
// multiple of a stripe, and pieces must be aligned to 32 bytes.
extern "C" void radixkv_fill(int64_t num_blocks, const uint8_t* const* sources, uint8_t* const* blocks, int64_t num_pieces,
                             int64_t piece_bytes, int64_t stride) {
  for (int64_t i = 0; i < num_blocks; ++i)
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const uint8_t* from = sources[i] + piece * piece_bytes;
      uint8_t* to = blocks[i] + piece * stride;
      for (int64_t at = 0; at < piece_bytes; at += kStripe) {
        prefetch(from + at);
        copy_stripe(from + at, to + at);
      }
    }
  _mm_sfence();
}
